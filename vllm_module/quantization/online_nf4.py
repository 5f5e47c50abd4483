"""Quantizing weights to NF4 piece by piece while they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from vllm_module.kernels.rows.quantize_nf4 import NF4, quantize_nf4
from vllm_module.parameters import BasevLLMParameter, PackedModelWeightParameter
from vllm_module.quantization.codebook import AbsmaxMethod
from vllm_module.quantization.method import QuantizableLayer, StoredTensor
from vllm_module.quantization.online import QuantizeGroups, finish_online


class OnlineNF4Method(AbsmaxMethod):
    """A full-precision weight that is quantized to NF4 while it is loaded."""

    def __str__(self) -> str:
        return f"NF4 in blocks of {self.blocksize}, quantized while loading"

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return ``weight`` and ``absmax``.

        Raises ``ShardingError`` where a row or a shard of the input ends inside a block.
        """
        blocks = layer.input.in_units(self.blocksize, "scale block")
        weight = PackedModelWeightParameter(
            layer.output,
            layer.input,
            packed_factor=2,
            transposed=layer.transposed,
            **layer.common(torch.uint8),
        )
        absmax = BasevLLMParameter(layer.output, blocks, **layer.common(torch.float32))
        return {"weight": weight, "absmax": absmax}

    def stored(self, layer: QuantizableLayer) -> Mapping[str, StoredTensor]:
        convert = _conversion(self.blocksize, layer.params_dtype, layer.transposed)
        return {"weight": StoredTensor(conversion=convert)}

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        finish_online(layer, "absmax")

    def compute_buffers(self, layer: QuantizableLayer) -> Mapping[str, torch.Tensor]:
        return {"codebook": torch.tensor(NF4, dtype=torch.float32, device=layer.weight.device)}


class QuantizeNF4(QuantizeGroups):
    """The conversion of a full-precision ``weight`` into codes and ``absmax``."""

    makes: Sequence[str] = ("absmax",)

    def quantize(self, wide: torch.Tensor, words: torch.Tensor, scales: torch.Tensor) -> None:
        quantize_nf4(wide, words, scales, self.group_size)

    def bound(self, groups: torch.Tensor) -> torch.Tensor:
        """Return how far each number is from the nearest that a code stands for.

        The rounding of float32 arithmetic may choose its neighbour where both are about as near.
        """
        largest = groups.abs().amax(-1, keepdim=True)
        levels = torch.tensor(NF4, dtype=torch.float32, device=groups.device)
        distances = (groups.unsqueeze(-1) - levels * largest.unsqueeze(-1)).abs()
        return distances.amin(-1) + largest * 2.0**-21


_conversion = lru_cache(maxsize=64)(QuantizeNF4)  # layers alike share it
