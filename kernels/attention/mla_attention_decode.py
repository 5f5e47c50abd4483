"""Latent attention of sequences with one new token, in Triton.

A context is cut into splits as in :mod:`vllm_module.kernels.attention.paged_attention_splits`,
whose kernel combines them. The bits do not depend on the batch.
"""

from __future__ import annotations

from typing import Any

from vllm_module.kernels.attention.mla_attention_tile import attend_latent, load_query
from vllm_module.kernels.attention.paged_attention_splits import (
    Decoding,
    ends_of_items,
    find_item,
    launch_splits,
    split_size,
)
from vllm_module.kernels.attention.paged_attention_tile import Arguments, normalize
from vllm_module.kernels.operators import tl, triton


def launch_decode(arguments: Arguments, constants: dict[str, Any], chosen: Decoding) -> None:
    """Write the outputs of sequences with one new token, and zeros for tokens of no sequence."""
    head_blocks = -(-constants["HEADS"] // chosen.tiles.block_m)
    launch_splits(_decode_latent, arguments, (), chosen, head_blocks, constants)


@triton.jit(
    do_not_specialize=["tokens", "sequences", "capacity", "begin", "end", "splits", "table_row"]
)
def _decode_latent(
    tensors,
    tokens,
    sequences,
    capacity,
    factor,
    query_strides,
    cache_strides,
    table_row,
    table_entry,
    output_strides,
    partial,
    begin,
    end,
    splits,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DIRECT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Compute attention of BLOCK_M heads, split by split, for sequences ``begin`` to ``end``.

    The last launch also writes zeros for tokens of no sequence. With DIRECT, a context is one split
    and its result is final; otherwise the splits are combined afterwards.
    """
    output_ptr, starts_ptr = tensors.output, tensors.query_start_loc
    if end == sequences:
        head = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_L).to(tl.int64)
        mask = (head < HEADS)[:, None] & (d < LATENT)[None, :]
        zeros = tl.zeros((BLOCK_M, BLOCK_L), output_ptr.dtype.element_ty)
        output_at = head[:, None] * output_strides[1] + d[None, :] * output_strides[2]
        rest = tl.maximum(tl.load(starts_ptr + sequences).to(tl.int64), 0)
        for token in range(rest + tl.program_id(0), tokens, tl.num_programs(0)):
            tl.store(output_ptr + token * output_strides[0] + output_at, zeros, mask=mask)
    scale = 1.0
    if tensors.v_scale is not None:
        scale = tl.load(tensors.v_scale)
    ends = ends_of_items(
        tensors.context_lens, starts_ptr, begin, end, tokens, capacity,
        0, SPLIT, MAX_SPLITS, BLOCK_N, 1 if DIRECT else 0, SEQUENCES,
    )  # fmt: skip
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        index, split = find_item(item, ends)
        sequence = begin + index
        first = tl.load(starts_ptr + sequence).to(tl.int64)
        context = tl.minimum(tl.load(tensors.context_lens + sequence), capacity)
        size = split_size(context, SPLIT, MAX_SPLITS, BLOCK_N)
        # This is zero, which the compiler does not know. So it computes no addresses before the
        # loop, and stores outputs in register order: both would need more registers than there are.
        zero = tl.minimum(first, 0)
        head = zero + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        d = zero + tl.arange(0, BLOCK_L)
        real = head < HEADS
        mask = real[:, None] & (d < LATENT)[None, :]
        positions = tl.zeros((BLOCK_M,), tl.int32) + (context - 1)
        rows = tensors.query + first * query_strides[0] + head * query_strides[1]
        q, q_rope, divisor = load_query(
            rows, real, query_strides[2], tensors.cache, LATENT, ROPE, BLOCK_L, BLOCK_R
        )
        maxima, sums, outputs = attend_latent(
            q, q_rope, positions, tensors.cache,
            tensors.block_tables + table_row.to(tl.int64) * sequence,
            split * size, tl.minimum(split * size + size, context), divisor * (factor * scale),
            cache_strides, table_entry,
            LATENT, ROPE, BLOCK_L, BLOCK_R, BLOCK_N, PAGE_SIZE, PRECISION, SWAP,
        )  # fmt: skip
        if DIRECT:
            no_sinks = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            y = normalize(maxima, sums, outputs, no_sinks, scale)
            y = tl.where(context <= 0, 0.0, y).to(output_ptr.dtype.element_ty)
            output_at = first * output_strides[0] + head[:, None] * output_strides[1]
            tl.store(output_ptr + output_at + d[None, :] * output_strides[2], y, mask=mask)
        else:
            at = (index.to(tl.int64) * HEADS + head) * splits + split
            tl.store(partial[1] + at, maxima, mask=real)
            tl.store(partial[2] + at, sums, mask=real)
            tl.store(partial[0] + at[:, None] * LATENT + d[None, :], outputs, mask=mask)
