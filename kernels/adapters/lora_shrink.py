"""Products with A of LoRA adapters: each row with that of its adapter."""

from __future__ import annotations

from itertools import pairwise

import torch

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.experts.grouped_tile import grouped_tile, tiles_of
from vllm_module.kernels.matmul.product_tile import added, clamped
from vllm_module.kernels.operators import (
    expect,
    next_power_of_2,
    operator,
    strides_of,
    tl,
    triton,
)

_FEW, _MANY = 16, 64  # rows of a tile
_PROGRAMS = 256  # about two for each multiprocessor of a large GPU
_DEPTH = 256  # input features of a part, at least
_MOST_PARTS = 8
_MOST_OFFSETS = 1024  # that a program reads at a time: more do not fit into its registers


def lora_shrink(
    x: torch.Tensor, a: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Multiply rows, sorted by group, by the A of their groups.

    Place ``p`` of the result is ``a[g] @ x[rows[p]]``, of the group ``g`` with ``offsets[g] <= p <
    offsets[g + 1]``; places from ``offsets[-1]`` on are not written. A group is an adapter, or one
    expert or head of an adapter. The input features are cut into parts, whose products are added by
    :func:`~vllm_module.kernels.adapters.lora_expand.lora_expand`: in a fixed order, so a row has
    the same bits whatever the other rows are. The launch depends only on shapes, so a CUDA graph
    can replay it. (Punica, arXiv:2310.18547, and S-LoRA, arXiv:2311.03285.)

    Args:
        x: ``[tokens, input]``, bfloat16, float16 or float32, with any strides.
        a: ``[groups, ranks, input]``, of the dtype of ``x``, with any strides: the A of all slices
            of the output, one after the other.
        rows, offsets: int32 ``[places]`` and ``[groups + 1]``, from
            :func:`~vllm_module.kernels.experts.sort_by_expert.sort_by_expert`.

    Returns:
        float32 ``[parts, places, ranks]``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.

    """
    expect("x", x, (None, None), FLOATS)
    expect("a", a, (None, None, x.shape[1]), (x.dtype,), x)
    expect("rows", rows, (None,), (torch.int32,), x)
    expect("offsets", offsets, (len(a) + 1,), (torch.int32,), x)
    return _lora_shrink(x, a, rows, offsets, parts_of(len(rows), len(a), x.shape[1]))


def tile_rows(places: int, groups: int) -> int:
    """Return the rows of a tile; it depends on shapes only."""
    return _FEW if places < 2 * _FEW * groups else _MANY


def parts_of(places: int, groups: int, inputs: int) -> int:
    """Return how many parts the input features are cut into; it depends on shapes only."""
    tiles, parts = -(-places // tile_rows(places, groups)), 1
    while parts < _MOST_PARTS and 2 * parts * tiles <= _PROGRAMS and 2 * parts * _DEPTH <= inputs:
        parts *= 2
    return parts


def chunks_of(groups: int) -> dict[str, int]:
    """Return how the offsets of groups are read: how many at a time, and how often."""
    count = min(next_power_of_2(groups + 1), _MOST_OFFSETS)
    return {"COUNT": count, "CHUNKS": -(-(groups + 1) // count)}


def lora_shrink_reference(
    x: torch.Tensor, a: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, parts: int
) -> torch.Tensor:
    """Multiply in plain torch, one group after another; see :func:`lora_shrink`."""
    low = _empty(x, a, rows, offsets, parts)
    each = -(-x.shape[1] // parts)
    for group, (first, last) in enumerate(pairwise(offsets.tolist())):
        own = x.index_select(0, rows[first:last])
        for part in range(parts):
            features = slice(part * each, (part + 1) * each)
            low[part, first:last] = own[:, features].float() @ a[group, :, features].float().t()
    return low


def lora_shrink_triton(
    x: torch.Tensor, a: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, parts: int
) -> torch.Tensor:
    """Multiply in a Triton kernel; see :func:`lora_shrink`."""
    low = _empty(x, a, rows, offsets, parts)
    (groups, ranks, inputs), places = a.shape, len(rows)
    if not low.numel():
        return low
    if not groups * inputs:
        return low.zero_()
    height = tile_rows(places, groups)
    width = min(64, max(16, next_power_of_2(ranks)))
    depth = 32 if x.itemsize == 4 else 128 if height == _FEW else 64
    grid = tiles_of(places, groups, height) * -(-ranks // width), parts
    _shrink[grid](
        x,
        a,
        rows,
        offsets,
        low,
        places,
        groups,
        ranks,
        inputs,
        -(-inputs // (parts * depth)),
        strides_of(x, a),
        **chunks_of(groups),
        BLOCK_M=height,
        BLOCK_N=width,
        BLOCK_K=depth,
        num_warps=4,
        num_stages=3,
    )
    return low


@triton.jit(do_not_specialize=["places", "steps"])
def _shrink(
    x_ptr,
    a_ptr,
    rows_ptr,
    offsets_ptr,
    low_ptr,
    places,
    groups,
    ranks,
    K,
    steps,
    strides,
    COUNT: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile of one group's rows by a tile of its A, over one part of the features."""
    x_strides, a_strides = strides
    group, n, place, exist, row = grouped_tile(
        offsets_ptr, rows_ptr, places, groups, 1, ranks, COUNT, BLOCK_M, BLOCK_N, CHUNKS
    )
    if group >= groups:
        return
    part = tl.program_id(1).to(tl.int64)
    x_ptrs = x_ptr + row[:, None] * x_strides[0]
    a_ptr += group.to(tl.int64) * a_strides[0]
    a_ptrs = a_ptr + clamped(n, ranks, BLOCK_N).to(tl.int64)[:, None] * a_strides[1]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(steps):
        k = ((part * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_ptrs + k * x_strides[1], mask=k < K, other=0.0)
        a = tl.load(a_ptrs + k * a_strides[2], mask=k < K, other=0.0)
        sums = added(sums, x, a, None, None, False)
    n = (n + tl.arange(0, BLOCK_N))[None, :]
    low_ptrs = low_ptr + (part * places + place[:, None]) * ranks + n
    tl.store(low_ptrs, sums, mask=exist[:, None] & (n < ranks))


def _empty(
    x: torch.Tensor, a: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, parts: int
) -> torch.Tensor:
    """Return an empty product."""
    return x.new_empty((parts, len(rows), a.shape[1]), dtype=torch.float32)


_lora_shrink = operator(lora_shrink_reference, lora_shrink_triton, _empty)
