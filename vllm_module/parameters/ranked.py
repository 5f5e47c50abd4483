"""The parameter of a LoRA adapter's B, whose slots may have different ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from vllm_module.parameters.dim import Dim, Experts
from vllm_module.parameters.division import Index
from vllm_module.parameters.parameter import BasevLLMParameter, Piece
from vllm_module.weights import Weight

if TYPE_CHECKING:
    from typing_extensions import Self


class RankedColumnParameter(BasevLLMParameter):
    """B ``[output, rank]`` of a layer; a slot of a smaller rank has zeros after it.

    Args:
        output: the layer's output.
        ranks: of each slot of it, for all experts; or one, of all slots.

    """

    ranks: tuple[int, ...]

    def __new__(
        cls,
        output: Dim,
        *,
        ranks: Sequence[int],
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        experts: Experts | None = None,
    ) -> Self:
        dims = output, Dim.whole(max(ranks))
        self = super().__new__(
            cls, *dims, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, experts=experts
        )
        self.ranks = tuple(ranks)
        return self

    def rank(self, slot: str | None) -> int:
        """Return the rank of a slot; of all slots as one tensor, the largest."""
        index = self.division.index_of(slot)[-2]
        return max(self.ranks) if len(self.ranks) == 1 or index is None else self.ranks[index]

    def padding(self) -> Iterator[torch.Tensor]:
        yield from super().padding()
        most = max(self.ranks)
        for slot in self.slots if min(self.ranks) < most else ():
            rank, region = self.rank(slot), super().region(slot)
            if rank < most and region.numel():
                yield region.narrow(-1, rank, most - rank)

    def checkpoint_shape(self, slot: str | None) -> torch.Size:
        return torch.Size((*super().checkpoint_shape(slot)[:-1], self.rank(slot)))

    def accepts(self, slot: str | None, shape: torch.Size) -> bool:
        return shape == self.checkpoint_shape(slot)

    def pieces(self, weight: Weight, slot: str | None) -> Iterator[Piece]:
        rank = self.rank(slot)
        if rank == self.shape[-1]:
            yield from super().pieces(weight, slot)
            return
        for cut in self.division.cuts(slot):
            *stored, (dim, _, _) = cut.stored
            held = cut._replace(
                stored=(*stored, (dim, 0, rank)),
                shape=torch.Size((*cut.shape[:-1], rank)),
                is_whole=False,
            )
            yield Piece(held.source(weight), held.target(self.data), cut.at, cut.order)

    def region(self, slot: str | Index) -> torch.Tensor:
        view = super().region(slot)
        return view.narrow(-1, 0, self.rank(slot)) if isinstance(slot, str) else view
