"""Weights in NVFP4: MXFP4's codes, with an FP8 scale for each 16 of them and one for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.dtypes import E2M1
from vllm_module.kernels.matmul.packed_words import Packing
from vllm_module.parameters import (
    BasevLLMParameter,
    GroupQuantScaleParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)
from vllm_module.quantization.codebook import CodebookMethod
from vllm_module.quantization.demand import demand
from vllm_module.quantization.method import QuantizableLayer

BLOCK = 16  # numbers along the input that share an FP8 scale, by the format
_ADVICE = "quantize the checkpoint again"


class NVFP4Format(NamedTuple):
    """What a format calls a layer's tensors, and what the scale of all numbers means.

    Attributes:
        words, scales, whole: names of the codes, of their scales, and of the scale of all numbers.
        inputs: name of the static scale of the inputs.
        divides: whether ``whole`` divides the other scales; else they are multiplied by it.

    """

    words: str
    scales: str
    whole: str
    inputs: str
    divides: bool


COMPRESSED_TENSORS = NVFP4Format(
    "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", divides=True
)
MODELOPT = NVFP4Format("weight", "weight_scale", "weight_scale_2", "input_scale", divides=False)


@dataclass(frozen=True)
class NVFP4Method(CodebookMethod):
    """Weights in NVFP4, of linear layers or of experts, each with tensors of its own.

    Inputs are not quantized, on any device: their static scale is checked and not used.

    Attributes:
        format: names of the tensors.
        static_inputs: whether a checkpoint stores a scale of the inputs.

    """

    format: NVFP4Format
    static_inputs: bool

    packing = Packing(4)  # the first of two numbers has the low bits of a byte
    blocksize = BLOCK

    def __str__(self) -> str:
        return "NVFP4"

    @property
    def _of_all(self) -> tuple[str, ...]:
        """The names of scales that all numbers of a tensor share."""
        return (self.format.whole, *((self.format.inputs,) if self.static_inputs else ()))

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return bytes ``[output, input / 2]``, scales ``[output, input / 16]``, and those of all.

        Raises ``ShardingError`` where a row or a shard of the input ends inside a block.
        """
        if layer.experts is not None and layer.experts.together:
            raise UnsupportedModelError("experts that are stored as one tensor are not in NVFP4")
        names, output = self.format, layer.output
        layer.input.in_units(BLOCK, "block")  # none may be partial
        created: dict[str, BasevLLMParameter] = {
            names.words: PackedvLLMParameter(
                output, layer.input, packed_dim=1, packed_factor=2, **layer.common(torch.uint8)
            ),
            names.scales: GroupQuantScaleParameter(
                output, layer.input, group_size=BLOCK, **layer.common(torch.float8_e4m3fn)
            ),
        }
        for name in self._of_all:
            created[name] = PerTensorScaleParameter(output, **layer.common(torch.float32))
        return created

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        """Raise ``WeightReadError`` for scales that nothing can be multiplied by."""
        names = self.format
        rule = f"must be finite and not negative: {_ADVICE}"
        demand(
            layer.get_parameter(names.scales),
            lambda x: (x.view(torch.uint8) & 0x7F != 0x7F) & (x.float() >= 0),
            names.scales,
            rule,
        )
        rule = f"must be finite and positive, and the scales of blocks with it finite: {_ADVICE}"
        for name in self._of_all:
            demand(layer.get_parameter(name), self._is_scale, name, rule)

    def _is_scale(self, x: torch.Tensor) -> torch.Tensor:
        largest = torch.finfo(torch.float8_e4m3fn).max * 6  # of a block's numbers, before
        return x.isfinite() & (x > 0) & self._by(largest, x).isfinite()

    def _by(self, scales: torch.Tensor | float, whole: torch.Tensor) -> torch.Tensor:
        return scales / whole if self.format.divides else scales * whole

    def compute_buffers(self, layer: QuantizableLayer) -> Mapping[str, torch.Tensor]:
        """Return the values of codes, and of linear layers the scales as products take them.

        They are float32, so that a weight is the number that the format's library computes: a
        quarter of a byte a weight, which experts do without.
        """
        codebook = torch.tensor(
            E2M1, dtype=torch.float32, device=layer.get_parameter(self.format.scales).device
        )
        if layer.experts is not None:
            return {"codebook": codebook}
        return {"codebook": codebook, "scales_for_matmul": self._scales(layer)}

    def words(self, layer: QuantizableLayer) -> torch.Tensor:
        return layer.get_parameter(self.format.words)

    def scales(self, layer: QuantizableLayer) -> torch.Tensor:
        if layer.experts is None:
            return layer.get_buffer("scales_for_matmul")
        return self._scales(layer)

    def _scales(self, layer: QuantizableLayer) -> torch.Tensor:
        """Return the scales by those of their slots."""
        scales = layer.typed_parameter(self.format.scales, GroupQuantScaleParameter)
        whole = layer.get_parameter(self.format.whole)
        rows = [
            whole[..., at : at + 1].expand(*whole.shape[:-1], shard.padded)
            for at, shard in enumerate(scales.shards[-2])
        ]
        return self._by(scales.float(), torch.cat(rows, -1).unsqueeze(-1)).detach()
