"""Grouped matmul with MXFP4 weights."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.kernels.dtypes import E2M1, FLOATS
from vllm_module.kernels.experts.grouped_matmul import by_expert, expect_groups, rows_of
from vllm_module.kernels.experts.grouped_tile import grouped_tile, tiles_of
from vllm_module.kernels.matmul.code_rows import mxfp4_rows
from vllm_module.kernels.matmul.code_rows_matmul import multiplied_by_codes
from vllm_module.kernels.matmul.linear import linear
from vllm_module.kernels.matmul.matmul_configurations import mxfp4_config_of
from vllm_module.kernels.matmul.product_tile import added, clamped, loaded, written
from vllm_module.kernels.operators import (
    expect,
    next_power_of_2,
    operator,
    strides_of,
    tl,
    triton,
)

# Scales converted at once, with half a million elements: as many as fit a CPU's cache.
_CHUNK = 1 << 14


def grouped_matmul_mxfp4(
    x: torch.Tensor,
    blocks: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    top_k: int = 1,
) -> torch.Tensor:
    """Multiply each row by the weight of its expert, which is dequantized in the kernel.

    Args:
        x: ``[tokens, input]``, bfloat16, float16 or float32.
        blocks, scales: the weights ``[count, output, input]``, as for :func:`dequantize_mxfp4`.
        offsets, bias, rows, top_k: as for
            :func:`~vllm_module.kernels.experts.grouped_matmul.grouped_matmul`.

    Returns:
        ``[tokens * top_k, output]``.

    Raises:
        ValueError: as ``grouped_matmul``.

    """
    expect("x", x, (None, None), FLOATS)
    if x.shape[1] % 32:
        raise ValueError(f"the features of x must divide into blocks of 32, got {x.shape[1]}")
    expect("blocks", blocks, (None, None, x.shape[1] // 32, 16), (torch.uint8,), x)
    expect("scales", scales, blocks.shape[:-1], (torch.uint8,), x)
    expect_groups(x, offsets, bias, rows, top_k, (blocks.shape[0], blocks.shape[1]), x.dtype)
    return _grouped_matmul_mxfp4(x, blocks, scales, offsets, bias, rows, top_k)


def dequantize_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the values of MXFP4 blocks (OCP Microscaling Formats 1.0).

    An element is ``e2m1 * 2**(scale - 127)``; a scale of 255 is NaN. bfloat16 and float32 hold
    every element exactly.

    Args:
        blocks: uint8 ``[..., columns / 32, 16]``. A byte holds two elements, the one with the even
            index in its low half.
        scales: uint8 ``[..., columns / 32]``.
        dtype: dtype of the result, floating point.

    Returns:
        ``[..., columns]``.

    Raises:
        ValueError: shapes or dtypes do not fit each other.

    """
    if blocks.dim() < 2 or blocks.shape[-1] != 16:
        raise ValueError(f"blocks must have the shape [..., columns / 32, 16], got {blocks.shape}")
    expect("blocks", blocks, None, (torch.uint8,))
    expect("scales", scales, blocks.shape[:-1], (torch.uint8,), blocks)
    shape = (*scales.shape[:-1], scales.shape[-1] * 32)
    values = torch.tensor(E2M1, dtype=torch.bfloat16, device=blocks.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1).view(torch.int32)
    pairs = pairs.flatten()  # a pair of bfloat16 for each byte
    wide = torch.empty(scales.numel(), 32, dtype=dtype, device=blocks.device)
    chunks = (blocks.reshape(-1, 16), scales.reshape(-1), wide)
    for block, scale, out in zip(*(x.split(_CHUNK) for x in chunks), strict=True):
        elements = pairs.index_select(0, block.flatten().int()).view(torch.bfloat16)
        factor = scale.view(torch.float8_e8m0fnu).float()
        torch.mul(elements.view(-1, 32).float(), factor[:, None], out=out)
    return wide.view(shape)


def grouped_matmul_mxfp4_reference(
    x: torch.Tensor,
    blocks: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor | None,
    top_k: int,
) -> torch.Tensor:
    """Multiply by the experts that have rows, one at a time, in plain torch."""

    def product(expert: int, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = multiplied_by_codes(x, mxfp4_rows, blocks[expert], scales[expert], bias=bias)
        if y is not None:
            return y
        return linear(x, dequantize_mxfp4(blocks[expert], scales[expert], x.dtype), bias)

    described = mxfp4_rows, blocks, scales
    return by_expert(x, product, blocks.shape[1], offsets, bias, rows, top_k, described)


def grouped_matmul_mxfp4_triton(*arguments: Any) -> torch.Tensor:
    """Multiply in a Triton kernel; see :func:`grouped_matmul_mxfp4`."""
    x, blocks, scales, offsets, bias, rows, top_k = arguments
    y = _empty(*arguments)
    (length, N), K, count = y.shape, x.shape[1], len(blocks)
    if not y.numel() or not count:
        return y.zero_()
    config = mxfp4_config_of(length, count, x)
    tiles = tiles_of(length, count, config.rows) * -(-N // config.columns)
    _multiply_mxfp4[(tiles,)](
        (x, blocks, scales, bias, rows, offsets, y),
        length,
        count,
        top_k,
        N,
        K,
        strides_of(x, blocks, scales),
        (0, 0) if bias is None else bias.stride(),
        COUNT=next_power_of_2(count + 1),
        EVEN=K % config.depth == 0,
        **config.launch(),
    )
    return y


@triton.jit(do_not_specialize=["length"])
def _multiply_mxfp4(
    tensors,
    length,
    count,
    top_k,
    N,
    K,
    strides,
    bias_strides,
    COUNT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile of one expert's rows by a tile of its weight, which is the left operand."""
    x_ptr, blocks_ptr, scales_ptr, bias_ptr, rows_ptr, offsets_ptr, y_ptr = tensors
    x_strides, blocks_strides, scales_strides = strides
    BLOCKS: tl.constexpr = BLOCK_K // 32
    expert, n, row, exist, source = grouped_tile(
        offsets_ptr, rows_ptr, length, count, top_k, N, COUNT, BLOCK_M, BLOCK_N
    )
    x_ptrs = x_ptr + source[:, None] * x_strides[0]
    row, exist = row[None, :], exist[None, :]
    y_ptrs = y_ptr + row * N
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if expert >= count:
        written(y_ptrs, None, sums, None, None, exist, n, N, 0, True, BLOCK_N)
        return

    expert = expert.to(tl.int64)
    if bias_ptr is not None:
        bias_ptr += expert * bias_strides[0]
    features = clamped(n, N, BLOCK_N).to(tl.int64)
    scales_ptrs = scales_ptr + expert * scales_strides[0] + features[:, None] * scales_strides[1]
    byte = tl.arange(0, 16)[None, None, :] * blocks_strides[3]
    blocks_ptrs = blocks_ptr + expert * blocks_strides[0]
    blocks_ptrs += features[:, None, None] * blocks_strides[1] + byte
    for step in range(tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        block = step * BLOCKS + tl.arange(0, BLOCKS)
        inside = (block < K // 32)[None, :]
        x = loaded(x_ptrs + k.to(tl.int64)[None, :] * x_strides[1], (k < K)[None, :], EVEN)
        block = block.to(tl.int64)[None, :]
        scale = loaded(scales_ptrs + block * scales_strides[2], inside, EVEN)
        packed = loaded(
            blocks_ptrs + block[:, :, None] * blocks_strides[2], inside[:, :, None], EVEN
        )
        sums = added(sums, x, _dequantized(packed, scale, x.dtype), None, None, True)
    written(y_ptrs, bias_ptr, sums, None, None, exist, n, N, bias_strides[1], True, BLOCK_N)


@triton.jit
def _dequantized(packed, scale, dtype: tl.constexpr):
    """Return bytes ``[rows, blocks, 16]`` times scales ``[rows, blocks]`` as a matrix.

    The bits of an e2m1 number, at the place of a float16's last exponent bits and first fraction
    bit, are that number times 2**-14.
    """
    packed = packed.to(tl.uint16)
    even = ((packed & 7) << 9) | ((packed & 8) << 12)
    odd = ((packed & 0x70) << 5) | ((packed & 0x80) << 8)
    values = tl.join(even, odd).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    scale = scale.to(tl.int32)
    bits = tl.where(scale == 0, 0x400000, tl.where(scale == 255, 0x7FC00000, scale << 23))
    values *= bits.to(tl.float32, bitcast=True)[:, :, None, None]
    values = tl.reshape(values, [values.shape[0], values.shape[1] * 32])
    return values.to(dtype)


def _empty(x: torch.Tensor, blocks: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return an empty product."""
    *_, rows, _ = others
    return x.new_empty(rows_of(x, rows), blocks.shape[1])


_grouped_matmul_mxfp4 = operator(
    grouped_matmul_mxfp4_reference, grouped_matmul_mxfp4_triton, _empty
)
