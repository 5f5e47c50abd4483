"""Attention of new tokens to a paged KV cache: whole prompts, chunks and single tokens alike."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.nn import functional as F

from vllm_module.kernels.dtypes import EIGHT_BITS, FLOATS, can_convert
from vllm_module.kernels.operators import checks_values, expect, operator
from vllm_module.kernels.paged_attention_triton import paged_attention_triton

MOST_HEAD_SIZE = 256
_TOGETHER = 1 << 19  # numbers of keys that a CPU's cache holds while they are worked on
MOST_GROUP = 128  # query heads that share a key-value head; of large heads, half as many


def paged_attention(
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
    """Attend causally from each sequence's new tokens to all of its tokens, which are cached.

    A token's result depends on its own sequence alone, and not on what else is in the batch.

    Args:
        query: new tokens of all sequences end to end, ``[tokens, heads, head_size]``.
        k_cache, v_cache: ``[pages, page_size, kv_heads, head_size]``; they hold the new tokens too.
        block_tables: pages of each sequence in order, int32 ``[sequences, most_pages]``; entries
            past the context, and those that a sliding window has left, are never read.
        context_lens: tokens of each sequence, the new ones included, int32 ``[sequences]``; 0 for
            padding.
        query_start_loc: where each sequence's new tokens begin and end, int32 ``[sequences + 1]``.
        max_query_len: most new tokens of one sequence; 1 in a step that only decodes.
        scale: of the scores.
        sliding_window: how many of the last tokens, itself included, a token sees.
        k_scale, v_scale: float32 ``[1]`` or ``[kv_heads]``; what a cache of eight bits holds is
            multiplied by them.
        softcap: scores are ``softcap * tanh(scores / softcap)`` (Gemma 2, arXiv:2408.00118).
        alibi_slopes: float32 ``[heads]``; times the distance, which is negative, they are added to
            the scores (ALiBi, arXiv:2108.12409).
        sinks: ``[heads]``, a score that takes its share of the softmax and has no value (gpt-oss,
            after arXiv:2309.17453).

    Returns:
        ``[tokens, heads, head_size]``; zeros for tokens of no sequence.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other; where values are checked
            (:func:`~vllm_module.kernels.operators.checks_values`), lengths and pages too.

    """
    _check(query, k_cache, v_cache, block_tables, context_lens, query_start_loc)
    _check_scores(query, k_cache, sliding_window, k_scale, v_scale, softcap, alibi_slopes, sinks)
    checked = checks_values(query)
    if checked:
        room = block_tables.shape[1] * k_cache.shape[1]
        _check_lengths(context_lens, query_start_loc, len(query), max_query_len, room)
        if not query.is_cpu:  # where torch does it
            _check_pages(k_cache, block_tables, context_lens, query_start_loc, sliding_window)
    try:
        return _paged_attention(
            query,
            k_cache,
            v_cache,
            block_tables,
            context_lens,
            query_start_loc,
            max_query_len,
            scale,
            sliding_window,
            k_scale,
            v_scale,
            softcap,
            alibi_slopes,
            sinks,
        )
    except IndexError:
        if checked:
            _check_pages(k_cache, block_tables, context_lens, query_start_loc, sliding_window)
        raise


def paged_attention_reference(
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
    """Attend in plain torch, sequence by sequence but for single tokens of like contexts.

    See :func:`paged_attention`.
    """
    page_size = k_cache.shape[1]
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    starts = query_start_loc.tolist()
    whole: list[int] = []  # sequences that are worked on by themselves
    single: list[tuple[int, int]] = []  # contexts and sequences of one token
    for sequence, context in enumerate(context_lens.tolist()):
        new = starts[sequence + 1] - starts[sequence]
        if new == 1 and context:
            single.append((context, sequence))
        elif new and context:
            whole.append(sequence)
    single.sort(reverse=True)  # those of like contexts go together
    while single:
        count = max(1, _TOGETHER // (single[0][0] * k_cache[0, 0].numel()))
        chosen = [sequence for _, sequence in single[:count]]
        del single[:count]
        if len(chosen) == 1:
            whole += chosen
            continue
        index = torch.tensor(chosen, device=query.device)
        rows = torch.tensor([starts[sequence] for sequence in chosen], device=query.device)
        output[rows] = _decode(
            query[rows],
            k_cache,
            v_cache,
            block_tables[index],
            context_lens[index],
            scale,
            sliding_window,
            k_scale,
            v_scale,
            softcap,
            alibi_slopes,
            sinks,
        )
    for sequence in whole:
        begin, end = starts[sequence], starts[sequence + 1]
        context = int(context_lens[sequence])
        first = 0  # token that is seen; what the window has left may be another's by now
        if sliding_window is not None:
            first = max(0, context - (end - begin) - sliding_window + 1)
        pages = block_tables[sequence, first // page_size : -(-context // page_size)]
        seen = slice(first % page_size, first % page_size + context - first)
        keys, values = (
            _widened(cache.index_select(0, pages).flatten(0, 1)[seen], factor, query.dtype)
            for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
        )
        output[begin:end] = causal_attention(
            query[begin:end].transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            scale,
            sliding_window,
            softcap,
            alibi_slopes,
            sinks,
        ).transpose(0, 1)
    return output


def _decode(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from one token of each sequence, its context padded to the longest one."""
    page_size, kv_heads = k_cache.shape[1:3]
    sequences, heads = query.shape[:2]
    length = int(context_lens.max())
    columns = torch.arange(length, device=query.device)
    distance = columns - (context_lens.unsqueeze(-1) - 1)  # [sequences, length], 0 at the token
    seen = distance <= 0
    page = torch.arange(0, length, page_size, device=query.device)  # the first tokens of pages
    used = page < context_lens.unsqueeze(-1)
    if sliding_window is not None:
        seen &= distance > -sliding_window
        used &= page > context_lens.unsqueeze(-1) - sliding_window - page_size
    # What is not seen is read from page 0, and has no weight: it may be anything, NaN too.
    tables = block_tables[:, : used.shape[1]].masked_fill(~used, 0)
    keys, values = (
        _widened(cache.index_select(0, tables.flatten()), factor, query.dtype)
        .view(sequences, -1, kv_heads, k_cache.shape[3])[:, :length]
        .transpose(1, 2)
        for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
    )
    # [sequences, kv_heads, group, size]: heads that share keys and values are rows of one query.
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
    slopes = None if alibi_slopes is None else alibi_slopes.view(1, kv_heads, -1, 1)
    attend = partial(_attend, grouped, seen, distance, scale, softcap, slopes, sinks)
    output = attend(keys, values)
    if not bool(output.sum().isfinite()):  # rarely: a weight of zero does not make zero of NaN
        unseen = ~seen[:, None, :, None]
        output = attend(keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0))
    return output.flatten(1, 2)


def _attend(
    query: torch.Tensor,
    seen: torch.Tensor,
    distance: torch.Tensor,
    scale: float,
    softcap: float | None,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Attend from ``query [sequences, kv_heads, group, size]`` to ``keys [..., tokens, size]``."""
    sequences, kv_heads, group, _ = query.shape
    if softcap is None and slopes is None and sinks is None:
        mask = seen[:, None, None].expand(-1, 1, group, -1)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = (query @ keys.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if slopes is not None:
        scores = scores + slopes * distance[:, None, None]
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, kv_heads, -1, 1).expand(sequences, -1, -1, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]].to(query.dtype)
    return weights @ values


def _widened(held: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return what ``held [tokens, kv_heads, head_size]`` of a cache stands for."""
    if held.dtype.itemsize > 1:
        return held.to(dtype)
    return (held.float() * (1 if scale is None else scale.unsqueeze(-1))).to(dtype)


def causal_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one sequence's last tokens to all of it, without pages and in plain torch.

    Args:
        query: ``[heads, new_tokens, head_size]``.
        keys, values: ``[kv_heads, tokens, head_size]``; ``heads`` is a multiple of ``kv_heads``.
        scale, sliding_window, softcap, alibi_slopes, sinks: as for :func:`paged_attention`.

    Returns:
        ``[heads, new_tokens, head_size]``.

    """
    new, total = query.shape[1], keys.shape[1]
    group = query.shape[0] // keys.shape[0]
    plain = softcap is None and alibi_slopes is None and sinks is None
    if sliding_window is not None and sliding_window >= total:
        sliding_window = None
    if plain and new == 1 and sliding_window is None:  # it sees everything
        grouped = query.reshape(1, -1, group, query.shape[-1])
        keys, values = keys.unsqueeze(0), values.unsqueeze(0)
        output = F.scaled_dot_product_attention(grouped, keys, values, scale=scale)
        return output.reshape(query.shape)
    rows = torch.arange(total - new, total, device=query.device).unsqueeze(-1)
    columns = torch.arange(total, device=query.device)
    seen = columns <= rows
    if sliding_window is not None:
        seen &= columns > rows - sliding_window
    if plain:
        # [kv_heads, group, tokens, size]: of four dimensions torch's fused kernels take these, and
        # keys and values are not copied for each of their heads.
        grouped = query.unflatten(0, (-1, group))
        keys, values = (x.unsqueeze(1).expand(-1, group, -1, -1) for x in (keys, values))
        whole = new == total and sliding_window is None
        return F.scaled_dot_product_attention(
            grouped, keys, values, None if whole else seen, is_causal=whole, scale=scale
        ).flatten(0, 1)
    keys = keys.repeat_interleave(group, dim=0)
    values = values.repeat_interleave(group, dim=0)
    scores = query.float() @ keys.float().transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if alibi_slopes is not None:
        scores += alibi_slopes[:, None, None] * (columns - rows)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, new, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., :total]
    return (weights @ values.float()).to(query.dtype)


def _check(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    expect("query", query, (None, None, None), FLOATS)
    expect("k_cache", k_cache, (None, None, None, query.shape[-1]), None, query)
    expect("v_cache", v_cache, k_cache.shape, (k_cache.dtype,), query)
    if k_cache.dtype not in (query.dtype, *EIGHT_BITS):
        raise ValueError(
            f"the cache must be {query.dtype}, as the query, or of eight bits, got {k_cache.dtype}"
        )
    if k_cache.dtype == torch.float8_e4m3fn and not can_convert(k_cache.dtype, query):
        raise ValueError(
            f"a cache of {k_cache.dtype} needs a GPU of compute capability 8.9: take float8_e5m2"
        )
    _, page_size, kv_heads, head_size = k_cache.shape
    heads = query.shape[1]
    if not 1 <= head_size <= MOST_HEAD_SIZE:
        raise ValueError(f"the head size must be 1 to {MOST_HEAD_SIZE}, got {head_size}")
    if page_size < 1:
        raise ValueError("pages must have room for a token: page_size is 0")
    most = MOST_GROUP if head_size <= 128 else MOST_GROUP // 2
    if kv_heads < 1 or heads % kv_heads or not 1 <= heads // kv_heads <= most:
        raise ValueError(
            f"{heads} query heads of {head_size} cannot share {kv_heads} key-value heads: expected "
            f"a multiple of them, at most {most} for each"
        )
    integers = (torch.int32,)
    expect("block_tables", block_tables, (None, None), integers, query)
    sequences = block_tables.shape[0]
    expect("context_lens", context_lens, (sequences,), integers, query)
    expect("query_start_loc", query_start_loc, (sequences + 1,), integers, query)


def _check_scores(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    sliding_window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    heads, kv_heads = query.shape[1], k_cache.shape[2]
    for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factor is not None:
            count = kv_heads if factor.shape == (kv_heads,) else 1
            expect(name, factor, (count,), (torch.float32,), query)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, got {softcap}")
    if alibi_slopes is not None:
        expect("alibi_slopes", alibi_slopes, (heads,), (torch.float32,), query)
    if sinks is not None:
        expect("sinks", sinks, (heads,), FLOATS, query)


def _check_lengths(
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    tokens: int,
    max_query_len: int,
    room: int,
) -> None:
    """Refuse lengths by which something else would be read, or nothing."""
    starts = query_start_loc.tolist()
    if starts[0] != 0 or starts[-1] > tokens:
        raise ValueError(
            f"query_start_loc goes from {starts[0]} to {starts[-1]}: expected 0 to at most the "
            f"{tokens} tokens of the query"
        )
    for sequence, context in enumerate(context_lens.tolist()):
        new = starts[sequence + 1] - starts[sequence]
        if not 0 <= new <= max_query_len:
            raise ValueError(
                f"sequence {sequence} has {new} new tokens by query_start_loc: expected 0 to "
                f"max_query_len {max_query_len}"
            )
        if context and not new <= context <= room:
            raise ValueError(
                f"sequence {sequence} has a context of {context} tokens: expected 0 or at least "
                f"its {new} new ones, and at most the {room} that a row of block_tables has pages "
                "for"
            )


def _check_pages(
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    sliding_window: int | None,
) -> None:
    """Refuse pages that the cache does not have, where they would be read."""
    pages, page_size = k_cache.shape[:2]
    new = query_start_loc.diff()
    room = block_tables.shape[1] * page_size
    position = torch.arange(0, room, page_size, device=new.device)  # of each page's first token
    used = (position < context_lens.unsqueeze(-1)) & (new > 0).unsqueeze(-1)
    if sliding_window is not None:
        unseen = context_lens - new - sliding_window + 1
        used &= position + page_size > unseen.unsqueeze(-1)
    outside = used & ((block_tables < 0) | (block_tables >= pages))
    if bool(outside.any()):
        sequence, entry = outside.nonzero()[0].tolist()
        raise ValueError(
            f"block_tables[{sequence}, {entry}] is page {int(block_tables[sequence, entry])}, and "
            f"the cache has {pages} pages"
        )


def _empty(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Return what the operation would, with nothing in it."""
    return query.new_empty(query.shape)


_paged_attention = operator(paged_attention_reference, paged_attention_triton, _empty)
