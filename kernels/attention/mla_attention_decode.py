"""Latent attention of sequences with one new token, in Triton.

A context is cut into splits as in :mod:`vllm_module.kernels.attention.paged_attention_splits`,
whose kernel combines them. The bits do not depend on the batch.
"""

from __future__ import annotations

from typing import Any

from vllm_module.kernels.attention.mla_attention_tile import (
    LatentArguments,
    attend_latent,
    load_query,
)
from vllm_module.kernels.attention.paged_attention_decode import Decoding
from vllm_module.kernels.attention.paged_attention_splits import (
    SEQUENCES,
    empty_partial,
    ends_of_items,
    find_item,
    launch_combine,
    programs_of,
    sequences_of_a_launch,
    split_size,
)
from vllm_module.kernels.attention.paged_attention_tile import normalize
from vllm_module.kernels.operators import tl, triton


def launch_decode(arguments: LatentArguments, constants: dict[str, Any], chosen: Decoding) -> None:
    """Write the outputs of sequences with one new token, and zeros for tokens of no sequence."""
    query, sequences = arguments.query, arguments.sequences
    heads, latent = query.shape[1], constants["LATENT"]
    splits, tiles = chosen.splits, chosen.tiles
    head_blocks = -(-heads // tiles.block_m)
    count = splits.count(arguments.capacity)
    most = sequences_of_a_launch(heads, latent, count)
    partial = empty_partial(min(most, sequences), heads, count, latent, query.device)
    for begin in range(0, max(1, sequences), most):
        end = min(begin + most, sequences)
        _decode_latent[programs_of(end - begin, count, head_blocks), head_blocks](
            *arguments[:-1],
            *arguments.strides,
            *partial,
            begin,
            end,
            count,
            **constants,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            SPLIT=splits.tokens,
            MAX_SPLITS=splits.most,
            DIRECT=count == 1,
            SEQUENCES=SEQUENCES,
            SWAP=tiles.swap,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        if count > 1 and begin < end:
            launch_combine(
                arguments.output,
                partial,
                arguments.context_lens,
                arguments.query_start_loc,
                None,
                arguments.cache_scale,
                begin,
                end - begin,
                arguments.capacity,
                0,
                splits,
                GROUP=heads,
                BLOCK_D=constants["BLOCK_L"],
                WINDOW=0,
            )


@triton.jit(
    do_not_specialize=["tokens", "sequences", "capacity", "begin", "end", "splits", "table_row"]
)
def _decode_latent(
    query_ptr,
    cache_ptr,
    tables_ptr,
    contexts_ptr,
    starts_ptr,
    scale_ptr,
    output_ptr,
    tokens,
    sequences,
    capacity,
    factor,
    query_token,
    query_head,
    query_feature,
    cache_page,
    cache_token,
    cache_feature,
    table_row,
    table_entry,
    output_token,
    output_head,
    output_feature,
    partial_ptr,
    maxima_ptr,
    sums_ptr,
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
    if end == sequences:
        head = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_L).to(tl.int64)
        mask = (head < HEADS)[:, None] & (d < LATENT)[None, :]
        zeros = tl.zeros((BLOCK_M, BLOCK_L), output_ptr.dtype.element_ty)
        output_at = head[:, None] * output_head + d[None, :] * output_feature
        rest = tl.maximum(tl.load(starts_ptr + sequences).to(tl.int64), 0)
        for token in range(rest + tl.program_id(0), tokens, tl.num_programs(0)):
            tl.store(output_ptr + token * output_token + output_at, zeros, mask=mask)
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    ends = ends_of_items(
        contexts_ptr, starts_ptr, begin, end, tokens, capacity,
        0, SPLIT, MAX_SPLITS, 1 if DIRECT else 0, SEQUENCES,
    )  # fmt: skip
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        index, split = find_item(item, ends)
        sequence = begin + index
        first = tl.load(starts_ptr + sequence).to(tl.int64)
        context = tl.minimum(tl.load(contexts_ptr + sequence), capacity)
        size = split_size(context, SPLIT, MAX_SPLITS)
        # This is zero, which the compiler does not know. So it computes no addresses before the
        # loop, and stores outputs in register order: both would need more registers than there are.
        zero = tl.minimum(first, 0)
        head = zero + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        d = zero + tl.arange(0, BLOCK_L)
        real = head < HEADS
        mask = real[:, None] & (d < LATENT)[None, :]
        positions = tl.zeros((BLOCK_M,), tl.int32) + (context - 1)
        rows = query_ptr + first * query_token + head * query_head
        q, q_rope, divisor = load_query(
            rows, real, query_feature, cache_ptr, LATENT, ROPE, BLOCK_L, BLOCK_R
        )
        maxima, sums, outputs = attend_latent(
            q, q_rope, positions, cache_ptr, tables_ptr + table_row.to(tl.int64) * sequence,
            split * size, tl.minimum(split * size + size, context), divisor * (factor * scale),
            cache_page, cache_token, cache_feature, table_entry,
            LATENT, ROPE, BLOCK_L, BLOCK_R, BLOCK_N, PAGE_SIZE, PRECISION, SWAP,
        )  # fmt: skip
        if DIRECT:
            no_sinks = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            y = normalize(maxima, sums, outputs, no_sinks, scale)
            y = tl.where(context <= 0, 0.0, y).to(output_ptr.dtype.element_ty)
            output_at = first * output_token + head[:, None] * output_head
            tl.store(output_ptr + output_at + d[None, :] * output_feature, y, mask=mask)
        else:
            at = (index.to(tl.int64) * HEADS + head) * splits + split
            tl.store(maxima_ptr + at, maxima, mask=real)
            tl.store(sums_ptr + at, sums, mask=real)
            tl.store(partial_ptr + at[:, None] * LATENT + d[None, :], outputs, mask=mask)
