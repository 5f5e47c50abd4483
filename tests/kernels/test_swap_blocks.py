"""Copying pages between caches, here both in the host's memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_module.kernels.attention import swap_blocks as module
from vllm_module.kernels.attention.swap_blocks import swap_blocks

PAGE = (3, 2, 5)
HERE, THERE = 7, 9


@given(
    planes=st.lists(st.integers(1, 3), max_size=2),
    pairs=st.lists(st.tuples(st.integers(0, HERE - 1), st.integers(0, THERE - 1)), max_size=9,
                   unique_by=lambda pair: pair[1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]),
)  # fmt: skip
def test_each_page_is_copied_in_every_plane_and_others_stay(planes, pairs, dtype) -> None:
    """Any pages of one cache replace any of another of a different size, byte by byte."""
    source = torch.randint(0, 99, (*planes, HERE, *PAGE)).to(dtype)
    destination = torch.randint(0, 99, (*planes, THERE, *PAGE)).to(dtype)
    expected = destination.clone()
    for first, onto in pairs:
        expected[..., onto, :, :, :] = source[..., first, :, :, :]
    swap_blocks(source, destination, torch.tensor(pairs, dtype=torch.int64).view(-1, 2))
    assert torch.equal(destination.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("pairs", "runs"),
    [
        ([], []),
        ([(3, 5), (4, 6), (5, 7)], [(3, 5, 3)]),
        ([(0, 1), (1, 3), (2, 4), (2, 5)], [(0, 1, 1), (1, 3, 2), (2, 5, 1)]),
        ([(4, 6), (3, 5)], [(4, 6, 1), (3, 5, 1)]),
    ],
)
def test_pages_that_follow_each_other_are_one_copy(pairs, runs) -> None:
    """Pairs next to each other on both sides are merged; others are not."""
    assert module._runs(torch.tensor(pairs, dtype=torch.int64).view(-1, 2)) == runs


def test_copies_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy is of one piece of memory, and is asynchronous."""
    copies = []

    def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
        copies.append(non_blocking and self.is_contiguous() and source.is_contiguous())

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    caches = [torch.zeros(2, 2, 6, *PAGE) for _ in range(2)]
    swap_blocks(*caches, torch.tensor([(0, 1), (1, 2), (5, 5)]))
    assert copies == [True] * 8  # two runs in four planes


SOURCE, PAIRS = torch.zeros(2, HERE, *PAGE), [[0, 1], [2, 2]]


@pytest.mark.parametrize(
    ("source", "destination", "pairs", "message"),
    [
        (torch.zeros(HERE, 3, 2), SOURCE, PAIRS, r"source must have the shape .*\[7, 3, 2\]"),
        (SOURCE, torch.zeros(3, 9, *PAGE), PAIRS, r"destination .*\[2, any, 3, 2, 5\], got \[3, "),
        (SOURCE, torch.zeros(2, 9, 3, 2, 4), PAIRS, r"destination .*, got \[2, 9, 3, 2, 4\]"),
        (SOURCE, torch.zeros(2, 9, *PAGE).half(), PAIRS, r"destination .*float32, got .*float16"),
        (SOURCE, torch.zeros(9, 2, *PAGE).transpose(0, 1), PAIRS, r"destination's .*\[30, 60, 10"),
        (torch.zeros(2, 9, 2, 3, 5).transpose(-2, -3), SOURCE, PAIRS, r"source's .*, 5, 15, 1\]"),
        (SOURCE, torch.zeros(2, 9, *PAGE), [[0, 1, 2]], r"block_mapping .*\[any, 2\], got \[1, 3"),
        (SOURCE, torch.zeros(2, 9, *PAGE), [[7, 1]], "copies page 7, and the cache has 7 pages"),
        (SOURCE, torch.zeros(2, 9, *PAGE), [[1, 9]], "writes page 9, and the cache has 9 pages"),
        (SOURCE, torch.zeros(2, 9, *PAGE), [[1, 8], [2, 8]], "writes page 8 more than once"),
    ],
)
def test_what_does_not_fit_is_refused(source, destination, pairs, message: str) -> None:
    """A wrong shape, dtype, layout or page is a ValueError with the numbers."""
    with pytest.raises(ValueError, match=message):
        swap_blocks(source, destination, torch.tensor(pairs))


def test_a_mapping_on_the_device_is_refused() -> None:
    """The mapping must be on the CPU, where the host can read it at once."""
    with pytest.raises(ValueError, match="block_mapping is on meta, and must be on cpu"):
        swap_blocks(SOURCE, torch.zeros_like(SOURCE), torch.tensor(PAIRS, device="meta"))


def test_caches_that_share_memory_are_refused() -> None:
    """Caches of one storage are refused: a page could be copied after it was overwritten."""
    caches = torch.zeros(2, 2, 6, *PAGE)
    pairs = torch.tensor([(1, 2), (0, 1)])
    for destination in (caches[0], caches[1]):
        with pytest.raises(ValueError, match=r"must not share memory.* at 0x[0-9a-f]+"):
            swap_blocks(caches[0], destination, pairs)
