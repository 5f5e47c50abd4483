"""Sets of elements by offset, shape and strides: compared with the elements written out."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_module.layout import Strided
from vllm_module.layout.strided import StridedSet, first_meeting, meet, run_of, split

Shape = tuple[int, tuple[int, ...], tuple[int, ...]]


def elements(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Write out the index of each element, as the documentation of torch.as_strided says."""
    return [
        offset + sum(at * stride for at, stride in zip(index, strides, strict=True))
        for index in product(*map(range, shape))
    ]


@st.composite
def regions(draw: st.DrawFn) -> Shape:
    """Draw a part of a contiguous tensor that was viewed, narrowed and transposed."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    tensor = torch.empty(sizes, device="meta")
    for dim, size in enumerate(sizes):
        start = draw(st.integers(0, size))
        tensor = tensor.narrow(dim, start, draw(st.integers(0, size - start)))
    tensor = tensor.permute(draw(st.permutations(range(len(sizes)))))
    offset = tensor.storage_offset() + draw(st.integers(0, 5))
    return int(offset), tuple(tensor.shape), tensor.stride()


def written(run: StridedSet) -> list[int]:
    sizes, strides = zip(*run.dims, strict=True) if run.dims else ((), ())
    return elements(run.offset, sizes, strides)


@given(regions())
def test_the_normal_form_has_the_same_elements(region: Shape) -> None:
    """No element is lost or added, the last one is at the end, and dimensions are merged."""
    run = run_of(*region)
    expected = sorted(elements(*region))
    assert (written(run) if run else []) == expected
    assert Strided(*region).end == max(expected, default=region[0] - 1) + 1
    if run is not None:
        assert run.end == expected[-1] + 1
        assert all(size > 1 for size, _ in run.dims)


@given(regions(), regions())
def test_two_sets_meet_if_they_have_an_element_in_common(one: Shape, other: Shape) -> None:
    """As the intersection of the elements written out says."""
    first, second = run_of(*one), run_of(*other)
    common = set(elements(*one)) & set(elements(*other))
    if first is not None and second is not None:
        assert meet(first, second) == bool(common) == meet(second, first)
        assert first_meeting([first, second]) == ((0, 1) if common else None) or common


def test_intervals_meet_as_ranges_do() -> None:
    """All pairs of short intervals, those with one common element at an end among them."""
    intervals = [range(at, at + size) for at in range(5) for size in range(1, 6)]
    for one, other in product(intervals, repeat=2):
        runs = [StridedSet(each[0], ((len(each), 1),) * (len(each) > 1)) for each in (one, other)]
        found = first_meeting(runs)
        assert (found is not None) == bool({*one} & {*other}), (one, other)
        assert found is None or sorted(found) == [0, 1]


def test_neighbours_with_other_strides_do_not_meet() -> None:
    """Sets that lie between each other's elements, as drawn regions seldom do, are told apart."""
    numbers = random.Random(0)
    close = 0  # pairs without a common element whose intervals overlap
    for _ in range(4000):
        pair = []
        for _ in range(2):
            dims = numbers.randint(1, 3)
            shape = tuple(numbers.randint(1, 4) for _ in range(dims))
            strides = tuple(numbers.choice((1, 2, 3, 4, 5, 6, 8, 12, 16, 24)) for _ in range(dims))
            pair.append((numbers.randint(0, 40), shape, strides))
        try:
            one, other = (run_of(*each) for each in pair)
            assert one is not None
            assert other is not None
            met = meet(one, other)
        except ValueError:  # an element occurs twice
            continue
        common = set(elements(*pair[0])) & set(elements(*pair[1]))
        assert met == bool(common), pair
        close += not common and one.offset < other.end and other.offset < one.end
    assert close > 100


@given(regions(), st.integers(0, 300))
def test_a_set_is_split_at_an_index(region: Shape, at: int) -> None:
    """Each part is before the index or after it, and together they are the set."""
    run = run_of(*region)
    if run is None:
        return
    parts = split(run, at)
    assert sorted(each for part in parts for each in written(part)) == written(run)
    assert all(part.end <= at or part.offset >= at for part in parts)


@pytest.mark.parametrize(
    ("offset", "shape", "strides"), [(0, (2, 2), (1, 1)), (3, (2,), (0,)), (0, (3, 4), (3, 1))]
)
def test_an_element_that_occurs_twice_is_refused(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="twice"):
        run_of(offset, shape, strides)


@pytest.mark.parametrize("gaps", list(product((0, 1, 3), repeat=3)), ids=str)
def test_a_dimension_may_begin_right_behind_what_is_within(gaps: tuple[int, ...]) -> None:
    """One element earlier, the last one within is the next one's first: it occurs twice."""
    for sizes in product((1, 2, 3), repeat=3):
        strides, extent = list[int](), 1  # one more than the largest index within
        for size, gap in zip(sizes, gaps, strict=True):
            strides.append(extent + gap)
            if size > 1 and extent > 1:
                closer = 0, (*sizes[: len(strides)],), (*strides[:-1], extent - 1)
                assert len(set(elements(*closer))) < len(elements(*closer))
                with pytest.raises(ValueError, match="twice"):
                    run_of(*closer)
            extent += (size - 1) * strides[-1]
        run = run_of(7, sizes, tuple(strides))
        assert run is not None
        assert sorted(written(run)) == sorted(elements(7, sizes, tuple(strides)))
        assert run.end == 7 + extent


def test_strides_that_fit_badly_end_at_once() -> None:
    """A file with such strides cannot make the reader work for long."""
    one, other = StridedSet(0, ((10**12, 2),)), StridedSet(1, ((10**12, 3),))
    with pytest.raises(ValueError, match="do not fit"):
        meet(one, other)
    many = [StridedSet(at, ()) for at in range(5000)]
    with pytest.raises(ValueError, match="5000 boxes"):
        first_meeting(many)
