"""A parameter with a vector along the input features for each slot of a fused layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from vllm_module.parameters.dim import Dim, Experts, Slot
from vllm_module.parameters.division import division_of
from vllm_module.parameters.parameter import BasevLLMParameter, Piece
from vllm_module.weights import Weight

if TYPE_CHECKING:
    from typing_extensions import Self


class PerSlotVectorParameter(BasevLLMParameter):
    """A vector ``[input]`` for each slot of the output, such as an activation order.

    Its shape is ``[slots * input]``, and it is cut like ``input``, which is not fused. A checkpoint
    stores a slot's vector as ``[input]``. A single vector of a fused tensor fills all slots.
    """

    input: Dim

    def __new__(
        cls,
        output: Dim,
        input: Dim,
        *,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        experts: Experts | None = None,
    ) -> Self:
        (features,) = input.slots
        names = output.names or ("",)  # slots that are never stored apart share one vector
        slots = [Slot(name, features.size, features.parts, features.padded) for name in names]
        self = super().__new__(
            cls, Dim(tuple(slots)), tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, experts=experts
        )
        self.input = input
        return self

    def vectors(self) -> torch.Tensor:
        """Return the vector of each slot that this rank holds: ``[..., slots, input]``."""
        *experts, length = self.shape
        slots = len(self.dims[-1].slots)
        return self.detach().view(*experts, slots, length // slots)

    def accepts(self, slot: str | None, shape: torch.Size) -> bool:
        return self._is_of_all(slot, shape) or super().accepts(slot, shape)

    def _is_of_all(self, slot: str | None, shape: torch.Size) -> bool:
        experts = () if self.experts is None else (self.experts.count,)
        return slot is None and shape == (*experts, self.input.size)

    def pieces(self, weight: Weight, slot: str | None) -> Iterator[Piece]:
        if not self._is_of_all(slot, weight.shape):
            yield from super().pieces(weight, slot)
            return
        one = division_of((self.input,), self.tp_rank, self.tp_size, self.experts, False)
        for at, shard in enumerate(self.shards[-1]):
            for cut in one.cuts(None):
                moved = cut._replace(
                    starts=(*cut.starts[:-1], cut.starts[-1] + shard.offset),
                    at=(*cut.at[:-1], at),
                    is_whole=False,
                )
                yield Piece(moved.source(weight), moved.target(self.data), moved.at, moved.order)
