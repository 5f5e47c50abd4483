"""Four bits per group while loading: each piece is rounded and packed as soon as it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from vllm_module.errors import ShardingError
from vllm_module.kernels.matmul.packed_words import dequantize_packed
from vllm_module.parameters import (
    BasevLLMParameter,
    GroupQuantScaleParameter,
    PackedModelWeightParameter,
)
from vllm_module.quantization.method import QuantizableLayer, StoredTensor
from vllm_module.quantization.online import QuantizeGroups, finish_online
from vllm_module.quantization.packed import PackedFormat, PackedMethod
from vllm_module.quantization.rows import rows_at

_BITS = 4
_FORMAT = PackedFormat("int4", "weight", "weight_scale", "", "")


@dataclass(frozen=True)
class OnlinePackedMethod(PackedMethod):
    """Symmetric weights of four bits, rounded to the nearest while they are loaded.

    Words and scales are those that compressed-tensors computes and stores as ``weight_packed`` and
    ``weight_scale``, except that quotients are not rounded to 16 bits before they are rounded to
    whole numbers.
    """

    format: PackedFormat = _FORMAT
    bits: int = _BITS
    group_size: int = 128

    def __str__(self) -> str:
        return f"int4 with a scale for {self.group_size} inputs, quantized while loading"

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return ``weight``, which holds words, and ``weight_scale`` (float32).

        Raises ``ShardingError`` if a slot or shard of the input is no number of whole groups.
        """
        for slot in layer.input.slots:
            if slot.size % self.group_size:
                raise ShardingError(
                    f"{slot.label} of {slot.size} inputs is no number of whole groups of "
                    f"{self.group_size}. Take another group_size, or leave the layer out by ignore "
                    "(QuantizationConfig, or --group-size and --ignore of vllm-module convert)"
                )
        weight = PackedModelWeightParameter(
            layer.output,
            layer.input,
            packed_factor=32 // _BITS,
            transposed=layer.transposed,
            **layer.common(torch.int32),
        )
        scale = GroupQuantScaleParameter(
            layer.output, layer.input, group_size=self.group_size, **layer.common(torch.float32)
        )
        return {"weight": weight, "weight_scale": scale}

    def stored(self, layer: QuantizableLayer) -> Mapping[str, StoredTensor]:
        convert = _conversion(self.group_size, layer.params_dtype, layer.transposed)
        return {"weight": StoredTensor(conversion=convert)}

    def embed(self, layer: QuantizableLayer, ids: torch.Tensor, count: int) -> torch.Tensor:
        words, scales, size, *_ = self._operands(layer)
        words, scales = rows_at(words, ids, count), rows_at(scales, ids, count)
        flat = words.flatten(0, -2), scales.flatten(0, -2)
        embedded = dequantize_packed(*flat, self.packing, size, layer.params_dtype)
        return embedded.view(*ids.shape, -1)

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        finish_online(layer, "weight_scale")


def scales_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the float32 scales of groups with these largest absolute values.

    A scale is half of the range of 15 steps, as in compressed-tensors, rounded to ``dtype``, so
    that a checkpoint can store it. Of zeros it is the dtype's epsilon.
    """
    # Divide by a tensor: for a number, CUDA would multiply by its reciprocal.
    scales = (largest.float() / torch.full_like(largest, 7.5, dtype=torch.float32)).to(dtype)
    return scales.masked_fill(scales == 0, torch.finfo(dtype).eps).float()


class PackOnline(QuantizeGroups):
    """The conversion of a full-precision ``weight`` into words of four-bit codes and scales."""

    makes: Sequence[str] = ("weight_scale",)

    def quantize(self, wide: torch.Tensor, words: torch.Tensor, scales: torch.Tensor) -> None:
        groups = wide.reshape(*scales.shape, -1)
        scales.copy_(scales_of(groups.abs().amax(-1), self.dtype))
        # A number that is not finite gets any code: its scale is not finite either, and is refused.
        quotients = (groups.float() / scales.unsqueeze(-1)).round_().clamp_(-8, 7)
        codes = quotients.add_(8).to(torch.uint8).reshape(len(words), -1)
        pairs = codes[:, 0::2] | codes[:, 1::2] << 4
        words.copy_(pairs.contiguous().view(torch.int32))  # rows may be stored as columns

    def bound(self, groups: torch.Tensor) -> torch.Tensor:
        """Return half of the group's scale, or what is beyond seven scales, the largest number.

        Both include the rounding of the float32 arithmetic.
        """
        groups = groups.abs()
        scales = scales_of(groups.amax(-1), self.dtype).unsqueeze(-1)
        return torch.maximum(scales / 2, groups - 7 * scales) + 2.0**-20 * groups


_conversion = lru_cache(maxsize=64)(PackOnline)  # layers alike share it
