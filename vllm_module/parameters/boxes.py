"""The boxes of a rank's pieces: what a layout says of the checkpoint and of the parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch

from vllm_module.layout import HeldBox, Made, Strided
from vllm_module.parameters.parameter import BasevLLMParameter, Piece
from vllm_module.parameters.stored_order import StoredOrder
from vllm_module.weights.region import Region


def boxes_of(
    pieces: Iterable[Piece],
    parameter: BasevLLMParameter,
    sizes: torch.Size,
    made: Mapping[str, BasevLLMParameter],
    of_expert: bool,
) -> list[HeldBox]:
    """Return the boxes of a rank's pieces; those of experts that follow each other are one."""
    boxes: list[HeldBox] = []
    experts = parameter.experts
    # Boxes of experts that several ranks hold are one for each, so that two are equal or disjoint.
    joins = experts is not None and experts.places == experts.count
    # The last box of each place beside its expert. Ranks that hold the same join the same, whatever
    # each of them holds besides.
    last: dict[tuple[object, ...], int] = {}
    first: int | None = None  # expert
    for piece in pieces:
        computed = tuple(
            Made(attr, _strided(other.region(piece.at[: len(other.dims)]), other, of_expert))
            for attr, other in made.items()
        )
        first = piece.at[0] if first is None else first
        follows = joins and piece.at[0] != first
        for box in _of_piece(piece, parameter, sizes, computed, of_expert):
            beside = box.start[1:], box.size[1:], box.view
            at = last.get(beside) if follows else None
            joined = None if at is None else _joined(boxes[at], box)
            if at is None or joined is None:
                last[beside] = len(boxes)
                boxes.append(box)
            else:
                boxes[at] = joined
    return boxes


def _strided(region: torch.Tensor, parameter: torch.Tensor, of_expert: bool) -> Strided:
    step = parameter.stride(0) if of_expert else 0
    offset = int(region.storage_offset())
    return Strided(offset, tuple(region.shape), tuple(region.stride()), step)


def _of_piece(
    piece: Piece,
    parameter: BasevLLMParameter,
    sizes: torch.Size,
    made: tuple[Made, ...],
    of_expert: bool,
) -> Iterator[HeldBox]:
    """Yield the boxes of one piece; one for each slot if slots are stored in groups."""
    region = cast(Region, cast(object, piece.source))
    view = list(region.sizes)
    start, size = [first for first, _ in region.box], [count for _, count in region.box]
    held, order = _strided(piece.target, parameter, of_expert), piece.order or StoredOrder()
    packed = getattr(parameter, "packed_factor", 1)
    if held.numel * packed != piece.source.shape.numel():  # packed as it is stored
        packed = 1
    offset, shape, strides = held.offset * packed, list(held.shape), list(held.strides)
    if packed > 1:  # neighbours along the last dimension share an element
        shape[-1] *= packed
        strides[:-1] = [stride * packed for stride in strides[:-1]]
    if order.filled:
        shape = list(size)
    if order.transposed:
        shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
    viewed = None if view == list(sizes) else tuple(view)

    def box(shape: Sequence[int], strides: Sequence[int], begin: int, pairs: int) -> HeldBox:
        if order.pairs is not None:  # the halves of each run alternate
            run, count, stride = order.pairs[1], shape[pairs], strides[pairs]
            shape = (*shape[:pairs], count // run, run // 2, 2, *shape[pairs + 1 :])
            halves = run * stride, stride, run // 2 * stride
            strides = (*strides[:pairs], *halves, *strides[pairs + 1 :])
        place = Strided(begin, tuple(shape), tuple(strides), held.step * packed, packed)
        return HeldBox(tuple(start), tuple(size), place, viewed, made)

    pairs = -1 if order.pairs is None else order.pairs[0]
    if order.groups is None:
        yield box(shape, strides, offset, pairs)
        return
    dim, shares, padding = order.groups
    run, stride = sum(shares), strides[dim]
    groups = size[dim] // run
    view[dim : dim + 1] = view[dim] // run, run
    viewed = tuple(view)
    first, begin = start[dim] // run, 0
    for share, zeros in zip(shares, padding, strict=True):
        start[dim : dim + 1] = first, begin
        size[dim : dim + 1] = groups, share
        strides[dim : dim + 1] = share * stride, stride
        yield box(size, strides, offset, pairs + (pairs > dim))
        offset += (groups * share + zeros) * stride
        begin += share
        for each in (start, size, strides):
            del each[dim]


def _joined(one: HeldBox, other: HeldBox) -> HeldBox | None:
    """Return two boxes as one, if the second follows the first along its first dimension."""
    if one.start[0] + one.size[0] != other.start[0] or one.view != other.view:
        return None
    if one.start[1:] != other.start[1:] or one.size[1:] != other.size[1:]:
        return None
    held = _followed(one.held, other.held)
    made = []
    for each, following in zip(one.made, other.made, strict=True):
        both = _followed(each.held, following.held)
        if both is not None:
            made.append(Made(each.attr, both))
    if held is None or len(made) < len(one.made):
        return None
    size = one.size[0] + other.size[0], *one.size[1:]
    return HeldBox(one.start, size, held, one.view, tuple(made))


def _followed(one: Strided, other: Strided) -> Strided | None:
    if one.strides != other.strides or one.shape[1:] != other.shape[1:]:
        return None
    if other.offset != one.offset + one.shape[0] * one.strides[0]:
        return None
    shape = one.shape[0] + other.shape[0], *one.shape[1:]
    return Strided(one.offset, shape, one.strides, one.step, one.packed)
