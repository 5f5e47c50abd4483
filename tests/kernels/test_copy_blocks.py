"""Copying pages within a cache: the operation's laws, then the kernel against its reference."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.kernels.attention import copy_blocks as kernel
from vllm_module.kernels.attention.copy_blocks import (
    copy_blocks,
    copy_blocks_reference,
    copy_blocks_triton,
)

PAGE = (3, 2, 5)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("planes", [(), (2,), (3, 2)])
def test_each_page_is_copied_in_every_plane_and_others_stay(planes: tuple[int, ...]) -> None:
    """One call copies the same pages of all layers, keys and values; a source may repeat."""
    cache = torch.randn(*planes, 6, *PAGE)
    expected = cache.clone()
    for source, destination in ((4, 0), (1, 5), (4, 2)):
        expected[..., destination, :, :, :] = cache[..., source, :, :, :]
    copy_blocks(cache, torch.tensor([[4, 0], [1, 5], [4, 2]]))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("stride", [0, 1, 2, 7, 1000])
def test_the_stride_of_a_dimension_of_one_says_nothing(dim: int, stride: int) -> None:
    """A page of one token, head or feature is one piece of memory whatever that stride is."""
    shape = [4, *PAGE]
    shape[dim] = 1
    plain = torch.randn(shape)
    strides = [*plain.stride()]
    strides[dim] = stride
    expected = plain[[0, 3, 2, 3]]
    copy_blocks(plain.as_strided(shape, strides), torch.tensor([[3, 1]]))
    assert torch.equal(plain, expected)


@settings(max_examples=40)
@given(
    planes=st.lists(st.integers(1, 3), max_size=2),
    pages=st.integers(1, 7),
    page=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9)),
    dtype=st.sampled_from(
        [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
    ),
    layout=st.sampled_from(["plain", "planes within pages", "heads first"]),
    chunk=st.sampled_from([16, 16384]),
    seed=st.integers(0, 2**16),
)
def test_kernel_and_reference_copy_the_bits(
    planes, pages, page, dtype, layout, chunk, seed
) -> None:
    """Any sizes, dtypes and layouts; pages in several programs; pairs beyond the cache."""
    torch.manual_seed(seed)
    shape, axes = [*planes, pages, *page], range(len(planes) + 4)
    swapped = {"plain": (-1, -1), "planes within pages": (0, -4), "heads first": (-3, -2)}[layout]
    held = torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    order = [*axes]
    order[swapped[0]], order[swapped[1]] = order[swapped[1]], order[swapped[0]]
    held = held.view(dtype).view([shape[axis] for axis in order]).permute(order)
    cut = int(torch.randint(0, pages + 1, ()))
    sources, destinations = torch.randperm(pages).split([cut, pages - cut])
    if cut:
        sources = sources[torch.randint(0, cut, (len(destinations),))]
    else:
        destinations = sources
    beyond = torch.tensor([[-1, 0], [0, -1], [0, pages], [pages, 0], [2**40, 0]])
    mapping = torch.cat([torch.stack([sources, destinations], 1), beyond]).t().contiguous().t()
    expected = held.clone()
    for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
        expected[..., destination, :, :, :] = held[..., source, :, :, :]
    for copy in (copy_blocks_triton, copy_blocks_reference):
        cache = held.clone()  # keeps the strides
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "_CHUNK", chunk)
            copy(cache, mapping)
        assert torch.equal(bits(cache), bits(expected))


@pytest.mark.parametrize("copy", [copy_blocks, copy_blocks_triton])
def test_nothing_to_copy(copy) -> None:
    """No pairs, or no layers, copy nothing."""
    cache = torch.randn(2, 4, *PAGE)
    before = cache.clone()
    copy(cache, torch.empty(0, 2, dtype=torch.int64))
    copy(cache[:0], torch.tensor([[0, 1]]))
    assert torch.equal(cache, before)


def test_offsets_beyond_int32() -> None:
    """Pages and planes are found if their offsets exceed 32 bits."""
    gigabyte, step = 2**30, 2**20
    far = torch.frombuffer(mmap.mmap(-1, 2**34), dtype=torch.int8)
    strides = (gigabyte + step, gigabyte + 4 * step, gigabyte + 16 * step, 10, 5, 1)
    cache = far.as_strided((4, 4, 4, *PAGE), strides)
    copied = torch.randint(-99, 99, (4, 4, *PAGE), dtype=torch.int8)
    cache[:, :, 2] = copied
    copy_blocks_triton(cache, torch.tensor([[2, 3]]))
    assert torch.equal(cache[:, :, 3], copied)


@pytest.mark.parametrize(
    ("cache", "mapping", "message"),
    [
        (torch.zeros(4, 3, 2), [[0, 1]], r"kv_cache .*\[4, 3, 2\]"),
        (torch.zeros(1, 1, 2, 4, 3, 2, 5), [[0, 1]], r"kv_cache .*\[1, 1, 2, 4, 3, 2, 5\]"),
        (torch.zeros(4, 3, 2, 10)[..., :5], [[0, 1]], r"one piece.*\[3, 2, 5\].*\[20, 10, 1\]"),
        (torch.zeros(4, 3, 2, 5), [[0, 1, 2]], r"block_mapping .*\[any, 2\], got \[1, 3\]"),
        (torch.zeros(4, 3, 2, 5), [[0.0, 1.0]], r"block_mapping .*int64, got torch.float32"),
        (torch.zeros(4, 3, 2, 5), [[0, 1], [4, 2]], "copies page 4, and the cache has 4 pages"),
        (torch.zeros(4, 3, 2, 5), [[0, 1], [2, -1]], "writes page -1, and the cache has 4 pages"),
        (torch.zeros(4, 3, 2, 5), [[0, 1], [2, 1]], "writes page 1 more than once"),
        (torch.zeros(4, 3, 2, 5), [[0, 1], [1, 2]], "both copies and writes page 1"),
        (torch.zeros(4, 3, 2, 5, device="meta"), [[0, 1]], "block_mapping is on cpu"),
    ],
)
def test_what_does_not_fit_is_refused(cache: torch.Tensor, mapping: list, message: str) -> None:
    """A wrong shape, stride, dtype, device or page is a ValueError with the numbers."""
    with pytest.raises(ValueError, match=message):
        copy_blocks(cache, torch.tensor(mapping))


def test_the_operator() -> None:
    """It is registered with its mutation and a fake, and compiles within a graph."""
    mapping = torch.tensor([[1, 0], [2, 3]])
    torch.library.opcheck(
        torch.ops.vllm_module.copy_blocks.default, (torch.randn(2, 4, *PAGE), mapping)
    )
    assert copy_blocks(torch.empty(2, 4, *PAGE, device="meta"), mapping.to("meta")) is None

    def step(cache: torch.Tensor) -> torch.Tensor:
        copy_blocks(cache, mapping)
        return cache.sum()

    start, results = torch.randn(3, 2, 4, *PAGE), []
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        cache = start.clone()
        results.append((call(cache), cache))
    assert not torch.equal(results[0][1], start)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
