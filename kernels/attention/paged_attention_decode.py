"""Paged attention of sequences with one new token, in Triton.

A context is cut into splits. ``_decode`` computes attention to each split, and ``_combine``
combines the splits of a sequence. The number of programs depends on the batch; the bits do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from vllm_module.kernels.attention.paged_attention_splits import (
    SEQUENCES,
    Splits,
    empty_partial,
    ends_of_items,
    find_item,
    launch_combine,
    programs_of,
    sequences_of_a_launch,
    split_size,
)
from vllm_module.kernels.attention.paged_attention_tile import (
    Arguments,
    Tiles,
    attend,
    case_of,
    descriptors,
    normalize,
    round_query,
)
from vllm_module.kernels.choices import choose
from vllm_module.kernels.dtypes import capability
from vllm_module.kernels.operators import (
    begin_early,
    launched_early,
    next_power_of_2,
    tl,
    triton,
)


@dataclass(frozen=True)
class Decoding:
    """A candidate: how contexts are cut, the tiles of a split, and whether it is launched early."""

    splits: Splits
    tiles: Tiles
    early: bool = False


@cache
def decode_candidates(
    block_d: int, group: int, page_size: int, itemsize: int, cache_itemsize: int, hopper: bool
) -> dict[str, Decoding]:
    """Return the candidates for a padded head size, heads in a group, and bytes of numbers.

    A tile has 8192 numbers of keys, or 32 tokens. Loads of keys wait for their page number, so
    three or four stages keep one tile in flight, and five keep two. Before Hopper a third stage
    spills.

    Splits of 256 tokens let one sequence of 4096 tokens and eight key-value heads use 128
    multiprocessors. Tiles of 32 tokens in five stages need the fewest registers, so that four
    programs run on a multiprocessor at once, each with two tiles of keys and values in flight
    (design/0017 has the table).
    """
    rows = max(16, next_power_of_2(group))
    tokens, warps = max(32, min(128, 8192 // block_d)), 4
    if rows > 32 or (block_d > 256 and (hopper or itemsize < 4)):
        warps = 8
    if itemsize == 4 or (not hopper and rows > 32):
        tokens = max(16, tokens // 2)
    # Larger tiles of rows use Hopper's wgmma anyway, and smaller heads never do.
    swap = hopper and itemsize == 2 and cache_itemsize == 1 and rows <= 32 and block_d >= 64
    stages = 2
    if hopper:
        stages = 5 if swap and rows == 16 else 3

    def one(split: int, most: int, stages: int, tile: int = tokens, tma: bool = False) -> Decoding:
        return Decoding(Splits(split, most), Tiles(rows, tile, warps, stages, tma, swap))

    found = {
        "splits of 256": one(256, 256, stages),
        "splits of 128": one(128, 256, stages),
        "splits of 512": one(512, 256, stages),
    }
    if not hopper or itemsize == 4:
        return found
    if cache_itemsize == 2:  # widening eight bits needs the registers
        small = {
            "splits of 256, 5 stages of 32": one(256, 256, 5, 32),
            "splits of 128, 5 stages of 32": one(128, 256, 5, 32),
        }
        first = next(iter(small.values()))
        early = {"splits of 256, launched early": replace(first, early=True)}
        found = small | found | early
        if tokens > 32:
            found["splits of 256, 5 stages"] = one(256, 256, 5)
    if page_size % tokens == 0:
        found["splits of 256, TMA"] = one(256, 256, 5, tokens, True)
    return found


def launch_decode(arguments: Arguments, constants: dict[str, Any]) -> None:
    """Write the outputs of sequences with one new token, and zeros for tokens of no sequence."""
    query, sequences = arguments.query, arguments.sequences
    heads, kv_heads = query.shape[1], arguments.k_cache.shape[2]
    candidates = decode_candidates(
        constants["BLOCK_D"],
        constants["GROUP"],
        constants["PAGE_SIZE"],
        query.itemsize,
        arguments.k_cache.itemsize,
        capability(query) >= (9, 0),
    )
    case = case_of(query, arguments.k_cache)
    chosen = choose("paged_attention_decode", case, candidates, query.device)
    splits, tiles = chosen.splits, chosen.tiles
    count = splits.count(arguments.capacity)
    most = sequences_of_a_launch(heads, query.shape[2], count)
    partial = empty_partial(min(most, sequences), heads, count, query.shape[2], query.device)
    for begin in range(0, max(1, sequences), most):
        end = min(begin + most, sequences)
        _decode[programs_of(end - begin, count, kv_heads), kv_heads](
            *arguments[:-1],
            *arguments.strides,
            *descriptors(arguments, tiles),
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
            **launched_early(_decode, chosen.early),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        if count > 1 and begin < end:
            launch_combine(
                arguments.output,
                partial,
                arguments.context_lens,
                arguments.query_start_loc,
                arguments.sinks,
                arguments.v_scale,
                begin,
                end - begin,
                arguments.capacity,
                arguments.strides[-1],
                splits,
                **{name: constants[name] for name in ("GROUP", "BLOCK_D", "WINDOW")},
            )


@triton.jit(
    do_not_specialize=["tokens", "sequences", "capacity", "begin", "end", "splits", "table_row"]
)
def _decode(
    query_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    contexts_ptr,
    starts_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slopes_ptr,
    sinks_ptr,
    output_ptr,
    tokens,
    sequences,
    capacity,
    factor,
    cap,
    query_token,
    query_head,
    query_feature,
    k_page,
    k_token,
    k_head,
    k_feature,
    v_page,
    v_token,
    v_head,
    v_feature,
    table_row,
    table_entry,
    output_token,
    output_head,
    output_feature,
    k_scale_head,
    v_scale_head,
    k_tiles,
    v_tiles,
    partial_ptr,
    maxima_ptr,
    sums_ptr,
    begin,
    end,
    splits,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DIRECT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SWAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute attention of one key-value head, split by split, for sequences ``begin`` to ``end``.

    The last launch also writes zeros for tokens of no sequence. With DIRECT, a context is one split
    and its result is final; otherwise ``_combine`` combines the splits.
    """
    begin_early(EARLY)
    kv_head = tl.program_id(1).to(tl.int64)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D).to(tl.int64)
    head = kv_head * GROUP + m
    mask = (m < GROUP)[:, None] & (d < HEAD_SIZE)[None, :]
    output_ptrs = output_ptr + head[:, None] * output_head + d[None, :] * output_feature
    if end == sequences:
        zeros = tl.zeros((BLOCK_M, BLOCK_D), output_ptr.dtype.element_ty)
        rest = tl.maximum(tl.load(starts_ptr + sequences).to(tl.int64), 0)
        for token in range(rest + tl.program_id(0), tokens, tl.num_programs(0)):
            tl.store(output_ptrs + token * output_token, zeros, mask=mask)
    slopes = tl.zeros((BLOCK_M,), tl.float32)
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head, mask=m < GROUP, other=0.0) * 1.4426950408889634
    if k_scale_ptr is not None:
        factor = factor * tl.load(k_scale_ptr + kv_head * k_scale_head)
    k_strides, v_strides = (k_page, k_token, k_feature), (v_page, v_token, v_feature)
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    ends = ends_of_items(
        contexts_ptr, starts_ptr, begin, end, tokens, capacity,
        WINDOW, SPLIT, MAX_SPLITS, 1 if DIRECT else 0, SEQUENCES,
    )  # fmt: skip
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        index, split = find_item(item, ends)
        sequence = begin + index
        first = tl.load(starts_ptr + sequence).to(tl.int64)
        context = tl.minimum(tl.load(contexts_ptr + sequence), capacity)
        size = split_size(context, SPLIT, MAX_SPLITS)
        first_seen = 0
        if WINDOW > 0:
            first_seen = tl.maximum(0, context - WINDOW)
            split += first_seen // size
        rows = query_ptr + first * query_token + head[:, None] * query_head
        q = tl.load(rows + d[None, :] * query_feature, mask=mask, other=0.0)
        q, divisor = round_query(q, k_ptr)
        positions = tl.zeros((BLOCK_M,), tl.int32) + (context - 1)
        table_ptr = tables_ptr + table_row.to(tl.int64) * sequence
        start = tl.maximum(split * size, first_seen // BLOCK_N * BLOCK_N)
        stop = tl.minimum(split * size + size, context)
        maxima = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_M,), tl.float32)
        outputs = tl.zeros((BLOCK_D, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_D), tl.float32)
        full_stop = stop // BLOCK_N * BLOCK_N  # tiles before it are full
        if WINDOW > 0:
            full_stop = start
        maxima, sums, outputs = attend(
            q, maxima, sums, outputs, positions, slopes,
            k_ptr, v_ptr, table_ptr, start, full_stop, first_seen, divisor * factor, cap,
            k_strides, v_strides, table_entry, k_tiles, v_tiles, kv_head,
            HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE_SIZE, SAME_STRIDES, WINDOW, SOFTCAP,
            slopes_ptr is not None, PRECISION, SWAP, False,
        )  # fmt: skip
        maxima, sums, outputs = attend(
            q, maxima, sums, outputs, positions, slopes,
            k_ptr, v_ptr, table_ptr, full_stop, stop, first_seen, divisor * factor, cap,
            k_strides, v_strides, table_entry, None, None, kv_head,
            HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE_SIZE, SAME_STRIDES, WINDOW, SOFTCAP,
            slopes_ptr is not None, PRECISION, SWAP, True,
        )  # fmt: skip
        if SWAP:
            outputs = tl.trans(outputs)
        if DIRECT:
            sinks = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            if sinks_ptr is not None:
                sinks = tl.load(sinks_ptr + head, mask=m < GROUP, other=0.0).to(tl.float32)
                sinks = sinks * 1.4426950408889634
            v_scale = 1.0
            if v_scale_ptr is not None:
                v_scale = tl.load(v_scale_ptr + kv_head * v_scale_head)
            y = normalize(maxima, sums, outputs, sinks, v_scale)
            y = tl.where(context <= 0, 0.0, y).to(output_ptr.dtype.element_ty)
            tl.store(output_ptrs + first * output_token, y, mask=mask)
        else:
            at = (index * tl.num_programs(1) * GROUP + head) * splits + split
            tl.store(maxima_ptr + at, maxima, mask=m < GROUP)
            tl.store(sums_ptr + at, sums, mask=m < GROUP)
            tl.store(partial_ptr + at[:, None] * HEAD_SIZE + d[None, :], outputs, mask=mask)
