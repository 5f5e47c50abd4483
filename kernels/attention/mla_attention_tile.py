"""The tile shared by the decode and prefill kernels of latent attention: rows over a context.

All heads share one latent for each token, so heads are rows of a tile. A row of the cache is loaded
once: it is a key as a whole, and its first ``LATENT`` features are the value.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from vllm_module.kernels.attention.paged_attention_splits import Decoding, Splits
from vllm_module.kernels.attention.paged_attention_tile import Tiles, exponents, power_of
from vllm_module.kernels.operators import next_power_of_2, tl, triton


def _rows(heads: int, latent: int, itemsize: int, cache_itemsize: int, hopper: bool) -> int:
    """Return the rows of a tile: 64, as Hopper's wgmma needs, if they fit into registers.

    Masks or conversions need registers beside the outputs.
    """
    even = heads == next_power_of_2(heads) and latent == next_power_of_2(latent)
    return 64 if hopper and even and cache_itemsize == itemsize == 2 else 16


@cache
def decode_candidates(
    heads: int, latent: int, itemsize: int, cache_itemsize: int, hopper: bool
) -> dict[str, Decoding]:
    """Return the candidates for these heads, features of a latent, and bytes of numbers.

    Tiles of 16 heads leave registers for two programs on a multiprocessor of Hopper; 64 heads read
    a latent once, and the two warpgroups compute their scores twice (design/0017 has the table).
    Splits of 256 tokens give more programs, but write a result of all heads for each. Before
    Hopper, tiles of 32 tokens spill with Triton 3.6.
    """
    rows = _rows(heads, latent, itemsize, cache_itemsize, hopper)
    tiles = Tiles(rows, 32 if hopper else 16, 8, 3)
    if itemsize == 4:  # float32 has no tensor cores
        tiles = Tiles(16, 16, 8, 1)
    large, small = Splits(512, 64), Splits(256, 256)
    swap = hopper and itemsize == 2 and cache_itemsize == 1 and latent in (64, 128, 256, 512)
    if swap:  # which takes the fewest registers (design/0017)
        tiles = Tiles(rows, 32, 8, 5, swap=True)
    found = {"splits of 512": Decoding(large, tiles), "splits of 256": Decoding(small, tiles)}
    if hopper and cache_itemsize == itemsize == 2 and latent == next_power_of_2(latent):
        few = {"splits of 256, 16 heads": Decoding(small, Tiles(16, 32, 4, 5))}
        found = few | found if heads <= 16 or rows < 64 else found | few
    if swap:
        four = Decoding(large, replace(tiles, num_warps=4))
        found = {"splits of 512, 4 warps": four} | found
    if rows == 64:
        found["splits of 512, 5 stages"] = Decoding(large, replace(tiles, num_stages=5))
    return found


@cache
def prefill_candidates(
    heads: int, latent: int, itemsize: int, cache_itemsize: int, hopper: bool
) -> dict[str, Tiles]:
    """Return the candidates for these heads, features of a latent, and bytes of numbers."""
    if itemsize == 4:
        return {"16 x 16": Tiles(16, 16, 8, 1)}
    if _rows(heads, latent, itemsize, cache_itemsize, hopper) < 64:
        return {"32 x 32": Tiles(32, 32, 8, 3)}
    return {"64 x 32": Tiles(64, 32, 8, 3), "64 x 32, 5 stages": Tiles(64, 32, 8, 5)}


class LatentTensors(NamedTuple):
    """The tensors of both kernels, as for ``mla_attention``, and their output."""

    query: torch.Tensor
    cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    v_scale: torch.Tensor | None
    output: torch.Tensor
    sinks: None = None


@triton.jit
def load_query(
    rows,
    real,
    query_feature,
    cache_ptr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Load the two parts of the queries at ``rows``, with zeros where ``real`` is False.

    Return them with a divisor for each row: for an eight-bit cache they are rounded as in
    :func:`~vllm_module.kernels.attention.paged_attention_tile.round_query`.
    """
    d, r = tl.arange(0, BLOCK_L).to(tl.int64), tl.arange(0, BLOCK_R).to(tl.int64)
    mask = real[:, None] & (d < LATENT)[None, :]
    q = tl.load(rows[:, None] + d[None, :] * query_feature, mask=mask, other=0.0)
    mask = real[:, None] & (r < ROPE)[None, :]
    q_rope = tl.load(rows[:, None] + (LATENT + r)[None, :] * query_feature, mask=mask, other=0.0)
    divisor = tl.full((q.shape[0],), 1.0, tl.float32)
    if q.dtype == tl.bfloat16 and cache_ptr.dtype.element_ty.primitive_bitwidth == 8:
        divisor = power_of(tl.maximum(exponents(q), exponents(q_rope)))
        q = (q.to(tl.float32) / divisor[:, None]).to(tl.float16)
        q_rope = (q_rope.to(tl.float32) / divisor[:, None]).to(tl.float16)
    return q, q_rope, divisor


@triton.jit
def attend_latent(
    q,
    q_rope,
    positions,
    cache_ptr,
    table_ptr,
    begin,
    end,
    factor,
    cache_strides,
    table_entry,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Compute attention of a tile of rows to tokens ``[begin, end)`` of one sequence.

    Tokens that do not exist are not read, because NaN of a recycled page times a weight of zero is
    NaN.

    Args:
        q, q_rope: ``[BLOCK_M, BLOCK_L]`` and ``[BLOCK_M, BLOCK_R]``.
        positions: positions of the rows in their sequence, ``[BLOCK_M]``.
        table_ptr: block table of this sequence.
        factor: factor of the products, ``[BLOCK_M]``; scores are in units of log2.
        SWAP: compute the outputs' transpose in the loop, as in
            :func:`~vllm_module.kernels.attention.paged_attention_tile.attend`.

    Returns:
        The rows' softmax: maxima and sums ``[BLOCK_M]``, outputs ``[BLOCK_M, BLOCK_L]``.

    """
    BLOCK_M: tl.constexpr = q.shape[0]
    maxima = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    outputs = tl.zeros((BLOCK_L, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_L), tl.float32)
    n = tl.arange(0, BLOCK_N)
    d, r = tl.arange(0, BLOCK_L).to(tl.int64), tl.arange(0, BLOCK_R).to(tl.int64)
    d_at, r_at = d * cache_strides[2], (LATENT + r) * cache_strides[2]
    for start in range(begin, end, BLOCK_N):
        token = start + n
        exists = token < end
        page = tl.load(table_ptr + token // PAGE_SIZE * table_entry, mask=exists, other=0)
        row = page.to(tl.int64) * cache_strides[0]
        row += (token % PAGE_SIZE).to(tl.int64) * cache_strides[1]
        mask = exists[:, None] & (d < LATENT)[None, :]
        k = tl.load(cache_ptr + row[:, None] + d_at[None, :], mask=mask, other=0.0)
        mask = exists[:, None] & (r < ROPE)[None, :]
        k_rope = tl.load(cache_ptr + row[:, None] + r_at[None, :], mask=mask, other=0.0)
        k, k_rope = k.to(q.dtype), k_rope.to(q.dtype)
        scores = tl.dot(q_rope, tl.trans(k_rope), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION) * factor[:, None]
        seen = exists[None, :] & (token[None, :] <= positions[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_maxima = tl.maximum(maxima, tl.max(scores, axis=1))
        # The maximum of a row without any score is -inf, and -inf - -inf would be NaN.
        base = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maxima - base)
        sums = sums * shrink + tl.sum(weights, axis=1)
        outputs *= shrink[None, :] if SWAP else shrink[:, None]
        left, right = weights.to(q.dtype), k
        if SWAP:
            left, right = tl.trans(right), tl.trans(left)
        outputs = tl.dot(left, right, outputs, input_precision=PRECISION)
        maxima = new_maxima
    if SWAP:
        outputs = tl.trans(outputs)
    return maxima, sums, outputs
