"""Paged attention in Triton: one kernel for single tokens, one for several, and their sums.

design/0010 has the picture. Both kernels lay the query heads of a key-value head side by side as
the rows of one tile (row ``r`` is token ``r // GROUP``, head ``r % GROUP``) and walk the context in
tiles of ``BLOCK_N`` tokens, each looked up in the block table, with the online softmax of
FlashAttention (arXiv:2205.14135). Scores are in units of log2, for exp2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_module.kernels.dtypes import capability
from vllm_module.kernels.operators import next_power_of_2, tl, triton

LOG2_E = 1.4426950408889634
SPLIT = 512  # tokens of a context that are attended to at a time, in parts that are summed up
MOST_SPLITS = 64  # of one context; those of more than 64 * 512 tokens have larger ones
_PROGRAMS = 8192  # of a step that decodes; of more sequences each has fewer, which loop


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: query rows and context tokens of a tile, warps, stages of loading."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_tiles(block_d: int, group: int, hopper: bool) -> Tiles:
    """Return the tiles of single tokens, given the padded head size.

    16 KiB of keys in 16 bits are a tile. Keys wait for their page's number, so that three stages
    are one tile in flight (five would be two, at the cost of registers): two or three programs on
    a multiprocessor are to cover the latency of memory. Before Hopper a third stage spills.
    """
    rows = max(16, next_power_of_2(group))
    tokens, warps = max(32, min(128, 8192 // block_d)), 4 if rows <= 32 else 8
    return Tiles(rows, tokens, warps, 3 if hopper else 2)


def prefill_tiles(block_d: int, group: int, itemsize: int) -> Tiles:
    """Return the tiles of several tokens, given the padded head size and the query's itemsize.

    64 rows a warpgroup are what Hopper's wgmma takes; more than two warpgroups' registers are full.
    """
    rows = next_power_of_2(group)
    if itemsize == 4:  # without tensor cores
        return Tiles(max(16, rows), 16, 4, 1)
    if block_d > 128:
        return Tiles(max(64, rows), 32, 8, 3)
    return Tiles(128, 64, 8, 3)


def paged_attention_triton(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend by Triton kernels; see :func:`~vllm_module.kernels.paged_attention.paged_attention`.

    Sequences of one new token and the others go by two launches, whichever come together, so that
    a token's result does not depend on them.
    """
    tokens, heads, head_size = query.shape
    output = query.new_empty(query.shape)
    # These few have no strides in the kernels.
    context_lens, query_start_loc = context_lens.contiguous(), query_start_loc.contiguous()
    alibi_slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    sequences, kv_heads, page_size = len(context_lens), k_cache.shape[2], k_cache.shape[1]
    if not output.numel():
        return output
    group, block_d = heads // kv_heads, max(16, next_power_of_2(head_size))
    eight_bits = k_cache.dtype.itemsize == 1
    scales = (k_scale, v_scale) if eight_bits else (None, None)
    arguments = (
        query,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        query_start_loc,
        *scales,
        alibi_slopes,
        sinks,
        output,
        tokens,
        sequences,
        block_tables.shape[1] * page_size,
        scale * LOG2_E if softcap is None else scale / softcap,
        1.0 if softcap is None else softcap * LOG2_E,
        *query.stride(),
        *k_cache.stride(),
        *v_cache.stride(),
        *block_tables.stride(),
        *output.stride(),
        *(0 if factor is None or len(factor) == 1 else factor.stride(0) for factor in scales),
    )
    constants = {
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "BLOCK_D": block_d,
        "PAGE_SIZE": page_size,
        "ALIKE": k_cache.stride() == v_cache.stride(),
        "WINDOW": min(sliding_window or 0, 2**31 - 1),
        "SOFTCAP": softcap is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }

    tiles = decode_tiles(block_d, group, capability(query) >= (9, 0))
    splits = min(MOST_SPLITS, -(-block_tables.shape[1] * page_size // SPLIT))
    programs = max(1, min(splits, _PROGRAMS // max(1, sequences * kv_heads)))
    parts: tuple[torch.Tensor | None, ...] = (None, None, None)
    if splits > 1:
        shape = (sequences, heads, splits)
        outputs = torch.empty(*shape, head_size, dtype=torch.float32, device=query.device)
        parts = (outputs, *torch.empty(2, *shape, dtype=torch.float32, device=query.device))
    _decode[sequences + 1, kv_heads, programs](
        *arguments,
        *parts,
        splits,
        **constants,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        SPLIT=SPLIT,
        MOST_SPLITS=MOST_SPLITS,
        DIRECT=splits <= 1,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits > 1:
        _combine[sequences, heads](
            output,
            *parts,
            context_lens,
            query_start_loc,
            sinks,
            scales[1],
            tokens,
            splits,
            block_tables.shape[1] * page_size,
            *output.stride(),
            arguments[-1],
            GROUP=group,
            HEAD_SIZE=head_size,
            BLOCK_D=block_d,
            WINDOW=constants["WINDOW"],
            SPLIT=SPLIT,
            MOST_SPLITS=MOST_SPLITS,
            num_warps=4,
        )
    if max_query_len > 1 and sequences:
        tiles = prefill_tiles(block_d, group, query.dtype.itemsize)
        block_q = tiles.block_m // group
        _prefill[tokens // block_q + sequences, kv_heads](
            *arguments,
            **constants,
            BLOCK_Q=block_q,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return output


@triton.jit
def _split_size(context, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """Tokens of a split: a function of the sequence alone, so that its sums always add up alike."""
    return SPLIT * tl.maximum(1, tl.cdiv(context, SPLIT * MOST_SPLITS))


@triton.jit
def _rounded_query(q, cache_ptr):
    """Return ``q`` as it is multiplied by keys of the cache, and what its rows were divided by.

    Eight bits widen to float16 exactly and in one instruction, so that is what a bfloat16 query is
    made, over a power of two that keeps it in range.
    """
    by = tl.full((q.shape[0],), 1.0, tl.float32)
    if q.dtype == tl.bfloat16 and cache_ptr.dtype.element_ty.primitive_bitwidth == 8:
        wide = q.to(tl.float32)
        bits = tl.max(wide.to(tl.int32, bitcast=True) & 0x7F800000, axis=1)
        by = tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))
        q = (wide / by[:, None]).to(tl.float16)
    return q, by


@triton.jit
def _tanh(x):
    """By exp(2x), which may overflow to infinity and still be right; by its series near zero."""
    square = x * x
    series = 1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * (62 / 2835))))
    return tl.where(square < 0.0625, x * series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def _attend(
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
    least,
    factor,
    cap,
    k_strides,
    v_strides,
    table_entry,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ALIKE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend from a tile of rows to tokens ``[begin, end)``, on top of what came before.

    Args:
        q: ``[BLOCK_M, BLOCK_D]``.
        maxima, sums: of the rows so far, ``[BLOCK_M]``; outputs: ``[BLOCK_M, BLOCK_D]``.
        positions: of the rows in their sequence, ``[BLOCK_M]``; slopes: ALiBi's, ``[BLOCK_M]``.
        k_ptr, v_ptr: of this key-value head; strides: of page, token and feature.
        table_ptr: of this sequence.
        begin: a multiple of BLOCK_N; least: the first token that any row sees.
        factor: on the products, ``[BLOCK_M]``; cap: on tanh, where SOFTCAP.
        MASKED: some row does not see some token, or some token is not there: what is not there is
            not read, since NaN of a recycled page would come through a weight of zero.

    """
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D).to(tl.int64)
    inside = d < HEAD_SIZE
    for start in range(begin, end, BLOCK_N):
        token = start + n
        if MASKED:
            there = (token >= least) & (token < end)
            page = tl.load(table_ptr + token // PAGE_SIZE * table_entry, mask=there, other=0)
        else:
            page = tl.load(table_ptr + token // PAGE_SIZE * table_entry)
        page = page.to(tl.int64)
        slot = (token % PAGE_SIZE).to(tl.int64)
        k_place = (page * k_strides[0] + slot * k_strides[1])[:, None] + d[None, :] * k_strides[2]
        if ALIKE:
            v_place = k_place
        else:
            v_place = (page * v_strides[0] + slot * v_strides[1])[:, None]
            v_place += d[None, :] * v_strides[2]
        if MASKED:
            k = tl.load(k_ptr + k_place, mask=there[:, None] & inside[None, :], other=0.0)
        elif HEAD_SIZE != BLOCK_D:
            k = tl.load(k_ptr + k_place, mask=inside[None, :], other=0.0)
        else:
            k = tl.load(k_ptr + k_place)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * factor[:, None]
        if SOFTCAP:
            scores = cap * _tanh(scores)
        if ALIBI:
            scores += slopes[:, None] * (token[None, :] - positions[:, None])
        if MASKED:
            seen = there[None, :] & (token[None, :] <= positions[:, None])
            if WINDOW > 0:
                seen = seen & (token[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(maxima, tl.max(scores, axis=1))
        # Rows that have seen nothing yet: -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maxima - base)
        sums = sums * shrink + tl.sum(weights, axis=1)
        outputs = outputs * shrink[:, None]
        if MASKED:
            v = tl.load(v_ptr + v_place, mask=there[:, None] & inside[None, :], other=0.0)
        elif HEAD_SIZE != BLOCK_D:
            v = tl.load(v_ptr + v_place, mask=inside[None, :], other=0.0)
        else:
            v = tl.load(v_ptr + v_place)
        outputs = tl.dot(weights.to(q.dtype), v.to(q.dtype), outputs, input_precision=PRECISION)
        maxima = higher
    return maxima, sums, outputs


@triton.jit
def _finished(maxima, sums, outputs, sinks, v_scale):
    """Return outputs ``[rows, BLOCK_D]`` over their sums, sinks included; zeros for empty rows."""
    highest = tl.maximum(maxima, sinks)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp2(maxima - highest)
    sums = sums * shrink + tl.exp2(sinks - highest)
    shares = tl.where(sums > 0.0, v_scale / sums, 0.0)
    return outputs * (shrink * shares)[:, None]


@triton.jit(do_not_specialize=["tokens", "sequences", "room", "splits", "table_row"])
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
    room,
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
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    splits,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ALIKE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """One new token of a sequence, one key-value head, every so many splits of the context.

    A program beyond the last sequence writes zeros for the tokens that belong to none. With
    DIRECT a context is one split, and its result is final; else ``_combine`` sums the parts up.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D).to(tl.int64)
    head = kv_head * GROUP + m
    inside = (m < GROUP)[:, None] & (d < HEAD_SIZE)[None, :]
    written = output_ptr + head[:, None] * output_head + d[None, :] * output_feature
    first = tl.load(starts_ptr + sequence).to(tl.int64)
    if sequence == sequences:
        zeros = tl.zeros((BLOCK_M, BLOCK_D), output_ptr.dtype.element_ty)
        first = tl.maximum(first, 0)
        for token in range(first + tl.program_id(2), tokens, tl.num_programs(2)):
            tl.store(written + token * output_token, zeros, mask=inside)
        return
    if (tl.load(starts_ptr + sequence + 1) - first != 1) | (first < 0) | (first >= tokens):
        return
    context = tl.minimum(tl.load(contexts_ptr + sequence), room)
    size = _split_size(context, SPLIT, MOST_SPLITS)
    least = 0
    if WINDOW > 0:
        least = tl.maximum(0, context - WINDOW)
    rows = query_ptr + first * query_token + head[:, None] * query_head
    q = tl.load(rows + d[None, :] * query_feature, mask=inside, other=0.0)
    positions = tl.zeros((BLOCK_M,), tl.int32) + (context - 1)
    slopes = tl.zeros((BLOCK_M,), tl.float32)
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head, mask=m < GROUP, other=0.0) * 1.4426950408889634
    q, by = _rounded_query(q, k_ptr)
    factor = by * factor
    if k_scale_ptr is not None:
        factor = factor * tl.load(k_scale_ptr + kv_head * k_scale_head)
    k_strides, v_strides = (k_page, k_token, k_feature), (v_page, v_token, v_feature)
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    table_ptr = tables_ptr + table_row.to(tl.int64) * sequence
    for split in range(
        least // size + tl.program_id(2), tl.cdiv(context, size), tl.num_programs(2)
    ):
        begin = tl.maximum(split * size, least // BLOCK_N * BLOCK_N)
        end = tl.minimum(split * size + size, context)
        maxima = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_M,), tl.float32)
        outputs = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        whole = end // BLOCK_N * BLOCK_N  # up to here tiles are full
        if WINDOW > 0:
            whole = begin
        maxima, sums, outputs = _attend(
            q, maxima, sums, outputs, positions, slopes,
            k_ptr, v_ptr, table_ptr, begin, whole, least, factor, cap,
            k_strides, v_strides, table_entry,
            HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE_SIZE, ALIKE, WINDOW, SOFTCAP,
            slopes_ptr is not None, PRECISION, False,
        )  # fmt: skip
        maxima, sums, outputs = _attend(
            q, maxima, sums, outputs, positions, slopes,
            k_ptr, v_ptr, table_ptr, whole, end, least, factor, cap,
            k_strides, v_strides, table_entry,
            HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE_SIZE, ALIKE, WINDOW, SOFTCAP,
            slopes_ptr is not None, PRECISION, True,
        )  # fmt: skip
        if DIRECT:
            sinks = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            if sinks_ptr is not None:
                sinks = tl.load(sinks_ptr + head, mask=m < GROUP, other=0.0).to(tl.float32)
                sinks = sinks * 1.4426950408889634
            v_scale = 1.0
            if v_scale_ptr is not None:
                v_scale = tl.load(v_scale_ptr + kv_head * v_scale_head)
            y = _finished(maxima, sums, outputs, sinks, v_scale)
            y = y.to(output_ptr.dtype.element_ty)
            tl.store(written + first * output_token, y, mask=inside)
        else:
            part = (sequence * tl.num_programs(1) * GROUP + head) * splits + split
            tl.store(maxima_ptr + part, maxima, mask=m < GROUP)
            tl.store(sums_ptr + part, sums, mask=m < GROUP)
            tl.store(parts_ptr + part[:, None] * HEAD_SIZE + d[None, :], outputs, mask=inside)
    if DIRECT and context == 0:
        zeros = tl.zeros((BLOCK_M, BLOCK_D), output_ptr.dtype.element_ty)
        tl.store(written + first * output_token, zeros, mask=inside)


@triton.jit(do_not_specialize=["tokens", "splits", "room"])
def _combine(
    output_ptr,
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    contexts_ptr,
    starts_ptr,
    sinks_ptr,
    v_scale_ptr,
    tokens,
    splits,
    room,
    output_token,
    output_head,
    output_feature,
    v_scale_head,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """Sum up the parts of one sequence's new token and one query head, always in one order."""
    sequence, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.load(starts_ptr + sequence).to(tl.int64)
    if (tl.load(starts_ptr + sequence + 1) - first != 1) | (first < 0) | (first >= tokens):
        return
    context = tl.minimum(tl.load(contexts_ptr + sequence), room)
    size = _split_size(context, SPLIT, MOST_SPLITS)
    least = 0
    if WINDOW > 0:
        least = tl.maximum(0, context - WINDOW) // size
    last = tl.cdiv(context, size)
    d = tl.arange(0, BLOCK_D)
    part = (sequence * tl.num_programs(1) + head) * splits
    split = tl.arange(0, MOST_SPLITS)
    there = (split >= least) & (split < last)
    maxima = tl.load(maxima_ptr + part + split, mask=there, other=float("-inf"))
    highest = tl.max(maxima, axis=0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    sums = tl.load(sums_ptr + part + split, mask=there, other=0.0)
    total = tl.sum(sums * tl.exp2(maxima - highest), axis=0)
    outputs = tl.zeros((BLOCK_D,), tl.float32)
    for begin in range(least // 8 * 8, last, 8):
        some = begin + tl.arange(0, 8)
        held = (some >= least) & (some < last)
        maximum = tl.load(maxima_ptr + part + some, mask=held, other=float("-inf"))
        places = (part + some)[:, None] * HEAD_SIZE + d[None, :]
        inside = held[:, None] & (d < HEAD_SIZE)[None, :]
        output = tl.load(parts_ptr + places, mask=inside, other=0.0)
        outputs += tl.sum(output * tl.exp2(maximum - highest)[:, None], axis=0)
    one = tl.zeros((1,), tl.float32)
    sinks = one + float("-inf")
    if sinks_ptr is not None:
        sinks = one + tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
    v_scale = 1.0
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + head // GROUP * v_scale_head)
    y = _finished(one + highest, one + total, outputs[None, :], sinks, v_scale)
    y = tl.sum(y, axis=0).to(output_ptr.dtype.element_ty)
    place = output_ptr + first * output_token + head * output_head + d * output_feature
    tl.store(place, y, mask=d < HEAD_SIZE)


@triton.jit(do_not_specialize=["tokens", "sequences", "room", "table_row"])
def _prefill(
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
    room,
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
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ALIKE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_Q new tokens of one sequence that has more than one, one key-value head.

    A sequence of ``new`` tokens from ``start`` on has the programs from ``start // BLOCK_Q +
    sequence`` on, which are enough and never another's, so that no list of blocks is needed. The
    longest go first.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    low, high = 0, sequences  # the first sequence whose programs begin after this one
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= program:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    first = tl.load(starts_ptr + sequence)
    new = tl.load(starts_ptr + sequence + 1) - first
    begin_q = (program - first // BLOCK_Q - sequence) * BLOCK_Q
    if begin_q >= new or new == 1:
        return
    context = tl.minimum(tl.load(contexts_ptr + sequence), room)
    kv_head = tl.program_id(1).to(tl.int64)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D).to(tl.int64)
    row = begin_q + m // GROUP
    head = kv_head * GROUP + m % GROUP
    real = (m < BLOCK_Q * GROUP) & (row < new) & (first + row >= 0) & (first + row < tokens)
    inside = real[:, None] & (d < HEAD_SIZE)[None, :]
    token = (first + row).to(tl.int64)
    places = token[:, None] * query_token + head[:, None] * query_head + d[None, :] * query_feature
    q = tl.load(query_ptr + places, mask=inside, other=0.0)
    positions = context - new + row
    slopes = tl.zeros((BLOCK_M,), tl.float32)
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head, mask=real, other=0.0) * 1.4426950408889634
    q, by = _rounded_query(q, k_ptr)
    factor = by * factor
    if k_scale_ptr is not None:
        factor = factor * tl.load(k_scale_ptr + kv_head * k_scale_head)
    k_strides, v_strides = (k_page, k_token, k_feature), (v_page, v_token, v_feature)
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    table_ptr = tables_ptr + table_row.to(tl.int64) * sequence
    maxima = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    outputs = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    earliest = context - new + begin_q  # position of the first row
    end = tl.minimum(earliest + BLOCK_Q, context)
    least = 0
    begin = 0
    whole = tl.maximum(0, earliest + 1) // BLOCK_N * BLOCK_N  # all rows see what is before
    if WINDOW > 0:
        least = tl.maximum(0, earliest - WINDOW + 1)
        begin = least // BLOCK_N * BLOCK_N
    if WINDOW > 0 or BLOCK_D > 128:  # one loop: of two, large heads' registers would spill
        whole = begin
    maxima, sums, outputs = _attend(
        q, maxima, sums, outputs, positions, slopes,
        k_ptr, v_ptr, table_ptr, begin, whole, least, factor, cap,
        k_strides, v_strides, table_entry,
        HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE_SIZE, ALIKE, WINDOW, SOFTCAP,
        slopes_ptr is not None, PRECISION, False,
    )  # fmt: skip
    maxima, sums, outputs = _attend(
        q, maxima, sums, outputs, positions, slopes,
        k_ptr, v_ptr, table_ptr, whole, end, least, factor, cap,
        k_strides, v_strides, table_entry,
        HEAD_SIZE, BLOCK_D, BLOCK_N, PAGE_SIZE, ALIKE, WINDOW, SOFTCAP,
        slopes_ptr is not None, PRECISION, True,
    )  # fmt: skip
    sinks = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32)
        sinks = sinks * 1.4426950408889634
    v_scale = 1.0
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + kv_head * v_scale_head)
    y = _finished(maxima, sums, outputs, sinks, v_scale).to(output_ptr.dtype.element_ty)
    if context == 0:
        y = tl.zeros((BLOCK_M, BLOCK_D), output_ptr.dtype.element_ty)  # padding, sinks or not
    places = token[:, None] * output_token + head[:, None] * output_head
    tl.store(output_ptr + places + d[None, :] * output_feature, y, mask=inside)
