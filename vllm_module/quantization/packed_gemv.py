"""AWQ's weights in AutoAWQ's GEMV layout, whose zeros share words along the groups of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from vllm_module.kernels.matmul.packed_words import Packing, unpack
from vllm_module.parameters import BasevLLMParameter, Dim, PackedvLLMParameter
from vllm_module.quantization.method import QuantizableLayer
from vllm_module.quantization.packed import PackedFormat, PackedMethod

AWQ_GEMV = PackedFormat("AWQ GEMV", "qweight", "scales", "qzeros", "")
# A row of zeros has a multiple of so many words, by the size of groups; of larger ones 1.
_MULTIPLES = {32: 4, 64: 2}


@dataclass(frozen=True)
class GEMVMethod(PackedMethod):
    """Words, scales and zeros are ``[output, ...]``, the latter two padded to whole words.

    A word of zeros has eight groups, which may be those of several ranks: each rank holds all.
    """

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return words, scales (float32) and zeros.

        Raises ``ShardingError`` where a row or a shard of the input ends inside a group.
        """
        assert self.group_size is not None
        layer.input.in_units(self.group_size, "scale group")
        multiple = 8 * _MULTIPLES.get(self.group_size, 1)
        groups = -(-layer.input.size // (self.group_size * multiple)) * multiple
        names, output, integers = self.format, layer.output, layer.common(torch.int32)
        floats = layer.common(torch.float32)
        return {
            names.words: PackedvLLMParameter(
                output, layer.input, packed_dim=1, packed_factor=8, **integers
            ),
            names.scales: BasevLLMParameter(output, Dim.whole(groups), **floats),
            names.zeros: BasevLLMParameter(output, Dim.whole(groups // 8), **integers),
        }

    def compute_buffers(self, layer: QuantizableLayer) -> Mapping[str, torch.Tensor]:
        """Return scales and zeros of the groups of this rank's inputs."""
        assert self.group_size is not None
        scales, words = map(layer.get_parameter, (self.format.scales, self.format.zeros))
        zeros = unpack(words.detach().flatten(0, -2), Packing(self.bits)).view(scales.shape)
        (shard,) = layer.input.shards(layer.tp_group.rank, layer.tp_group.size)
        first, count = shard.start // self.group_size, shard.length // self.group_size
        padding = 0, shard.padded // self.group_size - count
        return {
            "zeros_for_matmul": F.pad(zeros.narrow(-1, first, count), padding),
            "scales_for_matmul": F.pad(scales.detach().narrow(-1, first, count), padding),
        }

    def _operands(
        self, layer: QuantizableLayer
    ) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None, torch.Tensor | None]:
        words, _, size, zeros, group_of = super()._operands(layer)
        return words, layer.get_buffer("scales_for_matmul"), size, zeros, group_of
