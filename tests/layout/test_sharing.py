"""Bytes that sets of ranks hold in common, beside a count of every element by hand."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from vllm_module.layout import Strided
from vllm_module.layout.layout import (
    HeldBox,
    HeldParameter,
    Layout,
    Partition,
    RankBoxes,
    StoredTensorLayout,
)
from vllm_module.layout.sharing import bytes_by_holders
from vllm_module.layout.views import cut, refined

RANKS, ROWS, COLUMNS, EXPERTS = 4, 4, 6, 4
PLACE = Strided(0, (), ())  # where a rank keeps a box is of no importance here


def side(numbers: random.Random, size: int) -> tuple[int, int]:
    start = numbers.randint(0, size - 1)
    return start, numbers.randint(0, size - start)


def drawn(numbers: random.Random) -> Partition:
    """Draw boxes of rows and columns, or of whole rows in one dimension, for some of the ranks."""
    held = []
    for _ in range(numbers.randint(1, 4)):
        ranks = tuple(sorted(numbers.sample(range(RANKS), numbers.randint(1, 2))))
        (top, height), (left, width) = side(numbers, ROWS), side(numbers, COLUMNS)
        box: Any = HeldBox((top, left), (height, width), PLACE)
        if numbers.random() < 0.3:
            start, size = (top * COLUMNS,), (height * COLUMNS,)
            box = HeldBox(start, size, PLACE, view=(ROWS * COLUMNS,))
        experts = side(numbers, EXPERTS) if numbers.random() < 0.7 else None
        held.append(RankBoxes(ranks, (box,), experts))
    return Partition(tuple(held))


def holders(partition: Partition, expert: int, row: int, column: int) -> frozenset[int]:
    found = set[int]()
    for held in partition.held:
        first, count = held.experts or (0, EXPERTS)
        for box in held.boxes:
            index = (row, column) if box.view is None else (row * COLUMNS + column,)
            inside = all(
                start <= at < start + size
                for at, start, size in zip(index, box.start, box.size, strict=True)
            )
            if inside and first <= expert < first + count:
                found.update(held.ranks)
    return frozenset(found)


@pytest.mark.parametrize("seed", range(40))
def test_every_byte_is_counted_for_those_that_hold_it(seed: int) -> None:
    """Tensors of one partition may be of other experts, or of another dtype, and are not alike."""
    numbers = random.Random(seed)
    partitions = tuple(drawn(numbers) for _ in range(2))
    ranges: list[tuple[int, int]] = [(0, EXPERTS), (0, 1), (1, 1), (1, 3), (3, 1)]
    entries = tuple(
        StoredTensorLayout(f"{number}", (ROWS, COLUMNS), dtype, "w", at, None, experts)
        for number, (at, dtype, experts) in enumerate(
            product(range(2), ("float32", "int8"), numbers.sample(ranges, 3))
        )
    )
    parameters = {"w": HeldParameter("float32", 0)}
    layout = Layout("", 1, "Model", RANKS, parameters, (), partitions, entries)
    expected = Counter[frozenset[int]]()
    for entry in entries:
        first, count = entry.experts or (0, 1)
        for expert, row, column in product(
            range(first, first + count), range(ROWS), range(COLUMNS)
        ):
            ranks = holders(partitions[entry.partition], expert, row, column)
            expected[ranks] += getattr(torch, entry.dtype).itemsize
    del expected[frozenset()]  # what no rank holds
    assert +bytes_by_holders(layout) == +expected


@pytest.mark.parametrize(
    "other", [(2, 3, 4), (1, 6, 1, 4), (24,), (2, 12), (2, 1, 3, 2, 2)], ids=str
)
@pytest.mark.parametrize("view", [(2, 12), (24,), (6, 1, 4), (1, 24)], ids=str)
def test_boxes_of_a_finer_view_have_the_elements(
    view: tuple[int, ...], other: tuple[int, ...]
) -> None:
    """Each once, and no element for a box that has none, also where a dimension has one place."""
    fine = refined([view, other])
    numbers = torch.arange(24)
    sides = [[(a, b - a) for a in range(n + 1) for b in range(a, n + 1)] for n in view]
    for ranges in product(*sides):
        box = tuple(zip(*ranges, strict=True))
        found = [narrowed(numbers.view(fine), *each) for each in cut(box, view, fine)]  # type: ignore[arg-type]
        expected = narrowed(numbers.view(view), *box).tolist()
        assert sorted(torch.cat([numbers[:0], *found]).tolist()) == expected
        assert all(each.numel() for each in found)


def narrowed(tensor: torch.Tensor, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    for dim, (first, count) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(dim, first, count)
    return tensor.reshape(-1)
