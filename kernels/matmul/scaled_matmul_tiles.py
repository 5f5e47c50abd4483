"""Matmul with eight-bit weights, in tiles loaded by pointers.

This is no operation by itself: it belongs to :mod:`~vllm_module.kernels.matmul.scaled_matmul`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_module.kernels.matmul.matmul_configurations import MatmulConfig
from vllm_module.kernels.matmul.product_tile import (
    added,
    block_scale,
    clamped,
    loaded,
    tile_of,
    written,
)
from vllm_module.kernels.operators import strides_of, tl, triton

_SUMMED = 256  # output features for each program that adds splits


class Product(NamedTuple):
    """The operands of ``y = x @ weight.T + bias`` with their scales.

    Attributes:
        x: ``[M, K]``.
        weight: ``[N, K]``.
        scale: ``[ceil(N / block[0]), ceil(K / block[1])]``.
        x_scale: ``[M, ceil(K / block[1])]``; ``None`` if ``x`` is not quantized.
        block: rows and columns of the weight that share a scale.
        bias: ``[N]``.
        y: contiguous memory ``[M, N]``; written.

    """

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    x_scale: torch.Tensor | None
    block: tuple[int, int]
    bias: torch.Tensor | None
    y: torch.Tensor


def multiply_tiles(product: Product, config: MatmulConfig) -> None:
    """Launch the matmul tile by tile; with splits, add them afterwards."""
    x, weight, scale, x_scale, (block_rows, block_columns), bias, y = product
    (M, K), N, groups = x.shape, weight.shape[0], scale.shape[1]
    parts = y
    if config.splits > 1:
        parts = torch.empty(config.splits, M, N, dtype=torch.float32, device=x.device)
    span = K if groups <= 1 else block_columns  # number of input features that steps divide
    columns = config.columns * (2 if config.two else 1)
    _multiply[(-(-M // config.rows) * -(-N // columns), config.splits)](
        (x, weight, scale, x_scale, bias, parts),
        M,
        N,
        K,
        strides_of(x, weight, scale, x_scale),
        1 if bias is None else bias.stride(0),
        block_rows,
        block_columns,
        STEPS=-(-block_columns // config.depth) if groups > 1 else 0,
        EVEN=span % config.depth == 0 and K % span == 0,
        ONE_SCALE=block_rows % config.columns == 0 or block_rows >= N,
        SWAP=config.rows < 64 or x.dtype != torch.float8_e4m3fn,
        TWO=config.two,
        SPLITS=config.splits,
        **config.launch(),
    )
    if config.splits > 1:
        if groups > 1:  # each step has already applied its scales
            add_splits(parts, bias, y)
        else:
            add_splits(parts, bias, y, scale, x_scale, block_rows)


def add_splits(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    block_rows: int = 1,
) -> None:
    """Add the splits of a matmul, ``parts [splits, M, N]``, into ``y [M, N]``.

    The sums are multiplied by the scales that are given, as in :class:`Product`.
    """
    splits, M, N = parts.shape
    _add_splits[(M, -(-N // _SUMMED))](
        parts,
        scale,
        x_scale,
        bias,
        y,
        N,
        1 if scale is None else scale.stride(0),
        1 if x_scale is None else x_scale.stride(0),
        1 if bias is None else bias.stride(0),
        block_rows,
        SPLITS=splits,
        BLOCK=_SUMMED,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["M"])
def _multiply(
    tensors,
    M,
    N,
    K,
    strides,
    bias_stride,
    block_rows,
    block_columns,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    SWAP: tl.constexpr,
    TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Multiply a tile of tokens by one tile of the weight, or with TWO by two neighbouring tiles.

    STEPS is the number of steps over input features that share a scale; 0 if all share one. With
    SWAP the weight is the left operand: then it can be widened in registers, and tokens may be
    few. Rows after the last one repeat it, and are not written.
    """
    x_ptr, weight_ptr, scale_ptr, x_scale_ptr, bias_ptr, y_ptr = tensors
    x_strides, weight_strides, scale_strides, x_scale_strides = strides
    COLUMNS: tl.constexpr = BLOCK_N * 2 if TWO else BLOCK_N
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, COLUMNS)
    top, left = tile_of(tl.program_id(0), tiles_m, tiles_n)
    m = top.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    left = left * COLUMNS
    right = left + BLOCK_N

    x_ptrs = x_ptr + tl.minimum(m, M - 1)[:, None] * x_strides[0]
    ptrs = weight_ptr + clamped(left, N, BLOCK_N).to(tl.int64)[:, None] * weight_strides[0]
    right_ptrs = weight_ptr + clamped(right, N, BLOCK_N).to(tl.int64)[:, None] * weight_strides[0]
    if SWAP:
        m = m[None, :]
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        m = m[:, None]
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    right_sums = sums
    x_scale_ptrs = x_scale_ptr
    if x_scale_ptr is not None:
        x_scale_ptrs += tl.minimum(m, M - 1) * x_scale_strides[0]

    steps = tl.cdiv(K, block_columns) * STEPS if STEPS else tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(steps, SPLITS)
    first = tl.program_id(1) * each
    for step in range(first, tl.minimum(first + each, steps)):
        if STEPS:
            group = step // STEPS
            k = group * block_columns + step % STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = (k < tl.minimum(K, (group + 1) * block_columns))[None, :]
        else:
            group, k = 0, step * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = (k < K)[None, :]
        k = k.to(tl.int64)[None, :]
        x = loaded(x_ptrs + k * x_strides[1], inside, EVEN)
        x_scale = None
        if STEPS and x_scale_ptrs is not None:
            x_scale = tl.load(x_scale_ptrs + group * x_scale_strides[1])
        scales, scale = scale_ptr + group * scale_strides[1], None
        weight = loaded(ptrs + k * weight_strides[1], inside, EVEN)
        if STEPS:
            scale = block_scale(
                scales, left, N, scale_strides[0], block_rows, ONE_SCALE, SWAP, BLOCK_N
            )
        sums = added(sums, x, weight, x_scale, scale, SWAP)
        if TWO:
            weight = loaded(right_ptrs + k * weight_strides[1], inside, EVEN)
            if STEPS:
                scale = block_scale(
                    scales, right, N, scale_strides[0], block_rows, ONE_SCALE, SWAP, BLOCK_N
                )
            right_sums = added(right_sums, x, weight, x_scale, scale, SWAP)

    y_ptrs = y_ptr + (tl.program_id(1).to(tl.int64) * M + m) * N
    x_scale, scale = None, None
    if not STEPS and SPLITS == 1:
        if x_scale_ptrs is not None:
            x_scale = tl.load(x_scale_ptrs)
        scale = block_scale(scale_ptr, left, N, scale_strides[0], block_rows, False, SWAP, BLOCK_N)
    bias = bias_ptr if SPLITS == 1 else None
    written(y_ptrs, bias, sums, x_scale, scale, m < M, left, N, bias_stride, SWAP, BLOCK_N)
    if TWO:
        if not STEPS:
            scale = block_scale(
                scale_ptr, right, N, scale_strides[0], block_rows, False, SWAP, BLOCK_N
            )
        written(
            y_ptrs, bias, right_sums, x_scale, scale, m < M, right, N, bias_stride, SWAP, BLOCK_N
        )


@triton.jit
def _add_splits(
    parts_ptr,
    scale_ptr,
    x_scale_ptr,
    bias_ptr,
    y_ptr,
    N,
    scale_row,
    x_scale_row,
    bias_stride,
    block_rows,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the splits of K for some features of a token."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    sums = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        row = split * tl.num_programs(0) + m
        sums += tl.load(parts_ptr + row * N + n, mask=mask, other=0.0)
    n = n.to(tl.int64)
    if scale_ptr is not None:
        sums *= tl.load(scale_ptr + n // block_rows * scale_row, mask=mask, other=0.0)
        if x_scale_ptr is not None:
            sums *= tl.load(x_scale_ptr + m * x_scale_row)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + n * bias_stride, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + m * N + n, sums.to(y_ptr.dtype.element_ty), mask=mask)
