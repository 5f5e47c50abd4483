"""Experts of a layer that are spread over ranks, and which rank computes a token's expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.distributed import (
    SimulatedGroup,
    TensorParallelGroup,
    expert_parallel_group,
    tensor_parallel_group,
)
from vllm_module.errors import ShardingError
from vllm_module.kernels.experts.sort_by_expert import sort_by_expert
from vllm_module.parameters import BasevLLMParameter, Experts, places_of


class PlacedExperts(vLLMModule):
    """The experts of a layer, of which this rank keeps and computes some.

    Where each expert is, its ``placement`` says. What the parameters hold follows from it, and
    which tokens this rank computes.

    Args:
        count: number of all experts.
        together: True if a checkpoint stores them only as one tensor.

    Attributes:
        experts: all of them, and which ones this rank keeps.
        expert_group: the ranks over which they are spread; ``None`` if each expert is cut over the
            tensor-parallel ranks.
        cut_group: the ranks that each expert is cut over.
        places: int32 ``[count + 1]``, where each expert is among this rank's, or -1; the last is of
            no expert. With experts that have several places ``[3, count + 1]``: the number of this
            rank's place among the expert's, and how many it has, follow. It is ``None`` on one
            rank, which keeps all of them in order. Its memory stays when experts move.
        counts: int64 ``[count + 1]`` to add the tokens of each expert to, if set; the last is of
            no expert.

    """

    places: torch.Tensor | None
    counts: torch.Tensor | None = None

    def __init__(self, count: int, together: bool) -> None:
        super().__init__()
        self.tp_group = tensor_parallel_group()
        self.expert_group = expert_parallel_group()
        self.cut_group: TensorParallelGroup = self.tp_group
        self.experts = Experts(count, 0, 1, together)
        if (group := self.expert_group) is not None:
            self.cut_group = SimulatedGroup(0, 1)
            if group.redundant > (most := count * (group.ranks.size - 1)):
                raise ShardingError(
                    f"{group.redundant} redundant experts: with one on each rank, "
                    f"{group.ranks.size} ranks have places for {most} beside the {count} experts"
                )
            placed = tuple(place % count for place in range(count + group.redundant))
            self.experts = Experts(count, group.ranks.rank, group.ranks.size, together, placed)
        self.register_buffer("places", None, persistent=False)
        if self.experts.size > 1:
            self._write_places()

    def place_experts(self, placement: Sequence[int] | None) -> None:
        """Declare where each expert is; see :class:`~vllm_module.parameters.Experts`.

        Values stay where they are: load the weights afterwards, or move them.

        Raises ``ShardingError`` for a placement of other places, or without one of the experts.
        """
        experts = replace(self.experts, placement=None if placement is None else tuple(placement))
        if experts.places != self.experts.places:
            raise ShardingError(
                f"a placement has {experts.places} places, and the layer's experts have "
                f"{self.experts.places}: their number stays"
            )
        before, modules = self.experts, list[Any](self.modules())
        for module in modules:
            if getattr(module, "experts", None) is before:
                module.experts = experts
            for parameter in module.parameters(recurse=False):
                if isinstance(parameter, BasevLLMParameter) and parameter.experts is not None:
                    parameter.place_experts(experts)
        self._write_places()

    def _write_places(self) -> None:
        table = _table(self.experts)
        if self.places is None:
            self.places = table.to(self.load_state.device)
        else:
            self.places.copy_(table)

    def sorted_rows(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort tokens by this rank's experts; see :func:`sort_by_expert`.

        ``chosen`` has the experts of each token, int32 ``[tokens, top_k]``; -1 is none. Of an
        expert's places the tokens take turns.
        """
        if self.counts is not None:
            numbers = chosen.flatten().long()
            numbers = numbers.where(numbers >= 0, self.experts.count)
            self.counts.scatter_add_(0, numbers, torch.ones_like(numbers))
        if self.places is not None and self.places.dim() == 1:
            chosen = self.places[chosen]
        elif self.places is not None:
            here, turn, copies = self.places[:, chosen]
            token = torch.arange(len(chosen), dtype=torch.int32, device=chosen.device)
            chosen = torch.where(token.unsqueeze(1) % copies == turn, here, -1)
        return sort_by_expert(chosen, 0, len(self.experts.kept))


def _table(experts: Experts) -> torch.Tensor:
    """Return the values of :attr:`PlacedExperts.places`."""
    here = {expert: at for at, expert in enumerate(experts.kept)}
    placed = [*(here.get(expert, -1) for expert in range(experts.count)), -1]
    if experts.placement is None or experts.places == experts.count:
        return torch.tensor(placed, dtype=torch.int32, device="cpu")
    first = places_of(experts.rank, experts.size, experts.places).start
    before, copies = Counter(experts.placement[:first]), Counter(experts.placement)
    turns = [*(before[expert] for expert in range(experts.count)), 0]
    numbers = [*(copies[expert] for expert in range(experts.count)), 1]
    return torch.tensor([placed, turns, numbers], dtype=torch.int32, device="cpu")
