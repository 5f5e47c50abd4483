"""A tile of a matmul with eight-bit weights or wider ones.

This is no operation by itself: :mod:`~vllm_module.kernels.matmul.scaled_matmul` and
:mod:`~vllm_module.kernels.experts.grouped_matmul` share it.
"""

from __future__ import annotations

from vllm_module.kernels.operators import tl, triton


@triton.jit
def tile_of(program, tiles_m, tiles_n):
    """Return a program's tile of rows and tile of output features.

    Eight tiles of rows are consecutive, so that the weight stays in the L2 cache.
    """
    band = program // (8 * tiles_n)
    band_tiles = tl.minimum(tiles_m - band * 8, 8)
    index = program % (8 * tiles_n)
    return band * 8 + index % band_tiles, index // band_tiles


@triton.jit
def clamped(first, N, BLOCK_N: tl.constexpr):
    return tl.minimum(first + tl.arange(0, BLOCK_N), N - 1)


@triton.jit
def loaded(ptrs, inside, EVEN: tl.constexpr):
    return tl.load(ptrs) if EVEN else tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def block_scale(
    ptr,
    first,
    N,
    row,
    block_rows,
    ONE_SCALE: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if ONE_SCALE:
        scale = tl.load(ptr + tl.minimum(first, N - 1) // block_rows * row)
    else:
        n = clamped(first, N, BLOCK_N)
        n = n[:, None] if SWAP else n[None, :]
        scale = tl.load(ptr + n // block_rows * row)
    return scale


@triton.jit
def added(sums, x, weight, x_scale, scale, SWAP: tl.constexpr):
    """Add a step's product, times its scales, to the sums.

    Hopper's tensor cores accumulate FP8 products in about 14 bits, so they do it only for one step
    of 128 features.
    """
    weight = weight.to(x.dtype)
    if SWAP:
        left, right = weight, tl.trans(x)
    else:
        left, right = x, tl.trans(weight)
    if scale is not None:
        if x_scale is not None:
            scale = scale * x_scale
        sums += tl.dot(left, right, input_precision="ieee") * scale
    elif x.dtype == tl.float8e4nv:
        sums += tl.dot(left, right)
    else:
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums


@triton.jit
def written(
    y_ptrs,
    bias_ptr,
    sums,
    x_scale,
    scale,
    exist,
    first,
    N,
    bias_stride,
    SWAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write a tile, multiplied by the scales that all steps share."""
    n = first + tl.arange(0, BLOCK_N)
    n = n[:, None] if SWAP else n[None, :]
    if scale is not None:
        sums *= scale
        if x_scale is not None:
            sums *= x_scale
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + tl.minimum(n, N - 1) * bias_stride).to(tl.float32)
    tl.store(y_ptrs + n, sums.to(y_ptrs.dtype.element_ty), mask=exist & (n < N))
