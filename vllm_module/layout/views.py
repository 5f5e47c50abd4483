"""Boxes of one tensor that are counted in different shapes, counted in one that refines all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from vllm_module.layout.strided import Strided

Ints: TypeAlias = tuple[int, ...]
Box: TypeAlias = tuple[Ints, Ints]  # start and size in each dimension


def refined(views: Iterable[Sequence[int]]) -> Ints:
    """Return the coarsest shape that each of ``views`` is made of by merging dimensions.

    Dimensions of size 1 are left out, and those of an empty tensor are one of size 0. Raises
    ``ValueError`` if there is none.
    """
    views = list(views)
    if any(0 in view for view in views):
        return (0,)
    bounds = {1}
    for view in views:
        bounds.update(itertools.accumulate(reversed(view), int.__mul__))
    ordered = sorted(bounds)
    for inner, outer in itertools.pairwise(ordered):
        if outer % inner:
            raise ValueError(f"runs of {inner} elements do not divide runs of {outer}")
    return tuple(outer // inner for inner, outer in itertools.pairwise(ordered))[::-1]


def dims_of(view: Sequence[int], fine: Sequence[int]) -> list[Ints]:
    """Return for each dimension of ``view`` the dimensions of ``fine`` that it is made of."""
    left, dims = list(fine), []
    for size in view:
        parts: list[int] = []
        while math.prod(parts) < size:
            parts.append(left.pop(0))
        dims.append(tuple(parts))
    return dims


def cut(box: Box, view: Sequence[int], fine: Sequence[int]) -> list[Box]:
    """Return a box that counts in ``view`` as boxes that count in ``fine``, none of them empty."""
    if 0 in box[1]:
        return []
    if tuple(view) == tuple(fine):
        return [box]
    ranges = [
        list(_ranges(start, size, parts))
        for start, size, parts in zip(*box, dims_of(view, fine), strict=True)
    ]
    return [
        (sum((each[0] for each in parts), ()), sum((each[1] for each in parts), ()))
        for parts in itertools.product(*ranges)
    ]


def _ranges(start: int, size: int, dims: Ints) -> Iterator[Box]:
    """Yield a range of a dimension that is made of ``dims``, as boxes of these."""
    if not dims:
        yield (), ()
        return
    inner = math.prod(dims[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(start + size, inner)
    if first == last:
        for begin, count in _ranges(head, size, dims[1:]):
            yield (first, *begin), (1, *count)
        return
    if head:
        for begin, count in _ranges(head, inner - head, dims[1:]):
            yield (first, *begin), (1, *count)
        first += 1
    if first < last:
        yield (first, *(0 for _ in dims[1:])), (last - first, *dims[1:])
    if tail:
        for begin, count in _ranges(0, tail, dims[1:]):
            yield (last, *begin), (1, *count)


def meeting(one: Box, other: Box) -> Box | None:
    """Return the box that two boxes have in common; ``None`` if there is none."""
    start, size = [], []
    for begin, count, first, number in zip(*one, *other, strict=True):
        low = begin if begin > first else first
        high = min(begin + count, first + number)
        if high <= low:
            return None
        start.append(low)
        size.append(high - low)
    return tuple(start), tuple(size)


def within(box: Box, view: Sequence[int], part: Box, fine: Sequence[int]) -> Strided:
    """Return where ``part``, which counts in ``fine``, lies in a contiguous copy of ``box``.

    ``box`` counts in ``view`` and contains the part.
    """
    offset, at, shape, strides = 0, 0, list[int](), list[int]()
    for dim, (start, parts) in enumerate(zip(box[0], dims_of(view, fine), strict=True)):
        stride = math.prod(box[1][dim + 1 :])
        offset -= start * stride
        for number in range(len(parts)):
            step = stride * math.prod(parts[number + 1 :])
            offset += part[0][at] * step
            shape.append(part[1][at])
            strides.append(step)
            at += 1
    return Strided(offset, tuple(shape), tuple(strides))


def place(box: Box, view: Sequence[int], part: Box, fine: Sequence[int]) -> Strided | None:
    """Return where ``part`` lies in a contiguous copy of ``box``; ``None`` if it is not in it."""
    if all(meeting(each, part) != part for each in cut(box, view, fine)):
        return None
    return within(box, view, part, fine)
