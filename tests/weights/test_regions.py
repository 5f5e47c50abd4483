"""Boxes of tensors, beside the elements that torch and sets have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.weights.region import Box, Region, narrow_to, overlap, volume, whole


@st.composite
def boxes(draw: Any, count: int) -> tuple[torch.Size, list[Box]]:
    """Return the sizes of a tensor, none or more, and boxes of it, also without elements."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=3))
    found = []
    for _ in range(count):
        starts = [draw(st.integers(0, size)) for size in sizes]
        pairs = zip(starts, sizes, strict=True)
        found.append(tuple((at, draw(st.integers(0, size - at))) for at, size in pairs))
    return torch.Size(sizes), found


def numbers(sizes: torch.Size, box: Box) -> torch.Tensor:
    """Return the numbers of a box's elements, as torch counts those of the tensor."""
    cut = tuple(slice(first, first + length) for first, length in box)
    return torch.arange(sizes.numel()).view(sizes)[cut]


@settings(max_examples=150, deadline=None)
@given(boxes(2))
def test_what_boxes_have_in_common(drawn: tuple[torch.Size, list[Box]]) -> None:
    """It is what both sets of elements have, and each box is narrowed to it."""
    sizes, (one, other) = drawn
    sets = [{*numbers(sizes, box).flatten().tolist()} for box in (one, other)]
    assert [volume(box) for box in (one, other)] == [len(each) for each in sets]
    common = overlap(one, other)
    assert (common is None) == sets[0].isdisjoint(sets[1])
    if common is None:
        return
    expected = numbers(sizes, common)
    assert {*expected.flatten().tolist()} == sets[0] & sets[1]
    for box in (one, other):
        assert torch.equal(narrow_to(numbers(sizes, box), common, box), expected)
        region = narrow_to(Region.within("t", sizes, box, torch.int64), common, box)
        assert (region.box, region.shape) == (common, expected.shape)


@settings(max_examples=150, deadline=None)
@given(boxes(1), st.data())
def test_a_narrowed_region(drawn: tuple[torch.Size, list[Box]], data: st.DataObject) -> None:
    """As torch's ``narrow``, dimensions counted from either end; and where its elements are."""
    sizes, (box,) = drawn
    region: Any = Region.within("t", sizes, box, torch.int64)
    held = numbers(sizes, box)
    for _ in range(3 if sizes else 0):
        dim = data.draw(st.integers(-len(sizes), len(sizes) - 1))
        start = data.draw(st.integers(0, held.shape[dim]))
        length = data.draw(st.integers(0, held.shape[dim] - start))
        held, region = held.narrow(dim, start, length), region.narrow(dim, start, length)
        assert region.shape == held.shape
        assert torch.equal(numbers(sizes, region.box), held)
    if held.numel():
        assert region.ends == (held.min(), held.max())
    assert Region.of("t", held).box == whole(held.shape) == tuple((0, n) for n in held.shape)
    with pytest.raises(TypeError, match="t has no bytes here"):
        region.read()
