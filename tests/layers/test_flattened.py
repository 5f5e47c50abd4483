"""Matrices that a checkpoint stores as vectors: torch's view and narrow say what a rank keeps."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from vllm_module.parameters import Dim, Experts, FlattenedParameter, Slot
from vllm_module.weights import read_into
from vllm_module.weights.handle import TensorHandle

ROWS, COLUMNS = 6, 4
EXPERTS = [None, Experts(3, 0, 1), Experts(3, 1, 2), Experts(3, 0, 2)]


class Narrowed:
    """A handle that can only be narrowed and read; it counts the elements that are read."""

    def __init__(self, tensor: torch.Tensor, read: list[int]) -> None:
        self._tensor, self._read = tensor, read
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def narrow(self, dim: int, start: int, length: int) -> Narrowed:
        return Narrowed(self._tensor.narrow(dim, start, length), self._read)

    def read(self) -> torch.Tensor:
        self._read.append(self._tensor.numel())
        return self._tensor.clone()

    def read_into(self, destination: torch.Tensor) -> None:
        destination.copy_(self.read())


@pytest.mark.parametrize("column", [False, True], ids=["vector", "one column"])
@pytest.mark.parametrize("experts", EXPERTS, ids=str)
@pytest.mark.parametrize("cut", ["rows", "columns", "both", "neither"])
def test_a_rank_keeps_its_part_of_the_matrix(
    cut: str, experts: Experts | None, column: bool
) -> None:
    """Of all experts together or of each alone, from a tensor or any handle, on either rank."""
    tall = cut in ("rows", "both")
    output = Dim((Slot("a", 4, 2), Slot("b", 2, 2))) if tall else Dim((Slot("a", 4), Slot("b", 2)))
    wide = Dim.cut(COLUMNS, 2) if cut in ("columns", "both") else Dim.whole(COLUMNS)
    for rank, opened in product(range(2), (torch.clone, handle_of, narrowed)):
        parameter = FlattenedParameter(
            output, wide, column=column, tp_rank=rank, tp_size=2, dtype=torch.float32,
            experts=experts,
        )  # fmt: skip
        count = 1 if experts is None else experts.count
        whole = torch.arange(float(count * ROWS * COLUMNS)).view(count, ROWS, COLUMNS)
        kept = whole if experts is None else whole[list(experts.kept)]
        if cut in ("columns", "both"):
            kept = kept.chunk(2, -1)[rank]
        if tall:
            kept = torch.cat([each.chunk(2, -2)[rank] for each in kept.split([4, 2], -2)], -2)
        kept = kept[0] if experts is None else kept

        fused = whole[0] if experts is None else whole
        slots: dict[str | None, torch.Tensor] = {None: fused}
        numbers = [""] if experts is None else [f"{number}." for number in range(count)]
        alone: dict[str | None, torch.Tensor] = {
            f"{number}{slot}": part
            for number, matrix in zip(numbers, whole, strict=True)
            for slot, part in zip("ab", matrix.split([4, 2]), strict=True)
        }
        for stored in (slots, alone):
            real = parameter.materialize_on("cpu")
            for name, matrix in stored.items():
                vector = matrix.reshape(*matrix.shape[:-2], -1, *((1,) if column else ()))
                assert real.accepts(name, vector.shape)
                for source, destination in real.cut(opened(vector), name):
                    read_into(source, destination)
            assert torch.equal(real, kept), (rank, opened, stored.keys())


def handle_of(vector: torch.Tensor) -> Any:
    return TensorHandle("x", vector.clone())


def narrowed(vector: torch.Tensor) -> Any:
    return Narrowed(vector, [])


def test_a_handle_without_views_is_read_by_whole_rows() -> None:
    """A rank reads no rows but its own, and of each all columns."""
    for cut, elements in (("rows", 12), ("columns", 24)):
        parameter = FlattenedParameter(
            Dim.cut(ROWS, 2) if cut == "rows" else Dim.whole(ROWS),
            Dim.cut(COLUMNS, 2) if cut == "columns" else Dim.whole(COLUMNS),
            column=False, tp_rank=1, tp_size=2, dtype=torch.float32,
        ).materialize_on("cpu")  # fmt: skip
        read: list[int] = []
        weight: Any = Narrowed(torch.arange(24.0), read)
        for source, destination in parameter.cut(weight, ""):
            read_into(source, destination)
        assert read == [elements]
