"""Copying pages of a KV cache between device and host memory."""

from __future__ import annotations

import torch

from vllm_module.kernels.attention.copy_blocks import check_mapping
from vllm_module.kernels.operators import expect, expect_writable


def swap_blocks(
    source: torch.Tensor, destination: torch.Tensor, block_mapping: torch.Tensor
) -> None:
    """Copy whole pages from one cache to another, on the current stream.

    A copy between device and host is asynchronous: do not use the host's memory before the stream
    has finished it. Pages that are consecutive in both caches are copied at once.

    Args:
        source: ``[..., pages, page_size, kv_heads, head_size]``, such as ``[layers, 2, ...]``. The
            same pages are copied at each index of the leading dimensions; at one index, pages must
            be contiguous.
        destination: like ``source``, with any number of pages. Written in place. If one cache is on
            a CUDA device, the other must be there too or in pinned memory.
        block_mapping: pairs of a page of ``source`` and a page of ``destination`` to overwrite,
            int64 ``[pairs, 2]`` on the CPU.

    Raises:
        ValueError: shapes, dtypes, strides or memory do not fit; caches share memory; a page is
            beyond its cache or written twice.

    """
    if source.dim() < 4:
        raise ValueError(
            "source must have the shape [..., pages, page_size, kv_heads, head_size], got "
            f"{list(source.shape)}"
        )
    shape = source.shape
    expect("destination", destination, (*shape[:-4], None, *shape[-3:]), (source.dtype,))
    for name, cache, other in (
        ("source", source, destination),
        ("destination", destination, source),
    ):
        if cache.numel() and not cache[(0,) * (cache.dim() - 4)].is_contiguous():
            raise ValueError(
                f"{name}'s pages of one layer must be contiguous, and its {list(cache.shape)} have "
                f"the strides {list(cache.stride())}"
            )
        if cache.is_cpu and other.is_cuda and not cache.is_pinned():
            raise ValueError(
                f"{name} is in host memory that is not pinned, which a CUDA device cannot copy "
                "without waiting: allocate it with pin_memory=True"
            )
    expect("block_mapping", block_mapping, (None, 2), (torch.int64,), torch.empty(0, device="cpu"))
    expect_writable("destination", destination)
    memory = source.untyped_storage().data_ptr()
    if memory and memory == destination.untyped_storage().data_ptr():
        raise ValueError(
            "source and destination must not share memory, and they are parts of one storage at "
            f"{memory:#x}: copy_blocks copies within a cache"
        )
    check_mapping(block_mapping, source.shape[-4], destination.shape[-4])
    for first, onto, count in _runs(block_mapping):
        old, new = source.narrow(-4, first, count), destination.narrow(-4, onto, count)
        for source_plane, plane in zip(_planes(old), _planes(new), strict=True):
            plane.copy_(source_plane, non_blocking=True)


def _planes(cache: torch.Tensor) -> list[torch.Tensor]:
    """Return a view ``[pages, page_size, kv_heads, head_size]`` for each leading index."""
    planes = [cache]
    for _ in range(cache.dim() - 4):
        planes = [part for plane in planes for part in plane.unbind()]
    return planes


def _runs(block_mapping: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return runs of consecutive pages: the first source page, the first destination, the count."""
    runs: list[tuple[int, int, int]] = []
    for source, destination in block_mapping.tolist():
        if runs:
            first, onto, count = runs[-1]
            if (source, destination) == (first + count, onto + count):
                runs[-1] = first, onto, count + 1
                continue
        runs.append((source, destination, 1))
    return runs
