"""Elements of a contiguous tensor by offset, shape and strides, and whether two such sets meet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field

Count = Annotated[int, Field(strict=True, ge=0, lt=2**62)]  # all numbers of a layout are such
Counts = Annotated[tuple[Count, ...], Field(max_length=16)]


@dataclass(frozen=True, slots=True)
class Strided:
    """Some values of a parameter, by the numbers that ``torch.as_strided`` takes.

    Attributes:
        offset: of the first value in the parameter's memory.
        shape, strides: of the values.
        step: distance from one expert's values to the next expert's.
        packed: number of values in an element of the parameter. All other numbers count values.

    """

    offset: Count
    shape: Counts
    strides: Counts
    step: Count = 0
    packed: Annotated[int, Field(strict=True, ge=1, le=64)] = 1

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """One more than the largest index of a value; the offset if there is none."""
        if not self.numel:
            return self.offset
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.offset + last + 1


Dims = tuple[tuple[int, int], ...]  # size and stride, the largest stride first


class StridedSet(NamedTuple):
    """A set of elements in a normal form: dimensions by falling stride, and none to be merged."""

    offset: int
    dims: Dims

    @property
    def end(self) -> int:
        """One more than the largest index."""
        return self.offset + sum((n - 1) * s for n, s in self.dims) + 1


def run_of(offset: int, shape: Sequence[int], strides: Sequence[int]) -> StridedSet | None:
    """Return the elements in normal form; ``None`` if there are none.

    Raises ``ValueError`` if an element occurs twice.
    """
    dims: list[tuple[int, int]] = []
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda each: -each[1]):
        if size == 0:
            return None
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        else:
            dims.append((size, stride))
    within = 1
    for size, stride in reversed(dims):
        if stride < within:
            raise ValueError("an element occurs twice")
        within = (size - 1) * stride + within
    return StridedSet(offset, tuple(dims))


_MOST_PARTS = 1 << 12  # of one set; real ones have a few


def meet(one: StridedSet, other: StridedSet) -> bool:
    """Tell whether two sets have an element in common.

    Raises ``ValueError`` for strides that fit each other so badly that it would take long.
    """
    if one.end <= other.offset or other.end <= one.offset:
        return False
    row = max((dims[0][1] for _, dims in (one, other) if dims), default=1)
    if row == 1:  # both are intervals, which overlap
        return True
    rows = list(_rows(other, row))
    return any(
        first < start + count and start < first + size and meet(part, inner)
        for first, size, part in _rows(one, row)
        for start, count, inner in rows
    )


def _rows(run: StridedSet, row: int) -> Iterator[tuple[int, int, StridedSet]]:
    """Yield first row, number of rows, and the elements in each of these, for rows of ``row``."""
    waiting, parts = [run], 0
    while waiting:
        parts += 1
        if parts > _MOST_PARTS:
            raise ValueError(f"its strides do not fit rows of {row}")
        offset, dims = waiting.pop()
        first, within = divmod(offset, row)
        if StridedSet(within, dims).end <= row:
            yield first, 1, StridedSet(within, dims)
        elif dims[0][1] == row:
            (size, _), *inner = dims
            if StridedSet(within, tuple(inner)).end <= row:
                yield first, size, StridedSet(within, tuple(inner))
            else:  # each row's elements reach into the next row
                for part in split(StridedSet(within, tuple(inner)), row):
                    waiting.append(StridedSet(first * row + part.offset, ((size, row), *part.dims)))
        elif within == 0 and len(dims) == 1 and dims[0][1] == 1 and dims[0][0] >= row:
            size = dims[0][0]
            yield first, size // row, StridedSet(0, ((row, 1),))
            if size % row:
                waiting.append(StridedSet(offset + size // row * row, ((size % row, 1),)))
        else:
            waiting += split(StridedSet(offset, dims), (first + 1) * row)


def first_meeting(runs: Sequence[StridedSet]) -> tuple[int, int] | None:
    """Return the numbers of two sets that have an element in common; ``None`` if there are none.

    Raises ``ValueError`` for more sets than a layout has, or as :func:`meet` does.
    """
    if len(runs) > _MOST_PARTS:
        raise ValueError(f"there are {len(runs)} boxes, and at most {_MOST_PARTS} are accepted")
    order = sorted(range(len(runs)), key=lambda at: runs[at].offset)
    open_runs: list[int] = []
    for at in order:
        open_runs = [other for other in open_runs if runs[other].end > runs[at].offset]
        for other in open_runs:
            if meet(runs[other], runs[at]):
                return other, at
        open_runs.append(at)
    return None


def split(run: StridedSet, at: int) -> list[StridedSet]:
    """Return the elements before index ``at`` and those from there on, as sets of either."""
    if run.end <= at or run.offset >= at:
        return [run]
    (size, stride), *rest = run.dims
    inner = tuple(rest)
    extent = StridedSet(0, inner).end
    before = max(0, (at - run.offset - extent) // stride + 1)
    parts = [StridedSet(run.offset, ((before, stride), *inner))] if before else []
    after = before
    if before < size and run.offset + before * stride < at:  # this one has elements on both sides
        parts += split(StridedSet(run.offset + before * stride, inner), at)
        after += 1
    if after < size:
        parts.append(StridedSet(run.offset + after * stride, ((size - after, stride), *inner)))
    return [
        StridedSet(part.offset, tuple(dim for dim in part.dims if dim[0] > 1)) for part in parts
    ]
