"""The tile shared by the decode and prefill kernels of paged attention: rows over a context.

The query heads that share a key-value head are the rows of one tile. A program reads the context in
tiles of ``BLOCK_N`` tokens, finds each token's page in the block table, and keeps the online
softmax of FlashAttention (arXiv:2205.14135). Scores are in units of log2, for exp2. design/0010 has
a picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from vllm_module.kernels.operators import next_power_of_2, tl, triton

LOG2_E = 1.4426950408889634  # kernels repeat the number, because they read no globals


@dataclass(frozen=True)
class Tiles:
    """Sizes of a kernel's tiles: query rows, context tokens, warps and pipeline stages.

    With ``tma``, Hopper's copy engine loads a tile of the cache, which lies on one page. With
    ``swap``, values are multiplied by weights instead of weights by values.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    swap: bool = False

    def launch(self) -> dict[str, int]:
        """Return the tiles and options of a launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


class Tensors(NamedTuple):
    """The tensors of both kernels, as for ``paged_attention``, and its output."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    output: torch.Tensor


class Arguments(NamedTuple):
    """The first arguments of the kernels of paged and of latent attention.

    Attributes:
        tensors: ``Tensors``, or those of latent attention.
        tokens, sequences: number of tokens of the query, and of sequences.
        capacity: number of tokens on the pages of one row of ``block_tables``.
        factors: factor of the products of queries and keys; and that of tanh, if scores are
            soft-capped.
        strides: strides of tensors, in the order of the kernels' arguments.

    """

    tensors: Any
    tokens: int
    sequences: int
    capacity: int
    factors: tuple[float, ...]
    strides: tuple[tuple[int, ...] | int, ...]

    def flat(self) -> tuple[object, ...]:
        """Return the arguments in their order."""
        return *self[:4], *self.factors, *self.strides


def case_of(query: torch.Tensor, k_cache: torch.Tensor) -> str:
    """Return the shapes and dtypes of a model on which the choice of a candidate may depend."""
    return _case(query.shape[1], *k_cache.shape[1:], query.dtype, k_cache.dtype)


@cache
def _case(
    heads: int,
    page_size: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> str:
    dtypes = " on ".join(str(one).removeprefix("torch.") for one in (dtype, cache_dtype))
    return f"{heads}/{kv_heads} heads of {head_size}, {dtypes}, pages of {page_size}"


def descriptors(tensors: Tensors, tiles: Tiles) -> tuple[Any, Any]:
    """Return descriptors of keys and values, ``[cache slots, kv_heads * head_size]``.

    ``None`` if ``tiles`` need none, for head sizes that are no power of two, and for caches that
    are views of larger tensors.
    """
    size, caches = tensors.query.shape[2], (tensors.k_cache, tensors.v_cache)
    if not tiles.tma or size != max(16, next_power_of_2(size)):
        return None, None
    if not all(one.is_contiguous() and one.numel() and one.data_ptr() % 16 == 0 for one in caches):
        return None, None
    # Imported here, because some systems lack it.
    from triton.tools.tensor_descriptor import TensorDescriptor

    slots = (one.flatten(0, 1).flatten(1) for one in caches)
    keys, values = (TensorDescriptor.from_tensor(one, [tiles.block_n, size]) for one in slots)
    return keys, values


@triton.jit
def round_query(q, cache_ptr):
    """Return ``q`` in the dtype in which keys are multiplied, and the divisor of each row.

    Eight bits widen to float16 exactly and in one instruction. A bfloat16 query becomes float16
    too, divided by a power of two that keeps it in range.
    """
    divisor = tl.full((q.shape[0],), 1.0, tl.float32)
    if q.dtype == tl.bfloat16 and cache_ptr.dtype.element_ty.primitive_bitwidth == 8:
        divisor = power_of(exponents(q))
        q = (q.to(tl.float32) / divisor[:, None]).to(tl.float16)
    return q, divisor


@triton.jit
def exponents(q):
    """Return the bits of the greatest float32 exponent in each row."""
    return tl.max(q.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000, axis=1)


@triton.jit
def power_of(bits):
    """Return the power of two with these exponent bits; 1 for none."""
    return tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _tanh(x):
    """Return tanh from exp(2x), which may be infinite; near zero, from its series."""
    square = x * x
    series = 1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * (62 / 2835))))
    return tl.where(square < 0.0625, x * series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def attend(
    q,
    maxima,
    sums,
    outputs,
    positions,
    slopes,
    k_ptr,
    v_ptr,
    table_ptr,
    begin,
    end,
    first_seen,
    factor,
    cap,
    k_strides,
    v_strides,
    table_entry,
    k_tiles,
    v_tiles,
    kv_head,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
    SWAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Compute attention of a tile of rows to tokens ``[begin, end)``; update the running softmax.

    Args:
        q: ``[BLOCK_M, BLOCK_D]``.
        maxima, sums, outputs: the rows' running softmax, ``[BLOCK_M]``, ``[BLOCK_M]`` and
            ``[BLOCK_M, BLOCK_D]``, or ``[BLOCK_D, BLOCK_M]`` with SWAP.
        positions: positions of the rows in their sequence, ``[BLOCK_M]``.
        slopes: ALiBi slopes, ``[BLOCK_M]``.
        k_ptr, v_ptr: caches of this key-value head, with strides of page, token, head and feature.
        table_ptr: block table of this sequence.
        begin: first token, a multiple of BLOCK_N.
        first_seen: the first token that any row attends to.
        factor: factor of the products, ``[BLOCK_M]``.
        cap: factor of tanh, with SOFTCAP.
        k_tiles, v_tiles: descriptors of the caches, if they load the tiles; ``None`` with MASKED.
        SAME_STRIDES: True if keys and values have the same strides.
        SWAP: True to compute the outputs' transpose, from the values' transpose and that of the
            weights. For few rows only this order can use wgmma, whose operands lie in shared
            memory: eight-bit values are widened before they are stored there, and not gathered
            byte by byte.
        MASKED: True if some row does not attend to some token, or some token does not exist. Tokens
            that do not exist are not read, because NaN of a recycled page times a weight of zero is
            NaN.

    """
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D).to(tl.int64)
    is_feature = d < HEAD_SIZE
    for start in range(begin, end, BLOCK_N):
        token = start + n
        if MASKED:
            exists = (token >= first_seen) & (token < end)
        if PAGE_SIZE % BLOCK_N == 0:  # a tile lies on one page
            page = tl.load(table_ptr + start // PAGE_SIZE * table_entry)
        elif MASKED:
            page = tl.load(table_ptr + token // PAGE_SIZE * table_entry, mask=exists, other=0)
        else:
            page = tl.load(table_ptr + token // PAGE_SIZE * table_entry)
        if k_tiles is not None:
            slot, column = page * PAGE_SIZE + start % PAGE_SIZE, kv_head.to(tl.int32) * HEAD_SIZE
            k = k_tiles.load([slot, column])
        else:
            page = page.to(tl.int64)
            if PAGE_SIZE % BLOCK_N == 0:
                offset = start % PAGE_SIZE + n.to(tl.int64)
            else:
                offset = (token % PAGE_SIZE).to(tl.int64)
            k_at = (page * k_strides[0] + offset * k_strides[1])[:, None]
            k_at += d[None, :] * k_strides[3]
            if SAME_STRIDES:
                v_at = k_at
            else:
                v_at = (page * v_strides[0] + offset * v_strides[1])[:, None]
                v_at += d[None, :] * v_strides[3]
            if MASKED:
                k = tl.load(k_ptr + k_at, mask=exists[:, None] & is_feature[None, :], other=0.0)
            elif HEAD_SIZE != BLOCK_D:
                k = tl.load(k_ptr + k_at, mask=is_feature[None, :], other=0.0)
            else:
                k = tl.load(k_ptr + k_at)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * factor[:, None]
        if SOFTCAP:
            scores = cap * _tanh(scores)
        if ALIBI:
            scores += slopes[:, None] * (token[None, :] - positions[:, None])
        if MASKED:
            seen = exists[None, :] & (token[None, :] <= positions[:, None])
            if WINDOW > 0:
                seen = seen & (token[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_maxima = tl.maximum(maxima, tl.max(scores, axis=1))
        # The maximum of a row without any score is -inf, and -inf - -inf would be NaN.
        base = tl.where(new_maxima == float("-inf"), 0.0, new_maxima) if MASKED else new_maxima
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maxima - base)
        sums = sums * shrink + tl.sum(weights, axis=1)
        outputs *= shrink[None, :] if SWAP else shrink[:, None]
        if v_tiles is not None:
            v = v_tiles.load([slot, column])
        elif MASKED:
            v = tl.load(v_ptr + v_at, mask=exists[:, None] & is_feature[None, :], other=0.0)
        elif HEAD_SIZE != BLOCK_D:
            v = tl.load(v_ptr + v_at, mask=is_feature[None, :], other=0.0)
        else:
            v = tl.load(v_ptr + v_at)
        left, right = weights.to(q.dtype), v.to(q.dtype)
        if SWAP:
            left, right = tl.trans(right), tl.trans(left)
        outputs = tl.dot(left, right, outputs, input_precision=PRECISION)
        maxima = new_maxima
    return maxima, sums, outputs


@triton.jit
def normalize(maxima, sums, outputs, sinks, v_scale):
    """Divide outputs ``[rows, BLOCK_D]`` by their sums, with sinks.

    A sum is zero if all scores are -inf, as those of infinite keys may be. The result is NaN, as
    softmax gives.
    """
    highest = tl.maximum(maxima, sinks)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp2(maxima - highest)
    sums = sums * shrink + tl.exp2(sinks - highest)
    shares = tl.where(sums > 0.0, v_scale / sums, float("nan"))
    return outputs * (shrink * shares)[:, None]


@triton.jit
def sinks_and_scale(tensors, v_scale_head, head, mask, kv_head):
    """Return the sinks of rows, -inf for none, in units of log2; and the scale of the values."""
    sinks = tl.full(head.shape, float("-inf"), tl.float32)
    if tensors.sinks is not None:
        sinks = tl.load(tensors.sinks + head, mask=mask, other=0.0).to(tl.float32)
        sinks = sinks * 1.4426950408889634
    v_scale = 1.0
    if tensors.v_scale is not None:
        v_scale = tl.load(tensors.v_scale + kv_head * v_scale_head)
    return sinks, v_scale
