"""Matmul with packed weights, in tiles whose codes are unpacked in registers.

This is no operation by itself: it belongs to :mod:`~vllm_module.kernels.matmul.packed_matmul`, and
:mod:`~vllm_module.kernels.experts.grouped_matmul_packed` shares the tile of a weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_module.kernels.matmul.matmul_configurations import (
    MatmulConfig,
    PackedWeight,
    one_scale,
)
from vllm_module.kernels.matmul.packed_words import Packing
from vllm_module.kernels.matmul.product_tile import added, clamped, loaded, tile_of, written
from vllm_module.kernels.matmul.scaled_matmul_tiles import add_splits
from vllm_module.kernels.operators import strides_of, tl, triton

_PLACES = 8  # places of a word that an order of four bits each can name


class PackedProduct(NamedTuple):
    """The operands of ``y = x @ weight.T + bias`` with a packed weight.

    Attributes:
        x: ``[M, K]``.
        words, scales, packing, group_size, zeros, group_of, codebook: the weight ``[N, K]``, as for
            :func:`~vllm_module.kernels.matmul.packed_words.dequantize_packed`.
        bias: ``[N]``.
        y: contiguous memory ``[M, N]``; written.

    """

    x: torch.Tensor
    words: torch.Tensor
    scales: torch.Tensor
    packing: Packing
    group_size: int
    zeros: torch.Tensor | None
    group_of: torch.Tensor | None
    codebook: torch.Tensor | None
    bias: torch.Tensor | None
    y: torch.Tensor

    def weight(self) -> PackedWeight:
        """Return the properties of the weight on which the configuration depends."""
        bits, along, _ = self.packing
        K = self.x.shape[1]
        group = 0 if self.group_of is not None else min(self.group_size, K)
        has_codebook = self.codebook is not None
        return PackedWeight(self.y.shape[1], K, bits, along, group, has_codebook, self.x.dtype)


def tiles_take(packing: Packing) -> bool:
    """Return whether the kernel can unpack such words: no code may cross a word boundary."""
    return packing.bits != 3 and len(packing.order or ()) <= _PLACES


def multiply_packed_tiles(product: PackedProduct, config: MatmulConfig) -> None:
    """Launch the matmul tile by tile; with splits, add them afterwards."""
    x, words, scales, packing, group_size, zeros, group_of, codebook, bias, y = product
    (M, K), N = x.shape, y.shape[1]
    parts = y
    if config.splits > 1:
        parts = torch.empty(config.splits, M, N, dtype=torch.float32, device=x.device)
    if codebook is not None:
        zeros, codebook = None, codebook.contiguous()
    group_of = None if group_of is None else group_of.contiguous()
    own_bias = bias if config.splits == 1 else None
    _multiply_packed[(-(-M // config.rows) * -(-N // config.columns), config.splits)](
        (x, words, scales, zeros, group_of, codebook, own_bias, parts),
        M,
        N,
        K,
        strides_of(x, words, scales, zeros),
        1 if bias is None else bias.stride(0),
        GROUP=group_size if group_size < K else 0,
        BITS=packing.bits,
        ALONG=packing.along,
        PER_WORD=words.dtype.itemsize * 8 // packing.bits,
        ORDER=as_integer(packing.order),
        ONE_SCALE=one_scale(product.weight(), config.depth),
        SCALE_SUMS=config.scale_sums,
        EVEN=K % config.depth == 0,
        SPLITS=config.splits,
        **config.launch(),
    )
    if config.splits > 1:
        add_splits(parts, bias, y)


def as_integer(order: tuple[int, ...] | None) -> int | None:
    """Return the places of codes as one integer, with the first in the lowest four bits."""
    if order is None:
        return None
    return sum(place << (4 * index) for index, place in enumerate(order))


@triton.jit(do_not_specialize=["M"])
def _multiply_packed(
    tensors,
    M,
    N,
    K,
    strides,
    bias_stride,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ALONG: tl.constexpr,
    PER_WORD: tl.constexpr,
    ORDER: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Multiply a tile of the weight, which is the left operand, by a tile of tokens.

    With ONE_SCALE all inputs of a step have one group, and scales may multiply its sums. Rows after
    the last one repeat it, and are not written.
    """
    x_ptr, words_ptr, scales_ptr, zeros_ptr, group_ptr, codebook_ptr, bias_ptr, y_ptr = tensors
    x_strides, words_strides, scales_strides, zeros_strides = strides
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    top, left = tile_of(tl.program_id(0), tiles_m, tiles_n)
    m = top.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    left = left * BLOCK_N

    x_ptrs = x_ptr + tl.minimum(m, M - 1)[:, None] * x_strides[0]
    n = clamped(left, N, BLOCK_N).to(tl.int64)[:, None]
    scales_ptrs, zeros_ptrs = scales_ptr + n * scales_strides[0], zeros_ptr
    if zeros_ptr is not None:
        zeros_ptrs += n * zeros_strides[0]
    words_ptrs = words_ptr + packed_rows(left, N, ALONG, PER_WORD, BLOCK_N) * words_strides[0]

    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    steps = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(steps, SPLITS)
    first = tl.program_id(1) * each
    # The compiler prefetches tiles, but not single numbers: those of the next step are loaded here.
    next_scale, next_zero = packed_scales(
        scales_ptrs, zeros_ptrs, group_ptr, tl.minimum(first, steps - 1), K,
        scales_strides, zeros_strides, GROUP, BITS, ONE_SCALE, EVEN, BLOCK_K,
    )  # fmt: skip
    for step in range(first, tl.minimum(first + each, steps)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = (k < K)[None, :]
        x = loaded(x_ptrs + k.to(tl.int64)[None, :] * x_strides[1], inside, EVEN)
        scale, zero = next_scale, next_zero
        if ONE_SCALE:
            next_scale, next_zero = packed_scales(
                scales_ptrs, zeros_ptrs, group_ptr, tl.minimum(step + 1, steps - 1), K,
                scales_strides, zeros_strides, GROUP, BITS, ONE_SCALE, EVEN, BLOCK_K,
            )  # fmt: skip
        else:  # scales of every element: registers do not suffice for two tiles of them
            scale, zero = packed_scales(
                scales_ptrs, zeros_ptrs, group_ptr, step, K,
                scales_strides, zeros_strides, GROUP, BITS, ONE_SCALE, EVEN, BLOCK_K,
            )  # fmt: skip
        sums = added_packed(
            sums, x, words_ptrs, codebook_ptr, scale, zero, step, K, words_strides,
            BITS, ALONG, PER_WORD, ORDER, zeros_ptr is not None, ONE_SCALE and SCALE_SUMS, EVEN,
            BLOCK_K,
        )  # fmt: skip

    m = m[None, :]
    y_ptrs = y_ptr + (tl.program_id(1).to(tl.int64) * M + m) * N
    written(y_ptrs, bias_ptr, sums, None, None, m < M, left, N, bias_stride, True, BLOCK_N)


@triton.jit
def packed_rows(first, N, ALONG: tl.constexpr, PER_WORD: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the rows of words that hold a tile of BLOCK_N output features, ``[rows, 1]``."""
    if ALONG == 1:
        rows = clamped(first, N, BLOCK_N)
    else:
        rows = clamped(first // PER_WORD, N // PER_WORD, BLOCK_N // PER_WORD)
    return rows.to(tl.int64)[:, None]


@triton.jit
def packed_scales(
    scales_ptrs,
    zeros_ptrs,
    group_ptr,
    step,
    K,
    scales_strides,
    zeros_strides,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the scales of a step, and its zeros as :func:`_shifted` codes, in float32.

    With ONE_SCALE they are ``[outputs, 1]``, because all inputs of the step have one group. If all
    zeros are equal, they are ``[1, 1]``. GROUP is the number of inputs of a group, or 0 if there is
    one group: the compiler turns a division by a known size into cheaper operations.
    """
    if ONE_SCALE:
        group = tl.full((), 0, tl.int64)
        if GROUP:
            group += step * BLOCK_K // GROUP
        scale = tl.load(scales_ptrs + group * scales_strides[-1])
    else:
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = (k < K)[None, :]
        group = k // GROUP if GROUP else k * 0
        if group_ptr is not None:
            group = loaded(group_ptr + k, k < K, EVEN)
        group = group.to(tl.int64)[None, :]
        scale = loaded(scales_ptrs + group * scales_strides[-1], inside, EVEN)
    if zeros_ptrs is None:
        zero = tl.full([1, 1], 1 << (BITS - 1), tl.int32)
    elif ONE_SCALE:
        zero = tl.load(zeros_ptrs + group * zeros_strides[-1]).to(tl.int32)
    else:
        zero = loaded(zeros_ptrs + group * zeros_strides[-1], inside, EVEN).to(tl.int32)
    return scale.to(tl.float32), _shifted(zero)


@triton.jit
def added_packed(
    sums,
    x,
    words_ptrs,
    codebook_ptr,
    scale,
    zero,
    step,
    K,
    words_strides,
    BITS: tl.constexpr,
    ALONG: tl.constexpr,
    PER_WORD: tl.constexpr,
    ORDER: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add the product of a step's codes and ``x [tokens, inputs]`` to ``sums [outputs, tokens]``.

    ``scale`` and ``zero`` are from :func:`packed_scales`. With SCALE_SUMS they are applied to the
    step's sums instead of the codes, because a thread has few sums. Then each sum is reduced by the
    zero times the sum of ``x``.
    """
    if ALONG == 1:
        word = step * (BLOCK_K // PER_WORD) + tl.arange(0, BLOCK_K // PER_WORD)
        held = (word < K // PER_WORD)[None, :]
    else:
        word = step * BLOCK_K + tl.arange(0, BLOCK_K)
        held = (word < K)[None, :]
    words = loaded(words_ptrs + word.to(tl.int64)[None, :] * words_strides[-1], held, EVEN)
    codes = _unpacked(words, BITS, ALONG, PER_WORD, ORDER)
    if codebook_ptr is not None:
        values = tl.load(codebook_ptr + codes)
    elif SCALE_SUMS and HAS_ZEROS:
        values = _shifted(codes) - 8388608.0
    else:
        values = _shifted(codes) - zero
    if not SCALE_SUMS:
        sums = added(sums, x, values * scale, None, None, True)
    elif HAS_ZEROS:
        product = added(tl.zeros_like(sums), x, values, None, None, True)
        total = tl.sum(x.to(tl.float32), axis=1)[None, :]
        sums += (product - (zero - 8388608.0) * total) * scale
    else:
        sums = added(sums, x, values, None, scale, True)
    return sums


@triton.jit
def _shifted(codes):
    """Return ``2**23 + codes`` in float32, exactly and without a conversion, for codes below 2**23.

    Floats from 2**23 to 2**24 are whole numbers, whose low bits are the code.
    """
    return (codes | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _unpacked(
    words, BITS: tl.constexpr, ALONG: tl.constexpr, PER_WORD: tl.constexpr, ORDER: tl.constexpr
):
    """Return the codes in a tile of words, as int32 ``[outputs, inputs]``."""
    place = tl.arange(0, PER_WORD)
    if ORDER is not None:
        place = (ORDER >> (4 * place)) & 15
    words = words.to(tl.int32)
    rows: tl.constexpr = words.shape[0]
    columns: tl.constexpr = words.shape[1]
    if ALONG == 1:
        codes = words[:, :, None] >> (place * BITS)[None, None, :]
        codes = tl.reshape(codes, [rows, columns * PER_WORD])
    else:
        codes = words[:, None, :] >> (place * BITS)[None, :, None]
        codes = tl.reshape(codes, [rows * PER_WORD, columns])
    return codes & ((1 << BITS) - 1)
