"""An estimate of what one token makes ranks send each other in a decode step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from vllm_module.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm_module.layers.fused_moe import FusedMoE
from vllm_module.layers.linear import ColumnParallelLinear, RowParallelLinear

_WEIGHT_AND_ID = 4 + 8  # bytes of a chosen expert's weight and number, float32 and int64


class Wire(NamedTuple):
    """Bytes between hosts for one token, by why they are sent."""

    layers: float = 0.0  # sums and gathers of tensor-parallel ranks
    experts: float = 0.0  # tokens to the ranks of experts, and what these compute
    stages: float = 0.0  # hidden states to the next pipeline stage

    def plus(self, other: Wire) -> Wire:
        """Add up two, by why they are sent."""
        return Wire(*(one + two for one, two in zip(self, other, strict=True)))


@dataclass(frozen=True)
class TokenMessages:
    """Bytes of the tensors that ranks exchange for one token, each as a collective returns it.

    ``summed`` and ``gathered`` are those of a tensor-parallel group. Where each rank has tokens of
    its own, ``expert_summed`` and ``expert_gathered`` are those of the ranks that experts are
    spread over. ``passed`` is what a pipeline stage sends the next one.
    """

    summed: int
    gathered: int
    expert_summed: int
    expert_gathered: int
    passed: int

    @staticmethod
    def of(model: nn.Module, hidden_size: int, itemsize: int) -> TokenMessages:
        """Count the collectives of a model's layers, whose activations have ``itemsize`` bytes.

        Not counted: sums of one number a token in norms that are cut, and what models of
        transformers exchange outside of our layers. A stage passes on two rows, hidden states and
        residual; Mamba-2 one, of float32.
        """
        summed = gathered = expert_summed = expert_gathered = 0
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                summed += module.input.size
            elif isinstance(module, ParallelLMHead):
                gathered += sum(slot.padded for slot in module.output.slots)
            elif isinstance(module, RowParallelLinear) and module.reduce_results:
                summed += module.output.size
            elif isinstance(module, ColumnParallelLinear) and module.gather_output:
                gathered += module.output.size
            elif isinstance(module, FusedMoE):
                if module.expert_group is None or module.expert_group.own_tokens is None:
                    summed += hidden_size
                    continue
                expert_summed += hidden_size * itemsize
                expert_gathered += hidden_size * itemsize + module.top_k * _WEIGHT_AND_ID
        return TokenMessages(
            summed * itemsize,
            gathered * itemsize,
            expert_summed,
            expert_gathered,
            2 * hidden_size * itemsize,
        )

    def layers(self, ranks: int) -> float:
        """Return what crosses each link of a ring of tensor-parallel ranks.

        A ring of ``n`` ranks sends ``2 (n - 1) / n`` times a tensor over each of its links to sum
        it, and ``(n - 1) / n`` times to gather it: the factors by which NVIDIA's nccl-tests turn
        time into bus bandwidth (``doc/PERFORMANCE.md``). Trees and switches that add up send less.
        """
        return (2 * self.summed + self.gathered) * (ranks - 1) / ranks

    def experts(self, ranks: int, copies: int) -> float:
        """Return the same for ranks that experts are spread over, as our layer exchanges tokens.

        It gathers the tokens of all ranks and sums what their experts compute; ``copies`` ranks
        have a token, and send it each. An all-to-all would send a token to its experts alone.
        """
        sent = 2 * self.expert_summed + self.expert_gathered
        return sent * copies * (ranks - 1) / ranks
