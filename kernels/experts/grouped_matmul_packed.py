"""Grouped matmul with packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.experts.grouped_matmul import (
    by_expert,
    expect_groups,
    grouped_matmul_triton,
    rows_of,
)
from vllm_module.kernels.experts.grouped_tile import grouped_tile, tiles_of
from vllm_module.kernels.matmul import code_rows
from vllm_module.kernels.matmul.matmul_configurations import (
    PackedWeight,
    one_scale,
    packed_tiles,
    rows_of_a_tile,
)
from vllm_module.kernels.matmul.packed_matmul import packed_matmul_reference
from vllm_module.kernels.matmul.packed_matmul_tiles import (
    added_packed,
    as_integer,
    packed_rows,
    packed_scales,
    tiles_take,
)
from vllm_module.kernels.matmul.packed_words import Packing, check_packed, dequantize_packed
from vllm_module.kernels.matmul.product_tile import clamped, loaded, written
from vllm_module.kernels.operators import (
    expect,
    next_power_of_2,
    operator,
    strides_of,
    tl,
    triton,
)


def grouped_matmul_packed(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    packing: Packing,
    group_size: int,
    offsets: torch.Tensor,
    *,
    zeros: torch.Tensor | None = None,
    group_of: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    top_k: int = 1,
) -> torch.Tensor:
    """Multiply each row by the packed weight of its expert, accumulating in float32.

    On a GPU, codes are unpacked in the kernel, and the launch depends only on shapes, so a CUDA
    graph can replay it. Codes of 3 bits, which cross word boundaries, are dequantized by torch
    before the product, for all experts.

    Args:
        x: ``[tokens, input]``, bfloat16, float16 or float32.
        words, scales, packing, group_size, zeros, group_of: the weights ``[count, output, input]``,
            each as for :func:`~vllm_module.kernels.matmul.packed_words.dequantize_packed`.
        offsets, bias, rows, top_k: as for
            :func:`~vllm_module.kernels.experts.grouped_matmul.grouped_matmul`.

    Returns:
        ``[tokens * top_k, output]``.

    Raises:
        ValueError: as ``grouped_matmul``, and for a packing that words cannot have. Numbers of
            groups are not checked.

    """
    expect("x", x, (None, None), FLOATS)
    expect("words", words, (None, None, None))
    output, columns = check_packed(x, words, scales, packing, group_size, zeros, group_of)
    expect("x", x, (None, columns))
    expect_groups(x, offsets, bias, rows, top_k, (len(words), output), x.dtype)
    return _grouped_matmul_packed(
        x, words, scales, *packing, group_size, zeros, group_of, offsets, bias, rows, top_k
    )


def dequantize_experts(
    words: torch.Tensor,
    scales: torch.Tensor,
    packing: Packing,
    group_size: int,
    dtype: torch.dtype,
    zeros: torch.Tensor | None = None,
    group_of: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weights ``[count, output, input]`` of experts, in ``dtype``.

    Arguments are those of :func:`~vllm_module.kernels.matmul.packed_words.dequantize_packed`, each
    with a leading dimension of experts.
    """
    shape = packing.codes(words.shape[1:], words.dtype.itemsize * 8)
    weight = torch.empty(len(words), *shape, dtype=dtype, device=words.device)
    for expert, each in enumerate(weight):
        own_zeros = None if zeros is None else zeros[expert]
        own_groups = None if group_of is None else group_of[expert]
        each.copy_(
            dequantize_packed(
                words[expert], scales[expert], packing, group_size, dtype, own_zeros, own_groups
            )
        )
    return weight


def grouped_matmul_packed_reference(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    along: int,
    order: Sequence[int] | None,
    group_size: int,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor | None,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor | None,
    top_k: int,
) -> torch.Tensor:
    """Multiply by the experts that have rows, one at a time, in plain torch."""

    def product(expert: int, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        own_zeros = None if zeros is None else zeros[expert]
        own_groups = None if group_of is None else group_of[expert]
        own = words[expert], scales[expert], bits, along, order, group_size, own_zeros, own_groups
        return packed_matmul_reference(x, *own, None, bias)

    packing = Packing.of(bits, along, order)
    described = code_rows.packed_rows, words, scales, packing, group_size, zeros, group_of, None
    return by_expert(x, product, scales.shape[1], offsets, bias, rows, top_k, described)


def grouped_matmul_packed_triton(*arguments: Any) -> torch.Tensor:
    """Multiply in a Triton kernel; see :func:`grouped_matmul_packed`."""
    x, words, scales, *layout, group_size, zeros, group_of, offsets, bias, rows, top_k = arguments
    packing = Packing.of(*layout)
    (count, N, _), K = scales.shape, x.shape[1]
    length = rows_of(x, rows)
    y = x.new_empty(length, N)
    if not y.numel() or not count:
        return y.zero_()
    if not K or not tiles_take(packing):
        weight = dequantize_experts(words, scales, packing, group_size, x.dtype, zeros, group_of)
        return grouped_matmul_triton(
            x, weight, offsets, bias, rows, top_k, None, 1, max(1, K), None, False, x.dtype
        )
    group = 0 if group_of is not None else min(group_size, K)
    described = PackedWeight(N, K, packing.bits, packing.along, group, False, x.dtype)
    config = packed_tiles(rows_of_a_tile(length, count), described)
    tiles = tiles_of(length, count, config.rows) * -(-N // config.columns)
    group_of = None if group_of is None else group_of.contiguous()
    _multiply_packed_groups[(tiles,)](
        (x, words, scales, zeros, group_of, bias, rows, offsets, y),
        length,
        count,
        top_k,
        N,
        K,
        strides_of(x, words, scales, zeros),
        (0, 0) if bias is None else bias.stride(),
        GROUP=group_size if group_size < K else 0,
        BITS=packing.bits,
        ALONG=packing.along,
        PER_WORD=words.dtype.itemsize * 8 // packing.bits,
        ORDER=as_integer(packing.order),
        ONE_SCALE=one_scale(described, config.depth),
        SCALE_SUMS=config.scale_sums,
        COUNT=next_power_of_2(count + 1),
        EVEN=K % config.depth == 0,
        **config.launch(),
    )
    return y


@triton.jit(do_not_specialize=["length"])
def _multiply_packed_groups(
    tensors,
    length,
    count,
    top_k,
    N,
    K,
    strides,
    bias_strides,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ALONG: tl.constexpr,
    PER_WORD: tl.constexpr,
    ORDER: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    COUNT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile of one expert's rows by a tile of its weight, which is the left operand."""
    x_ptr, words_ptr, scales_ptr, zeros_ptr, group_ptr = tensors[:5]
    bias_ptr, rows_ptr, offsets_ptr, y_ptr = tensors[5:]
    x_strides, words_strides, scales_strides, zeros_strides = strides
    expert, left, row, exist, source = grouped_tile(
        offsets_ptr, rows_ptr, length, count, top_k, N, COUNT, BLOCK_M, BLOCK_N
    )
    x_ptrs = x_ptr + source[:, None] * x_strides[0]
    row, exist = row[None, :], exist[None, :]
    y_ptrs = y_ptr + row * N
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if expert >= count:
        written(y_ptrs, None, sums, None, None, exist, left, N, 0, True, BLOCK_N)
        return

    expert = expert.to(tl.int64)
    if bias_ptr is not None:
        bias_ptr += expert * bias_strides[0]
    if group_ptr is not None:
        group_ptr += expert * K
    n = clamped(left, N, BLOCK_N).to(tl.int64)[:, None]
    scales_ptrs, zeros_ptrs = scales_ptr + expert * scales_strides[0], zeros_ptr
    scales_ptrs += n * scales_strides[1]
    if zeros_ptr is not None:
        zeros_ptrs += expert * zeros_strides[0] + n * zeros_strides[1]
    words_ptrs = words_ptr + expert * words_strides[0]
    words_ptrs += packed_rows(left, N, ALONG, PER_WORD, BLOCK_N) * words_strides[1]
    for step in range(tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = loaded(x_ptrs + k.to(tl.int64)[None, :] * x_strides[1], (k < K)[None, :], EVEN)
        scale, zero = packed_scales(
            scales_ptrs, zeros_ptrs, group_ptr, step, K,
            scales_strides, zeros_strides, GROUP, BITS, ONE_SCALE, EVEN, BLOCK_K,
        )  # fmt: skip
        sums = added_packed(
            sums, x, words_ptrs, None, scale, zero, step, K, words_strides,
            BITS, ALONG, PER_WORD, ORDER, zeros_ptr is not None, ONE_SCALE and SCALE_SUMS, EVEN,
            BLOCK_K,
        )  # fmt: skip
    written(y_ptrs, bias_ptr, sums, None, None, exist, left, N, bias_strides[1], True, BLOCK_N)


def _empty(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, *others: Any
) -> torch.Tensor:
    """Return an empty product."""
    *_, rows, _ = others
    return x.new_empty(rows_of(x, rows), scales.shape[1])


_grouped_matmul_packed = operator(
    grouped_matmul_packed_reference, grouped_matmul_packed_triton, _empty
)
