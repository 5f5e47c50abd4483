"""How many bytes of a checkpoint each set of ranks holds in common."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch

from vllm_module.layout.layout import Layout, StoredTensorLayout
from vllm_module.layout.views import cut, refined

# Start and length in each dimension, of which the first counts experts, and ranks that hold it.
_Held = tuple[tuple[tuple[int, int], ...], frozenset[int]]


def bytes_by_holders(layout: Layout) -> Counter[frozenset[int]]:
    """Return the stored bytes that each set of ranks holds, and no other rank.

    Each byte of the checkpoint is in one set, so what some ranks read if none reads a byte twice is
    the sum of the sets that any of them is in. Tensors of two names that fill one parameter are
    two, as they are read.
    """
    total = Counter[frozenset[int]]()
    alike: dict[tuple[int, object, object], Counter[frozenset[int]]] = {}
    for entry in layout.tensors:
        key = entry.partition, entry.shape, entry.experts
        if key not in alike:
            alike[key] = _elements(_held(layout, entry))
        itemsize = getattr(torch, entry.dtype).itemsize
        for ranks, count in alike[key].items():
            total[ranks] += count * itemsize
    return total


def _held(layout: Layout, entry: StoredTensorLayout) -> list[_Held]:
    held = layout.partitions[entry.partition].held
    fine = refined([box.view or entry.shape for each in held for box in each.boxes])
    first, count = entry.experts or (0, 1)
    found: list[_Held] = []
    for each in held:
        begin, number = each.experts or (first, count)
        begin, end = max(begin, first), min(begin + number, first + count)
        if begin >= end:
            continue
        for box in each.boxes:
            for starts, sizes in cut((box.start, box.size), box.view or entry.shape, fine):
                sides = ((begin, end - begin), *zip(starts, sizes, strict=True))
                found.append((sides, frozenset(each.ranks)))
    return found


def _elements(held: Sequence[_Held]) -> Counter[frozenset[int]]:
    """Count elements by the ranks that hold them, one dimension after the other."""
    total = Counter[frozenset[int]]()
    if not held:
        return total
    if not held[0][0]:
        total[frozenset().union(*(ranks for _, ranks in held))] = 1
        return total
    ends = {at for ((start, length), *_), _ in held for at in (start, start + length)}
    for begin, end in itertools.pairwise(sorted(ends)):
        inner = [
            (sides[1:], ranks)
            for sides, ranks in held
            if sides[0][0] <= begin < sides[0][0] + sides[0][1]
        ]
        for ranks, count in _elements(inner).items():
            total[ranks] += count * (end - begin)
    return total
