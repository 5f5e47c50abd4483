"""Paged attention of sequences with one new token, in Triton.

A context is cut into splits. ``_decode`` computes attention to each split, and ``_combine``
combines the splits of a sequence. The number of programs depends on the batch; the bits do not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from vllm_module.kernels.attention.paged_attention_splits import (
    Decoding,
    Splits,
    ends_of_items,
    find_item,
    launch_splits,
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
    sinks_and_scale,
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
        others = {
            "splits of 256, launched early": replace(first, early=True),
            "splits of 256, large combinations": replace(first, combined=(4096, 4)),
            "splits of 256, few programs": replace(first, shares=1),
        }
        found = small | found | others
        if tokens > 32:
            found["splits of 256, 5 stages"] = one(256, 256, 5)
    if page_size % tokens == 0:
        found["splits of 256, TMA"] = one(256, 256, 5, tokens, True)
    return found


def launch_decode(arguments: Arguments, constants: dict[str, Any]) -> None:
    """Write the outputs of sequences with one new token, and zeros for tokens of no sequence."""
    query, k_cache = arguments.tensors.query, arguments.tensors.k_cache
    candidates = decode_candidates(
        constants["BLOCK_D"],
        constants["GROUP"],
        constants["PAGE_SIZE"],
        query.itemsize,
        k_cache.itemsize,
        capability(query) >= (9, 0),
    )
    case = case_of(query, k_cache)
    chosen = choose("paged_attention_decode", case, candidates, query.device)
    constants = constants | launched_early(_decode, chosen.early)
    launch_splits(
        _decode,
        arguments,
        descriptors(arguments.tensors, chosen.tiles),
        chosen,
        k_cache.shape[2],
        constants,
    )


@triton.jit(
    do_not_specialize=["tokens", "sequences", "capacity", "begin", "end", "splits", "table_row"]
)
def _decode(
    tensors,
    tokens,
    sequences,
    capacity,
    factor,
    cap,
    query_strides,
    k_strides,
    v_strides,
    table_row,
    table_entry,
    output_strides,
    k_scale_head,
    v_scale_head,
    k_tiles,
    v_tiles,
    partial,
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
    output_ptr, starts_ptr = tensors.output, tensors.query_start_loc
    output_ptrs = output_ptr + head[:, None] * output_strides[1] + d[None, :] * output_strides[2]
    if end == sequences:
        zeros = tl.zeros((BLOCK_M, BLOCK_D), output_ptr.dtype.element_ty)
        rest = tl.maximum(tl.load(starts_ptr + sequences).to(tl.int64), 0)
        for token in range(rest + tl.program_id(0), tokens, tl.num_programs(0)):
            tl.store(output_ptrs + token * output_strides[0], zeros, mask=mask)
    slopes = tl.zeros((BLOCK_M,), tl.float32)
    if tensors.slopes is not None:
        slopes = tl.load(tensors.slopes + head, mask=m < GROUP, other=0.0) * 1.4426950408889634
    if tensors.k_scale is not None:
        factor = factor * tl.load(tensors.k_scale + kv_head * k_scale_head)
    k_ptr = tensors.k_cache + kv_head * k_strides[2]
    v_ptr = tensors.v_cache + kv_head * v_strides[2]
    ends = ends_of_items(
        tensors.context_lens, starts_ptr, begin, end, tokens, capacity,
        WINDOW, SPLIT, MAX_SPLITS, BLOCK_N, 1 if DIRECT else 0, SEQUENCES,
    )  # fmt: skip
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        index, split = find_item(item, ends)
        sequence = begin + index
        first = tl.load(starts_ptr + sequence).to(tl.int64)
        context = tl.minimum(tl.load(tensors.context_lens + sequence), capacity)
        size = split_size(context, SPLIT, MAX_SPLITS, BLOCK_N)
        first_seen = 0
        if WINDOW > 0:
            first_seen = tl.maximum(0, context - WINDOW)
            split += first_seen // size
        rows = tensors.query + first * query_strides[0] + head[:, None] * query_strides[1]
        q = tl.load(rows + d[None, :] * query_strides[2], mask=mask, other=0.0)
        q, divisor = round_query(q, k_ptr)
        positions = tl.zeros((BLOCK_M,), tl.int32) + (context - 1)
        table_ptr = tensors.block_tables + table_row.to(tl.int64) * sequence
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
            tensors.slopes is not None, PRECISION, SWAP, False,
        )  # fmt: skip
        maxima, sums, outputs = attend(
            q, maxima, sums, outputs, positions, slopes,
            k_ptr, v_ptr, table_ptr, full_stop, stop, first_seen, divisor * factor, cap,
            k_strides, v_strides, table_entry, None, None, kv_head,
            HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE_SIZE, SAME_STRIDES, WINDOW, SOFTCAP,
            tensors.slopes is not None, PRECISION, SWAP, True,
        )  # fmt: skip
        if SWAP:
            outputs = tl.trans(outputs)
        if DIRECT:
            sinks, v_scale = sinks_and_scale(tensors, v_scale_head, head, m < GROUP, kv_head)
            y = normalize(maxima, sums, outputs, sinks, v_scale)
            y = tl.where(context <= 0, 0.0, y).to(output_ptr.dtype.element_ty)
            tl.store(output_ptrs + first * output_strides[0], y, mask=mask)
        else:
            at = (index * tl.num_programs(1) * GROUP + head) * splits + split
            tl.store(partial[1] + at, maxima, mask=m < GROUP)
            tl.store(partial[2] + at, sums, mask=m < GROUP)
            tl.store(partial[0] + at[:, None] * HEAD_SIZE + d[None, :], outputs, mask=mask)
