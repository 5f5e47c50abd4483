"""Weights in MXFP4: four bits a number, and a power of two for each 32 of them in a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.dtypes import E2M1
from vllm_module.kernels.experts.grouped_matmul_mxfp4 import dequantize_mxfp4, grouped_matmul_mxfp4
from vllm_module.kernels.matmul.packed_matmul import packed_matmul
from vllm_module.kernels.matmul.packed_words import Packing
from vllm_module.parameters import (
    BasevLLMParameter,
    Dim,
    GroupQuantScaleParameter,
    PackedvLLMParameter,
)
from vllm_module.quantization.demand import demand
from vllm_module.quantization.method import QuantizableLayer, QuantizeMethod
from vllm_module.quantization.rows import ExpertRows

BLOCK = 32  # numbers along the input that share a scale, by the format
_BYTES = 16  # of a block
_PACKING = Packing(4)  # the first of two numbers has the low bits of a byte


@dataclass(frozen=True)
class MXFP4Method(QuantizeMethod):
    """Weights of experts in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss stores them.

    A checkpoint stores them as ``[experts, output, input]``, even if it stores them in another
    order in full precision. The product dequantizes them.
    """

    names: ClassVar = ("weight_blocks", "weight_scales")  # of codes and scales

    def __str__(self) -> str:
        return "MXFP4"

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return ``weight_blocks [experts, output, input / 32, 16]`` and ``weight_scales``.

        Raises ``ShardingError`` where a shard of the input ends inside a block.
        """
        if layer.experts is None:
            raise UnsupportedModelError("expected experts: other layers are not stored in MXFP4")
        blocks = layer.input.in_units(BLOCK, "block")
        common = layer.common(torch.uint8)
        return {
            "weight_blocks": BasevLLMParameter(layer.output, blocks, Dim.whole(_BYTES), **common),
            "weight_scales": BasevLLMParameter(layer.output, blocks, **common),
        }

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        """Raise ``WeightReadError`` for a scale of 255, which makes a block NaN."""
        name = self.names[1]
        rule = "255 stands for NaN, and scales must be finite: quantize the checkpoint again"
        demand(layer.get_parameter(name), lambda scales: scales != 255, name, rule)

    def full_precision(
        self, layer: QuantizableLayer, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return dequantize_mxfp4(*self._blocks(layer), dtype or layer.params_dtype)

    def apply(
        self, layer: QuantizableLayer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        raise NotImplementedError("gpt-oss stores only experts in MXFP4")

    def apply_experts(self, layer: QuantizableLayer, rows: ExpertRows) -> torch.Tensor:
        return rows.product(grouped_matmul_mxfp4, *self._blocks(layer))

    def _blocks(self, layer: QuantizableLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks ``[..., input / 32, 16]`` and their scales."""
        blocks, scales = map(layer.get_parameter, self.names)
        return blocks, scales


@dataclass(frozen=True)
class MXFP4PackedMethod(MXFP4Method):
    """Weights in MXFP4 as compressed-tensors stores them (``mxfp4-pack-quantized``).

    They are those of linear layers or of experts, each with a tensor of its own. Inputs are not
    quantized, on any device.
    """

    names = ("weight_packed", "weight_scale")

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return ``weight_packed [output, input / 2]`` and ``weight_scale [output, input / 32]``.

        Raises ``ShardingError`` where a row or a shard of the input ends inside a block.
        """
        layer.input.in_units(BLOCK, "block")  # none may be partial
        common = layer.common(torch.uint8)
        return {
            "weight_packed": PackedvLLMParameter(
                layer.output, layer.input, packed_dim=1, packed_factor=2, **common
            ),
            "weight_scale": GroupQuantScaleParameter(
                layer.output, layer.input, group_size=BLOCK, **common
            ),
        }

    def compute_buffers(self, layer: QuantizableLayer) -> Mapping[str, torch.Tensor]:
        """Return the values of codes, and the scales: bfloat16, which holds each power of two."""
        if layer.experts is not None:
            return {}
        scales = layer.get_parameter("weight_scale").data
        return {
            "codebook": torch.tensor(E2M1, dtype=torch.float32, device=scales.device),
            "scales_for_matmul": scales.view(torch.float8_e8m0fnu).to(torch.bfloat16),
        }

    def apply(
        self, layer: QuantizableLayer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        words, scales = layer.get_parameter("weight_packed"), layer.get_buffer("scales_for_matmul")
        codebook = layer.get_buffer("codebook")
        return packed_matmul(x, words, scales, _PACKING, BLOCK, codebook=codebook, bias=bias)

    def _blocks(self, layer: QuantizableLayer) -> tuple[torch.Tensor, torch.Tensor]:
        words, scales = super()._blocks(layer)
        return words.view(*words.shape[:-1], words.shape[-1] // _BYTES, _BYTES), scales
