"""Adding the products with B of LoRA adapters to the slices of an output."""

from __future__ import annotations

from itertools import pairwise

import torch

from vllm_module.kernels.adapters.lora_shrink import chunks_of, tile_rows
from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.experts.grouped_tile import grouped_tile, tiles_of
from vllm_module.kernels.matmul.product_tile import added
from vllm_module.kernels.operators import (
    expect,
    expect_writable,
    next_power_of_2,
    nothing,
    operator,
    strides_of,
    tl,
    triton,
)


def lora_expand(
    low: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    ends: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Add to ``y``, in place, what adapters compute from the products with their A.

    The output is cut into slices, such as those of queries, keys and values; slice ``s`` ends
    before ``ends[s]``. For place ``p`` of the group ``g``, the slice of the row ``rows[p]`` gets
    ``scale[g, s] * b[g] @ l``, where ``l`` is the slice's part of ``low[:, p]``, added up and
    rounded to the dtype of ``b``. It is added in float32. What has the scale 0, and rows in no
    group, are not written: they keep their bits. The launch depends only on shapes, so a CUDA graph
    can replay it.

    Args:
        low: float32 ``[parts, places, slices * rank]``, from
            :func:`~vllm_module.kernels.adapters.lora_shrink.lora_shrink`.
        b: ``[groups, output, rank]``, with any strides; bfloat16, float16 or float32.
        scale: float32 ``[groups, slices]``; 0 where a group adds nothing to a slice.
        ends: int32 ``[slices]``, ascending; the last is the output's size.
        rows, offsets: as for ``lora_shrink``; ``rows`` has no row twice.
        y: ``[tokens, output]``, of the dtype of ``b``, with any strides.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other, or elements of ``y`` share
            memory.

    """
    expect("b", b, (None, None, None), FLOATS)
    groups, outputs, rank = b.shape
    expect("ends", ends, (None,), (torch.int32,), b)
    expect("scale", scale, (groups, len(ends)), (torch.float32,), b)
    expect("rows", rows, (None,), (torch.int32,), b)
    expect("low", low, (None, len(rows), len(ends) * rank), (torch.float32,), b)
    expect("offsets", offsets, (groups + 1,), (torch.int32,), b)
    expect("y", y, (None, outputs), (b.dtype,), b)
    expect_writable("y", y)
    _lora_expand(low, b, scale, ends, rows, offsets, y)


def lora_expand_reference(
    low: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    ends: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Add in plain torch, one group and slice after another; see :func:`lora_expand`."""
    rank = b.shape[2]
    slices = [slice(*each) for each in pairwise([0, *ends.tolist()])]
    for group, (first, last) in enumerate(pairwise(offsets.tolist())):
        own = rows[first:last]
        for index, output in enumerate(slices):
            factor = scale[group, index]
            if first == last or factor == 0:
                continue
            part = low[:, first:last, index * rank : (index + 1) * rank].sum(0).to(b.dtype)
            product = part.float() @ b[group, output].float().t()
            y[own, output] = (y[own, output].float() + factor * product).to(y.dtype)


def lora_expand_triton(
    low: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    ends: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Add in a Triton kernel; see :func:`lora_expand`."""
    (parts, places, _), (groups, outputs, rank) = low.shape, b.shape
    slices = len(ends)
    if not places * groups * outputs * rank:
        return
    height = tile_rows(places, groups)
    width = 128 if b.itemsize == 2 else 32
    # A slice may end with a tile that is not full.
    tiles = outputs // width + slices
    _expand[tiles_of(places, groups, height) * tiles,](
        low,
        b,
        scale.contiguous(),
        ends,
        rows,
        offsets,
        y,
        places,
        parts,
        groups,
        tiles,
        rank,
        strides_of(b, y),
        SLICES=slices,
        ENDS=max(2, next_power_of_2(slices)),
        **chunks_of(groups),
        BLOCK_M=height,
        BLOCK_N=width,
        BLOCK_R=16 if rank <= 16 or b.itemsize == 4 else 32,
        num_warps=4 if height * width < 4096 else 8,
        num_stages=2,
    )


@triton.jit(do_not_specialize=["places", "parts"])
def _expand(
    low_ptr,
    b_ptr,
    scale_ptr,
    ends_ptr,
    rows_ptr,
    offsets_ptr,
    y_ptr,
    places,
    parts,
    groups,
    tiles,
    rank,
    strides,
    SLICES: tl.constexpr,
    ENDS: tl.constexpr,
    COUNT: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Add to a tile: some rows of one group, and some features of one slice."""
    b_strides, y_strides = strides
    group, n, place, exist, row = grouped_tile(
        offsets_ptr, rows_ptr, places, groups, 1, tiles * BLOCK_N, COUNT, BLOCK_M, BLOCK_N, CHUNKS
    )
    if group >= groups:
        return
    tile, s = n // BLOCK_N, tl.arange(0, ENDS)
    starts = tl.load(ends_ptr + s - 1, mask=(s > 0) & (s < SLICES), other=0)
    ends = tl.load(ends_ptr + s, mask=s < SLICES, other=0)
    of_slices = tl.where(s < SLICES, (ends - starts + BLOCK_N - 1) // BLOCK_N, 0)
    behind = tl.cumsum(of_slices, axis=0)
    own = tl.sum((behind <= tile).to(tl.int32), axis=0)
    if own >= SLICES:
        return
    first = starts + (tile - behind + of_slices) * BLOCK_N
    first = tl.sum(tl.where(s == own, first, 0), axis=0)
    end = tl.sum(tl.where(s == own, ends, 0), axis=0)
    scale = tl.load(scale_ptr + group * SLICES + own)
    if scale == 0:
        return

    n = first + tl.arange(0, BLOCK_N)
    b_ptr += group.to(tl.int64) * b_strides[0]
    b_ptrs = b_ptr + tl.minimum(n, end - 1).to(tl.int64)[:, None] * b_strides[1]
    low_ptrs = low_ptr + place[:, None] * (SLICES * rank) + own * rank
    part_stride = places.to(tl.int64) * (SLICES * rank)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = (start + tl.arange(0, BLOCK_R))[None, :]
        low = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for part in range(parts):
            low += tl.load(
                low_ptrs + part * part_stride + r, mask=exist[:, None] & (r < rank), other=0.0
            )
        b = tl.load(b_ptrs + r.to(tl.int64) * b_strides[2], mask=r < rank, other=0.0)
        sums = added(sums, low.to(b.dtype), b, None, None, False)
    y_ptrs = y_ptr + row[:, None] * y_strides[0] + n.to(tl.int64)[None, :] * y_strides[1]
    inside = exist[:, None] & (n < end)[None, :]
    y = tl.load(y_ptrs, mask=inside, other=0.0).to(tl.float32) + scale * sums
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=inside)


_lora_expand = operator(lora_expand_reference, lora_expand_triton, nothing, ("y",))
