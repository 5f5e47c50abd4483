"""What ranks tell each other that they will read, and how what they share is laid out."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_module.cooperative.batches import lay_out
from vllm_module.cooperative.reader import SharedReader
from vllm_module.cooperative.wants import Wants, shared_rows
from vllm_module.weights.region import Region


def test_rows_of_several_ranks_are_shared() -> None:
    """Rows that one rank alone wants are not shared, and neighbouring shared rows are joined."""
    wants = [[(0, 0, 4), (1, 0, 9)], [(0, 4, 8), (1, 3, 5), (1, 7, 9)], [(1, 5, 7), (4, 0, 1)]]
    assert shared_rows(wants) == [[1, 3, 9]]
    assert shared_rows([*wants, [(0, 2, 6), (4, 0, 1)]]) == [
        [0, 2, 6], [1, 3, 9], [4, 0, 1],
    ]  # fmt: skip
    assert shared_rows([[], []]) == []


@st.composite
def boxes(draw: st.DrawFn) -> tuple[int, list[tuple[tuple[int, int], ...]]]:
    """Draw the columns of a matrix of 20 rows, and boxes: each begins near the last one's end."""
    columns, end, found = draw(st.integers(1, 3)), 0, []
    for _ in range(draw(st.integers(1, 4))):
        start = max(0, end + draw(st.integers(-1, 2)))
        end = start + draw(st.integers(0, 3))
        first = draw(st.integers(0, columns - 1))
        count = draw(st.integers(1, columns - first))
        found.append(((start, end - start), (first, count)))
    return columns, found


@given(st.lists(boxes(), max_size=3), st.integers(0, 3))
@example([(1, [((0, 3), (0, 1)), ((2, 2), (0, 1))])], 3)  # one element in common
def test_what_is_read_in_order_and_once_is_told_by_rows(
    tensors: list[tuple[int, list[tuple[tuple[int, int], ...]]]], repeated: int
) -> None:
    """A tensor whose elements are read in another order, twice, or for two fills is read again."""
    planned, again, rows = [], set(), {}
    for at, (columns, found) in enumerate(tensors):
        numbers = torch.arange(20 * columns).view(20, columns)
        regions = [Region.within(str(at), numbers.shape, box, torch.float32) for box in found]
        planned.append((str(at), regions))
        parts = [numbers[a : a + m, b : b + n] for (a, m), (b, n) in found]
        read = torch.cat([part.flatten() for part in parts])
        if not bool((read[1:] > read[:-1]).all()):
            again.add(at)
        rows[at] = {int(number) // columns for number in read}
    if repeated < len(tensors):
        planned.append(planned[repeated])
        again.add(repeated)
    wants = Wants.of(planned)
    assert wants.again == sorted(again)
    for at in rows.keys() - again:
        told = {row for number, *ends in wants.rows if number == at for row in range(*ends)}
        assert told == rows[at]


def test_regions_that_follow_each_other_are_one_interval() -> None:
    """Of the first tensor and of others, also where a row belongs to two of them."""
    shape = torch.Size((20, 2))
    boxes = [((3, 2), (0, 2)), ((5, 1), (0, 1)), ((5, 4), (1, 1)), ((12, 1), (0, 2))]
    regions = [Region.within("", shape, box, torch.float32) for box in boxes]
    wants = Wants.of([("a", regions[:2]), ("b", regions[:2]), ("c", regions[2:])])
    assert wants.rows == [(0, 3, 6), (1, 3, 6), (2, 5, 9), (2, 12, 13)]


DTYPES = (torch.bool, torch.bfloat16, torch.float32, torch.complex128)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 15), max_size=3), st.sampled_from(DTYPES)), max_size=6
    ),
    st.integers(1, 5),
    st.integers(5 * 64, 5000),
)
def test_chunks_cover_what_is_shared(
    shapes: list[tuple[list[int], torch.dtype]], size: int, batch_bytes: int
) -> None:
    """Every element is in one chunk, no batch is too large, and parts do not overlap."""
    tensors = [
        (str(number), tuple((number, length) for length in shape), dtype)
        for number, (shape, dtype) in enumerate(shapes)
    ]
    chunks = list(lay_out(tensors, size, batch_bytes))
    for number, (shape, _) in enumerate(shapes):
        covered = torch.zeros(shape, dtype=torch.int32)
        for chunk in chunks:
            if chunk.name == str(number):
                region = covered
                for dim, (start, length) in enumerate(chunk.box):
                    region = region.narrow(dim, start - number, length)
                region += 1
        assert (covered == 1).all()
    for one, other in pairwise(chunks):
        assert (one.batch, one.end) <= (other.batch, other.begin) or one.batch < other.batch
        assert one.batch < other.batch or one.owner <= other.owner < size
    assert all(chunk.end <= batch_bytes and chunk.begin >= 0 for chunk in chunks)


def test_the_ring_is_where_many_names_cost_little() -> None:
    """The rows of 30,000 experts of 32 ranks are compared in far less than a second."""
    ranks, each = 32, 1000
    wants = [
        [(rank * each + n, 0, 64) for n in range(each)] + [(ranks * each, 0, 8)]
        for rank in range(ranks)
    ]
    assert shared_rows(wants) == [[ranks * each, 0, 8]]


def test_a_region_that_is_shared_in_part_is_read_whole() -> None:
    """A rank waits for no batch then: its readers get the handle as it is."""
    tensor = torch.arange(12.0).view(6, 2)
    chunks = [*lay_out([("w", ((2, 4), (0, 2)), torch.float32)], 1, 1 << 20)]
    direct: list[object] = []
    ring: Any = SimpleNamespace(release=lambda batch: None, moved=lambda: None)
    readers: Any = SimpleNamespace(read=direct.extend)
    ring.take = lambda batch: tensor[2:].reshape(-1).view(torch.uint8)
    whole = Region.of("w", tensor)
    shared: Any = whole.narrow(0, 2, 4)
    reader = SharedReader([whole, shared], chunks, {"w": shared}, 0, ring, readers)
    jobs: list[Any] = [(part, torch.empty(part.shape)) for part in (whole, shared)]
    reader.read(jobs)
    assert direct == jobs[:1]
    assert torch.equal(jobs[1][1], tensor[2:])
