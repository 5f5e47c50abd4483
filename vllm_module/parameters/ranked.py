"""The parameter of a LoRA adapter's B, whose slots may have different ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm_module.parameters.dim import Dim
from vllm_module.parameters.division import Index
from vllm_module.parameters.parameter import BasevLLMParameter, Piece
from vllm_module.weights import Weight

if TYPE_CHECKING:
    from typing_extensions import Self


class RankedColumnParameter(BasevLLMParameter):
    """B ``[output, rank]`` of a layer; a slot of a smaller rank has zeros after it.

    Args:
        output: the layer's output.
        rank: the largest of the slots' ranks.
        ranks: of each slot.
        arguments: as of :class:`~vllm_module.parameters.BasevLLMParameter`.

    """

    ranks: Mapping[str, int]

    def __new__(cls, output: Dim, rank: int, ranks: Mapping[str, int], **arguments: Any) -> Self:
        self = super().__new__(cls, output, Dim.whole(rank), **arguments)
        self.ranks = dict(ranks)
        return self

    def materialize_on(self, device: torch.device | str) -> Self:
        return self._like(torch.zeros(self.shape, dtype=self.dtype, device=device))

    def padding(self) -> Iterator[torch.Tensor]:
        yield from super().padding()
        for slot, rank in self.ranks.items():
            if rank < self.shape[-1] and 0 not in (region := super().region(slot)).shape:
                yield region.narrow(-1, rank, self.shape[-1] - rank)

    def checkpoint_shape(self, slot: str | None) -> torch.Size:
        *shape, rank = super().checkpoint_shape(slot)
        return torch.Size((*shape, rank if slot is None else self.ranks[slot]))

    def accepts(self, slot: str | None, shape: torch.Size) -> bool:
        return shape == self.checkpoint_shape(slot)

    def pieces(self, weight: Weight, slot: str | None) -> Iterator[Piece]:
        rank = self.shape[-1] if slot is None else self.ranks[slot]
        for cut in self.division.cuts(slot):
            *stored, (dim, _, _) = cut.stored
            held = cut._replace(
                stored=(*stored, (dim, 0, rank)),
                shape=torch.Size((*cut.shape[:-1], rank)),
                is_whole=cut.is_whole and rank == self.shape[-1],
            )
            yield Piece(held.source(weight), held.target(self.data), cut.at, cut.order)

    def region(self, slot: str | Index) -> torch.Tensor:
        view = super().region(slot)
        return view.narrow(-1, 0, self.ranks[slot]) if isinstance(slot, str) else view
