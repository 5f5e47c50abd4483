"""Copying pages within a paged KV cache."""

from __future__ import annotations

import torch

from vllm_module.kernels.operators import (
    checks_values,
    expect,
    expect_writable,
    nothing,
    operator,
    tl,
    triton,
)

_CHUNK = 16384  # bytes of a page for each program


def copy_blocks(kv_cache: torch.Tensor, block_mapping: torch.Tensor) -> None:
    """Copy whole pages of all layers, keys and values alike, in one launch.

    Args:
        kv_cache: ``[..., pages, page_size, kv_heads, head_size]`` of any dtype, with at most two
            dimensions before the pages (``[layers, 2, ...]``). The same pages are copied at each
            index of these. A page must be contiguous memory, with its dimensions in any order.
            Written in place.
        block_mapping: pairs of a page to copy and a page to overwrite, int64 ``[pairs, 2]``.

    Raises:
        ValueError: shapes, strides, dtypes or devices do not fit; pages share memory. On values, if
            :func:`~vllm_module.kernels.operators.checks_values` is true: a page is beyond the
            cache, written twice, or both written and copied. Otherwise a pair with a page beyond
            the cache copies nothing, and a page written twice or also copied may get parts of both.

    """
    _check_pages(kv_cache)
    expect_writable("kv_cache", kv_cache)
    expect("block_mapping", block_mapping, (None, 2), (torch.int64,), kv_cache)
    if checks_values(block_mapping):
        pages = kv_cache.shape[-4]
        check_mapping(block_mapping, pages, pages)
        sources, destinations = block_mapping.unbind(1)
        both = destinations[torch.isin(destinations, sources)]
        if both.numel():
            raise ValueError(f"block_mapping both copies and writes page {int(both[0])}")
    _copy_blocks(kv_cache, block_mapping)


def _check_pages(kv_cache: torch.Tensor) -> None:
    if not 4 <= kv_cache.dim() <= 6:
        raise ValueError(
            "kv_cache must have the shape [pages, page_size, kv_heads, head_size] with at most two "
            f"dimensions before the pages, got {list(kv_cache.shape)}"
        )
    shape, strides, dense = kv_cache.shape[-3:], kv_cache.stride()[-3:], 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != dense:
            raise ValueError(
                f"a page of kv_cache must be one piece of memory, and its {list(shape)} have the "
                f"strides {list(strides)}"
            )
        dense *= size


def check_mapping(block_mapping: torch.Tensor, sources: int, destinations: int) -> None:
    """Raise ``ValueError`` for a page beyond its cache, or written more than once."""
    for column, pages in enumerate((sources, destinations)):
        named = block_mapping[:, column]
        outside = named[(named < 0) | (named >= pages)]
        if outside.numel():
            verb = ("copies", "writes")[column]
            raise ValueError(
                f"block_mapping {verb} page {int(outside[0])}, and the cache has {pages} pages"
            )
    written, times = named.unique(return_counts=True)
    if (times > 1).any():
        raise ValueError(f"block_mapping writes page {int(written[times > 1][0])} more than once")


def copy_blocks_reference(kv_cache: torch.Tensor, block_mapping: torch.Tensor) -> None:
    """Copy in plain torch; see :func:`copy_blocks`."""
    pages = _as_pages(kv_cache)
    inside = ((block_mapping >= 0) & (block_mapping < pages.shape[2])).all(1)
    source, destination = block_mapping[inside].unbind(1)
    pages[:, :, destination] = pages[:, :, source]


def copy_blocks_triton(kv_cache: torch.Tensor, block_mapping: torch.Tensor) -> None:
    """Copy by a Triton kernel; see :func:`copy_blocks`."""
    pages = _as_pages(kv_cache).view(torch.uint8)
    outer, inner, count, size = pages.shape
    chunks = -(-size // _CHUNK)
    grid = chunks * len(block_mapping), inner, outer
    if 0 in grid:
        return
    _copy[grid](
        pages,
        block_mapping,
        count,
        size,
        chunks,
        *pages.stride()[:3],
        *block_mapping.stride(),
        CHUNK=_CHUNK,
        num_warps=4,
    )


def _as_pages(kv_cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as ``[outer, inner, pages, elements]``; elements are in memory order."""
    while kv_cache.dim() < 6:
        kv_cache = kv_cache.unsqueeze(0)
    size = kv_cache.shape[-3:].numel()
    return kv_cache.as_strided((*kv_cache.shape[:3], size), (*kv_cache.stride()[:3], 1))


@triton.jit(do_not_specialize=["mapping_pair", "mapping_column"])
def _copy(
    cache_ptr,
    mapping_ptr,
    pages,
    size,
    chunks,
    outer_stride,
    inner_stride,
    page_stride,
    mapping_pair,
    mapping_column,
    CHUNK: tl.constexpr,
):
    """Copy part of a page at one index of the dimensions before the pages."""
    pair, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    source = tl.load(mapping_ptr + pair * mapping_pair)
    destination = tl.load(mapping_ptr + pair * mapping_pair + mapping_column)
    inside = (source >= 0) & (source < pages) & (destination >= 0) & (destination < pages)
    plane = tl.program_id(1).to(tl.int64) * inner_stride
    plane += tl.program_id(2).to(tl.int64) * outer_stride
    offset = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = inside & (offset < size)
    data = tl.load(cache_ptr + plane + source * page_stride + offset, mask=mask)
    tl.store(cache_ptr + plane + destination * page_stride + offset, data, mask=mask)


_copy_blocks = operator(copy_blocks_reference, copy_blocks_triton, nothing, ("kv_cache",))
