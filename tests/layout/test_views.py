"""Boxes that count in different shapes of one tensor: the elements that torch's views have."""

from __future__ import annotations

import math
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_module.layout.views import cut, meeting, place, refined

Box = tuple[tuple[int, ...], tuple[int, ...]]


def merged(fine: tuple[int, ...], ends: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with those dimensions of ``fine`` merged that lie between ``ends``."""
    bounds = [0, *ends, len(fine)]
    return tuple(math.prod(fine[first:end]) for first, end in pairwise(bounds))


@st.composite
def views(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw a shape without dimensions of one entry, and one made of it by merging some."""
    fine = tuple(draw(st.lists(st.integers(2, 4), min_size=1, max_size=4)))
    ends = draw(st.sets(st.integers(1, len(fine) - 1))) if len(fine) > 1 else set[int]()
    return fine, merged(fine, tuple(sorted(ends)))


@st.composite
def boxes(draw: Any, shape: tuple[int, ...]) -> Box:
    """Draw a box with one element or more."""
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - at)) for size, at in zip(shape, starts, strict=True)]
    return tuple(starts), tuple(sizes)


def elements(box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the numbers of a box's elements in the whole tensor."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        numbers = numbers.narrow(dim, start, size)
    return numbers


@given(data=st.data())
def test_a_box_is_cut_into_boxes_of_a_finer_shape(data: st.DataObject) -> None:
    """They have the elements of the box, each once and in its order."""
    fine, view = data.draw(views())
    box = data.draw(boxes(view))
    cuts = cut(box, view, fine)
    found = [number for each in cuts for number in elements(each, fine).flatten().tolist()]
    assert sorted(found) == elements(box, view).flatten().tolist()
    assert not cut((box[0], (0, *box[1][1:])), view, fine)


@given(data=st.data())
def test_a_part_is_found_in_a_contiguous_copy_of_its_box(data: st.DataObject) -> None:
    """Its elements are at the places told; what lies besides the box, in part too, is in none."""
    fine, view = data.draw(views())
    box, part = data.draw(boxes(view)), data.draw(boxes(fine))
    held, wanted = elements(box, view).clone(), elements(part, fine)
    pieces = cut(box, view, fine)
    inside = [each for piece in pieces if (each := meeting(piece, part)) is not None]
    for each in inside:
        at = place(box, view, each, fine)
        assert at is not None
        assert torch.equal(held.as_strided(at.shape, at.strides, at.offset), elements(each, fine))
    common = {*held.flatten().tolist()} & {*wanted.flatten().tolist()}
    assert common == {n for each in inside for n in elements(each, fine).flatten().tolist()}
    if not {*wanted.flatten().tolist()} <= {*held.flatten().tolist()}:
        assert place(box, view, part, fine) is None


@pytest.mark.parametrize("fine", [(2, 3, 4), (4, 2), (3,), (2, 2, 2, 2)])
def test_the_coarsest_shape_that_refines_all_is_found(fine: tuple[int, ...]) -> None:
    """Of all ways to merge dimensions, two together need the ends that one of them has."""
    ways = [ends for count in range(len(fine)) for ends in combinations(range(1, len(fine)), count)]
    for one, other in product(ways, ways):
        expected = merged(fine, tuple(sorted({*one, *other})))
        assert refined([merged(fine, one), (1, *merged(fine, other), 1)]) == expected
    with pytest.raises(ValueError, match="do not divide"):
        refined([(2, 3), (3, 2)])
