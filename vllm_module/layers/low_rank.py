"""A and B of one LoRA adapter for one layer, on this rank."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LowRankPart(NamedTuple):
    """The A and B of one slot, as ranges of the tensors of all slots.

    Attributes:
        rank: rows of A.
        output: rows of B, and features of the layer's product.
        scale: factor of B A.

    """

    rank: slice
    output: slice
    scale: float


class LowRank(NamedTuple):
    """What one adapter adds to one layer of this rank.

    Attributes:
        a: ``[ranks, input]``, of all slots one after the other; of experts, ``[experts, …]``.
        b: ``[output, rank]``, or ``[experts, output, rank]``.
        parts: where each slot's are; absent ones lack.
        ends: where the slots of the layer's output end.

    """

    a: torch.Tensor
    b: torch.Tensor
    parts: tuple[LowRankPart, ...]
    ends: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The largest rank of a slot."""
        return max(part.rank.stop - part.rank.start for part in self.parts)

    def add(self, x: torch.Tensor, y: torch.Tensor, expert: int | None = None) -> None:
        """Add to ``y [rows, output]``, in place, what the adapter computes of ``x [rows, input]``.

        ``expert`` is the number of the rows' expert among this rank's.
        """
        a, b = (self.a, self.b) if expert is None else (self.a[expert], self.b[expert])
        self._add_product(torch.mm(x, a.t()), b, y)

    def add_columns(self, tokens: torch.Tensor, y: torch.Tensor) -> None:
        """Add to ``y [rows, features]`` what an embedding's adapter has for ``tokens [rows]``."""
        self._add_product(self.a.index_select(1, tokens).t(), self.b, y)

    def _add_product(self, low: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> None:
        for rank, output, scale in self.parts:
            size = rank.stop - rank.start
            y[:, output].addmm_(low[:, rank], b[output, :size].t(), alpha=scale)
