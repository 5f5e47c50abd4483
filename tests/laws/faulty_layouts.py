"""Faulty ways to say where a box lies, for the law of layouts.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from vllm_module.layout import HeldBox, Strided


def each_box(change: Callable[[HeldBox], HeldBox | None]) -> Callable[..., list[HeldBox]]:
    """Return a faulty ``boxes_of`` that changes the boxes it finds; ``None`` leaves one out."""

    def faulty(right: Callable[..., Sequence[HeldBox]], *arguments: Any) -> list[HeldBox]:
        return [box for box in map(change, right(*arguments)) if box is not None]

    return faulty


def held(**changes: Callable[[Strided], Any]) -> Callable[[HeldBox], HeldBox]:
    """Return a change of some of the numbers that say where a box is held."""
    return lambda box: replace(
        box, held=replace(box.held, **{name: by(box.held) for name, by in changes.items()})
    )


def first(values: Sequence[int], by: int) -> tuple[int, ...]:
    """Return the values with the first one changed, but not below zero."""
    return (max(0, values[0] + by), *values[1:]) if values else ()


def one_row_later(box: HeldBox) -> HeldBox:
    """Take the rows after those that are held, where there are some before."""
    return replace(box, start=first(box.start, -1)) if box.start and box.start[0] else box


def one_row_less(box: HeldBox) -> HeldBox:
    if not box.size or box.size[0] < 2 or len(box.held.shape) != len(box.size):
        return box
    shape = first(box.held.shape, -1)
    return replace(box, size=first(box.size, -1), held=replace(box.held, shape=shape))


def twice(right: Callable[..., Sequence[HeldBox]], *arguments: Any) -> list[HeldBox]:
    boxes = right(*arguments)
    return [*boxes, *boxes]


def last_missing(right: Callable[..., Sequence[HeldBox]], *arguments: Any) -> list[HeldBox]:
    return list(right(*arguments))[:-1]


def of_next_rank(
    right: Callable[..., Iterator[tuple[tuple[int, ...], Any]]], layouts: Any, tensor: Any
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Give each group of ranks what the next group holds."""
    groups = list(right(layouts, tensor))
    for (ranks, _), (_, other) in zip(groups, groups[1:] + groups[:1], strict=True):
        yield ranks, other


def without_order(
    right: Callable[..., Iterator[HeldBox]], piece: Any, *arguments: Any
) -> Iterator[HeldBox]:
    """Take every tensor to be stored in the parameter's order."""
    return right(piece._replace(order=None), *arguments)


def met_short(right: Callable[..., Any], one: Any, other: Any) -> Any:
    """Return what two boxes have in common, one row late where it ends before the second one."""
    box = right(one, other)
    if box is None or len(box[1]) < 1 or box[1][0] < 2:
        return box
    start, size = box
    ends = start[0] + size[0] == one[0][0] + one[1][0] < other[0][0] + other[1][0]
    return ((max(0, start[0] - 1), *start[1:]), size) if ends else box


def sent_by_next(right: Callable[..., None], making: Any, piece: Any, *arguments: Any) -> None:
    """Let the rank after the one that holds a piece send it."""
    ranks = making._routing.source.ranks
    after = tuple(each._replace(rank=(each.rank + 1) % ranks) for each in piece.holders)
    right(making, piece._replace(holders=after), *arguments)


def whole_rows(right: Callable[..., Iterator[Any]], start: int, size: int, dims: Any) -> Any:
    """Yield a range as whole rows from its start, where it has several dimensions."""
    for begin, count in right(start, size, dims):
        yield (*begin[:-1], max(0, begin[-1] - 1)) if len(begin) > 1 else begin, count
