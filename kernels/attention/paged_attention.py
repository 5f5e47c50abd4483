"""Attention of new tokens over a paged KV cache: whole prompts, chunks and single tokens.

A page holds the keys and values of ``page_size`` tokens; the field also calls it a block, hence
``block_tables``. A cache slot is one token's place: slot ``page * page_size + offset``.
"""

from __future__ import annotations

import math

import torch

from vllm_module.kernels.attention.paged_attention_reference import (
    attend,
    causal_attention,
    paged_attention_reference,
)
from vllm_module.kernels.attention.paged_attention_triton import paged_attention_triton
from vllm_module.kernels.attention.paged_layout import PagedLayout, kinds
from vllm_module.kernels.dtypes import EIGHT_BITS, FLOATS, can_convert
from vllm_module.kernels.operators import checks_values, empty_like, expect, operator

__all__ = ["causal_attention", "paged_attention"]

MAX_HEAD_SIZE = 512


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
    *,
    layout: PagedLayout | None = None,
) -> torch.Tensor:
    """Compute causal attention from each sequence's new tokens to all of its cached tokens.

    A token's result depends only on its own sequence, and not on the rest of the batch. In plain
    torch on a CPU that holds but for the last digits, which depend on how sequences are batched.

    Args:
        query: new tokens of all sequences end to end, ``[tokens, heads, head_size]``.
        k_cache, v_cache: ``[pages, page_size, kv_heads, head_size]``; they hold the new tokens too.
        block_tables: pages of each sequence in order, int32 ``[sequences, max_pages]``. Entries
            past the context, or before the sliding window, are never read.
        context_lens: number of tokens of each sequence, with the new ones, int32 ``[sequences]``; 0
            for padding.
        query_start_loc: begin and end of each sequence's new tokens, int32 ``[sequences + 1]``.
        max_query_len: largest number of new tokens of a sequence; 1 in a step that only decodes.
        scale: factor of the scores.
        sliding_window: number of last tokens, itself included, that a token attends to.
        k_scale, v_scale: factors of an eight-bit cache's values, float32 ``[1]`` or ``[kv_heads]``.
        softcap: cap of the scores: ``softcap * tanh(scores / softcap)`` (Gemma 2,
            arXiv:2408.00118).
        alibi_slopes: slopes, float32 ``[heads]``; slope times distance (negative) is added to the
            scores (ALiBi, arXiv:2108.12409).
        sinks: one score for each head, ``[heads]``, that joins the softmax and has no value
            (gpt-oss, after arXiv:2309.17453).
        layout: layout of ``block_tables``, ``context_lens`` and ``query_start_loc``, if they are on
            a CPU and several calls share them. No derivatives are kept.

    Returns:
        ``[tokens, heads, head_size]``; zeros for tokens of no sequence.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; lengths or pages are out of
            range, if :func:`~vllm_module.kernels.operators.checks_values` is true.

    """
    checked = True
    fits = None if layout is None else kinds(query, k_cache, v_cache)
    if layout is None or fits not in layout.checked:
        _check(query, k_cache, v_cache, block_tables, context_lens, query_start_loc)
        checked = checks_values(query)
        if checked:
            capacity = block_tables.shape[1] * k_cache.shape[1]
            check_lengths(context_lens, query_start_loc, len(query), max_query_len, capacity)
            if not query.is_cpu:  # on the CPU, torch raises IndexError for them
                check_pages(k_cache, block_tables, context_lens, query_start_loc, sliding_window)
        if layout is not None:
            layout.checked.add(fits)
    _check_scores(query, k_cache, sliding_window, k_scale, v_scale, softcap, alibi_slopes, sinks)
    options = scale, sliding_window, k_scale, v_scale, softcap, alibi_slopes, sinks
    try:
        if layout is not None:
            return attend(query, k_cache, v_cache, layout, *options)
        return _paged_attention(
            query,
            k_cache,
            v_cache,
            block_tables,
            context_lens,
            query_start_loc,
            max_query_len,
            *options,
        )
    except IndexError:
        if checked:
            check_pages(k_cache, block_tables, context_lens, query_start_loc, sliding_window)
        raise


def most_of_group(head_size: int) -> int:
    """Return how many query heads may share a key-value head, limited by registers."""
    return 128 if head_size <= 128 else 64 if head_size <= 256 else 16


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
            f"a cache of {k_cache.dtype} needs a GPU of compute capability 8.9: use float8_e5m2"
        )
    _, page_size, kv_heads, head_size = k_cache.shape
    heads = query.shape[1]
    if not 1 <= head_size <= MAX_HEAD_SIZE:
        raise ValueError(f"the head size must be 1 to {MAX_HEAD_SIZE}, got {head_size}")
    if page_size < 1:
        raise ValueError("a page must hold at least one token: page_size is 0")
    max_group = most_of_group(head_size)
    if kv_heads < 1 or heads % kv_heads or not 1 <= heads // kv_heads <= max_group:
        raise ValueError(
            f"{heads} query heads of {head_size} cannot share {kv_heads} key-value heads: expected "
            f"a multiple of {kv_heads}, at most {max_group} query heads for each"
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


def check_lengths(
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    tokens: int,
    max_query_len: int,
    capacity: int,
) -> None:
    """Raise ``ValueError`` for lengths that contradict each other or exceed the block table."""
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
        if context and not new <= context <= capacity:
            raise ValueError(
                f"sequence {sequence} has a context of {context} tokens: expected 0 or at least "
                f"its {new} new ones, and at most the {capacity} of a row of block_tables"
            )


def check_pages(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    sliding_window: int | None = None,
) -> None:
    """Raise ``ValueError`` if a page that would be read is not in the cache.

    ``cache`` is ``[pages, page_size, ...]``.
    """
    pages, page_size = cache.shape[:2]
    new = query_start_loc.diff()
    capacity = block_tables.shape[1] * page_size
    page_start = torch.arange(0, capacity, page_size, device=new.device)
    read = (page_start < context_lens.unsqueeze(-1)) & (new > 0).unsqueeze(-1)
    if sliding_window is not None:
        first_seen = context_lens - new - sliding_window + 1
        read &= page_start + page_size > first_seen.unsqueeze(-1)
    outside = read & ((block_tables < 0) | (block_tables >= pages))
    if bool(outside.any()):
        sequence, entry = outside.nonzero()[0].tolist()
        raise ValueError(
            f"block_tables[{sequence}, {entry}] is page {int(block_tables[sequence, entry])}, and "
            f"the cache has {pages} pages"
        )


_paged_attention = operator(paged_attention_reference, paged_attention_triton, empty_like)
