"""Parameters that checkpoints store as vectors, such as those of bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from vllm_module.parameters.dim import Dim, Experts, Slot
from vllm_module.parameters.division import Cut
from vllm_module.parameters.parameter import BasevLLMParameter, Piece
from vllm_module.parameters.stored_order import StoredOrder
from vllm_module.weights import Weight

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from vllm_module.parameters.classes import More


class FlattenedParameter(BasevLLMParameter):
    """A matrix ``[output, input]`` that a checkpoint stores row after row, in one dimension.

    Args:
        column: True if a checkpoint's vector has a second dimension, of one entry.

    """

    column: bool

    def __new__(
        cls,
        output: Dim,
        input: Dim,
        *,
        column: bool,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        experts: Experts | None = None,
    ) -> Self:
        self = super().__new__(
            cls, output, input, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, experts=experts
        )
        self.column = column
        return self

    def checkpoint_shape(self, slot: str | None) -> torch.Size:
        *before, rows, entries = self.division.stored_shape(slot)
        return torch.Size((*before, rows * entries, *((1,) if self.column else ())))

    def accepts(self, slot: str | None, shape: torch.Size) -> bool:
        return shape == self.checkpoint_shape(slot)

    def pieces(self, weight: Weight, slot: str | None) -> Iterator[Piece]:
        matrix = self.division.stored_shape(slot)
        view: Any = weight
        if isinstance(weight, torch.Tensor):
            view = weight.reshape(matrix)
        elif hasattr(weight, "view"):
            view = view.view(matrix)
        else:  # such a handle can only be narrowed to whole rows before it is read
            for cut in self.division.cuts(slot):
                source, order = _of_rows(weight, matrix, cut)
                yield Piece(source, cut.target(self.data), cut.at, order)
            return
        yield from super().pieces(view, slot)


def _of_rows(weight: Weight, matrix: torch.Size, cut: Cut) -> tuple[Weight, StoredOrder]:
    """Narrow the vector ``weight`` to the rows of ``cut``; return it and the order to restore."""
    at, entries = len(matrix) - 2, matrix[-1]
    kept = 0, entries
    for dim, start, length in cut.stored:
        if dim > at:
            kept = start, length
        elif length != matrix[dim]:
            unit = entries if dim == at else 1
            weight = weight.narrow(dim, start * unit, length * unit)
    return weight, (cut.order or StoredOrder())._replace(flat=(at, entries, *kept))


class PerTensorTableParameter(BasevLLMParameter):
    """A table of ``length`` entries for each slot of the output, the same on every rank.

    Its shape is ``[slots * length]``. A checkpoint stores a slot's table as ``[length]``. A single
    table of a fused tensor fills all slots; slots that are never stored apart share one.

    Args:
        shorter: True if a checkpoint may store fewer entries; zeros are added at the end.

    """

    length: int
    shorter: bool

    def __new__(
        cls,
        output: Dim,
        *,
        length: int,
        shorter: bool = False,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        **more: Unpack[More],
    ) -> Self:
        tables = Dim(tuple(Slot(name, length) for name in output.names or ("",)))
        self = super().__new__(cls, tables, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more)
        self.length, self.shorter = length, shorter
        return self

    def tables(self, slot: str) -> torch.Tensor:
        """Return this rank's tables of ``slot``, ``[tables, length]``."""
        return self.region(slot).reshape(-1, self.length)

    def accepts(self, slot: str | None, shape: torch.Size) -> bool:
        return self._is_table(shape) or super().accepts(slot, shape)

    def _is_table(self, shape: torch.Size) -> bool:
        least = 1 if self.shorter else self.length
        return len(shape) == 1 and least <= shape[0] <= self.length

    def pieces(self, weight: Weight, slot: str | None) -> Iterator[Piece]:
        if not self._is_table(weight.shape):
            yield from super().pieces(weight, slot)
            return
        order = None if weight.shape[0] == self.length else StoredOrder(filled=self.length)
        for index in self.division.kept(self.division.index_of(slot)):
            yield Piece(weight, self.region(index).view(self.length), index, order)
