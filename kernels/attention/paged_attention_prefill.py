"""Paged attention of sequences with several new tokens, in Triton.

Row ``r`` of a tile is token ``r // GROUP`` and head ``r % GROUP``, so keys and values are loaded
once for all heads that share them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

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
from vllm_module.kernels.operators import next_power_of_2, tl, triton
from vllm_module.kernels.rows.packed_sequences import sequence_of


@cache
def prefill_candidates(
    block_d: int, group: int, page_size: int, itemsize: int, hopper: bool
) -> dict[str, Tiles]:
    """Return tiles for a padded head size, heads in a group, and the query's bytes an element.

    Hopper's wgmma takes 64 rows for each warpgroup. Two warpgroups fill the registers: as two
    programs, one computes weights while the other multiplies (design/0017 has the table).
    """
    rows = next_power_of_2(group)
    if itemsize == 4:  # float32 has no tensor cores
        return {"16 x 16": Tiles(max(16, rows), 16, 4 if block_d <= 256 else 8, 1)}
    if block_d > 256:  # 64 rows of wgmma leave no registers for masks and conversions
        return {"32 x 32": Tiles(32, 32, 8, 3)}
    if block_d > 128:
        return {"64 x 32": Tiles(max(64, rows), 32, 8, 3)}
    large = {"128 x 64": Tiles(128, 64, 8, 3)}
    if not hopper:
        return large
    found = {"64 x 64": Tiles(64, 64, 4, 3)} if rows <= 64 else {}
    found |= large | {"128 x 128": Tiles(128, 128, 8, 3)}
    if page_size % 64 == 0:
        found["128 x 64, TMA"] = Tiles(128, 64, 8, 5, True)
    if page_size % 128 == 0:
        found["128 x 128, TMA"] = Tiles(128, 128, 8, 3, True)
    return found


def launch_prefill(arguments: Arguments, constants: dict[str, Any]) -> None:
    """Write the outputs of sequences with more than one new token."""
    group, (query, k_cache, *_) = constants["GROUP"], arguments.tensors
    candidates = prefill_candidates(
        constants["BLOCK_D"],
        group,
        constants["PAGE_SIZE"],
        query.itemsize,
        capability(query) >= (9, 0),
    )
    case = case_of(query, k_cache)
    tiles = choose("paged_attention_prefill", case, candidates, query.device)
    block_q = tiles.block_m // group
    _prefill[arguments.tokens // block_q + arguments.sequences, k_cache.shape[2]](
        *arguments.flat(),
        *descriptors(arguments.tensors, tiles),
        **constants,
        BLOCK_Q=block_q,
        **tiles.launch(),
    )


@triton.jit(do_not_specialize=["tokens", "sequences", "capacity", "table_row"])
def _prefill(
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
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute attention of BLOCK_Q new tokens of one sequence and one key-value head.

    Programs with the longest contexts start first.
    """
    starts_ptr = tensors.query_start_loc
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = sequence_of(program, starts_ptr, sequences, BLOCK_Q)
    first = tl.load(starts_ptr + sequence)
    new = tl.load(starts_ptr + sequence + 1) - first
    begin_q = (program - first // BLOCK_Q - sequence) * BLOCK_Q
    if begin_q >= new or new == 1:
        return
    context = tl.minimum(tl.load(tensors.context_lens + sequence), capacity)
    kv_head = tl.program_id(1).to(tl.int64)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D).to(tl.int64)
    row = begin_q + m // GROUP
    head = kv_head * GROUP + m % GROUP
    real = (m < BLOCK_Q * GROUP) & (row < new) & (first + row >= 0) & (first + row < tokens)
    mask = real[:, None] & (d < HEAD_SIZE)[None, :]
    token = (first + row).to(tl.int64)
    query_at = token[:, None] * query_strides[0] + head[:, None] * query_strides[1]
    query_at += d[None, :] * query_strides[2]
    q = tl.load(tensors.query + query_at, mask=mask, other=0.0)
    positions = context - new + row
    slopes = tl.zeros((BLOCK_M,), tl.float32)
    if tensors.slopes is not None:
        slopes = tl.load(tensors.slopes + head, mask=real, other=0.0) * 1.4426950408889634
    q, divisor = round_query(q, tensors.k_cache)
    factor = divisor * factor
    if tensors.k_scale is not None:
        factor = factor * tl.load(tensors.k_scale + kv_head * k_scale_head)
    k_ptr = tensors.k_cache + kv_head * k_strides[2]
    v_ptr = tensors.v_cache + kv_head * v_strides[2]
    table_ptr = tensors.block_tables + table_row.to(tl.int64) * sequence
    maxima = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    outputs = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    earliest = context - new + begin_q  # position of the first row
    end = tl.minimum(earliest + BLOCK_Q, context)
    first_seen = 0
    begin = 0
    # All rows attend to the tokens before it.
    full_end = tl.maximum(0, earliest + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        first_seen = tl.maximum(0, earliest - WINDOW + 1)
        begin = first_seen // BLOCK_N * BLOCK_N
    if WINDOW > 0 or BLOCK_D > 128:  # with two loops, large heads would spill registers
        full_end = begin
    maxima, sums, outputs = attend(
        q, maxima, sums, outputs, positions, slopes,
        k_ptr, v_ptr, table_ptr, begin, full_end, first_seen, factor, cap,
        k_strides, v_strides, table_entry, k_tiles, v_tiles, kv_head,
        HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE_SIZE, SAME_STRIDES, WINDOW, SOFTCAP,
        tensors.slopes is not None, PRECISION, False, False,
    )  # fmt: skip
    maxima, sums, outputs = attend(
        q, maxima, sums, outputs, positions, slopes,
        k_ptr, v_ptr, table_ptr, full_end, end, first_seen, factor, cap,
        k_strides, v_strides, table_entry, None, None, kv_head,
        HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE_SIZE, SAME_STRIDES, WINDOW, SOFTCAP,
        tensors.slopes is not None, PRECISION, False, True,
    )  # fmt: skip
    sinks, v_scale = sinks_and_scale(tensors, v_scale_head, head, real, kv_head)
    y = normalize(maxima, sums, outputs, sinks, v_scale).to(tensors.output.dtype.element_ty)
    if context == 0:
        # Zeros for padding, even with sinks.
        y = tl.zeros((BLOCK_M, BLOCK_D), tensors.output.dtype.element_ty)
    output_at = token[:, None] * output_strides[0] + head[:, None] * output_strides[1]
    tl.store(tensors.output + output_at + d[None, :] * output_strides[2], y, mask=mask)
