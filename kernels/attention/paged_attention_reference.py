"""Paged attention in plain torch, and causal attention of one sequence without pages."""

from __future__ import annotations

import torch

from vllm_module.kernels.attention.attention_on_pages import attend_on_pages, takes_pages
from vllm_module.kernels.attention.fused_attention import SCORES_AT_ONCE, fused_attention, weigh
from vllm_module.kernels.attention.paged_layout import Alone, PagedLayout, Together
from vllm_module.kernels.matmul.products import products_in_use
from vllm_module.kernels.recording import as_one

_KEYS_AT_ONCE = 1 << 19  # elements of keys that fit into a CPU's cache


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
    """Compute attention in plain torch: single new tokens in batches, other sequences one by one.

    See :func:`~vllm_module.kernels.attention.paged_attention.paged_attention`.
    """
    scales_and_scores = k_scale, v_scale, softcap, alibi_slopes, sinks

    def work() -> torch.Tensor:
        layout = PagedLayout(block_tables, context_lens, query_start_loc)
        return attend(query, k_cache, v_cache, layout, scale, sliding_window, *scales_and_scores)

    output: torch.Tensor = as_one(work)
    return output


def attend(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: PagedLayout,
    scale: float,
    sliding_window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute :func:`paged_attention_reference` in a layout that layers may share."""
    plain = softcap is None and alibi_slopes is None and sinks is None
    outputs, output = [], None
    on_pages = products_in_use.get().pages and takes_pages(query, k_cache, v_cache)
    if on_pages and (singles := layout.single_tokens(k_cache, sliding_window)) is not None:
        scores = softcap, alibi_slopes, sinks
        output = attend_on_pages(query, k_cache, v_cache, singles, scale, sliding_window, *scores)
        if singles.every:
            return output
    parts = layout.parts(k_cache, query.dtype, _KEYS_AT_ONCE, sliding_window, several=on_pages)
    for part in parts:
        rows = part.rows
        whole = isinstance(rows, slice) and rows.start == 0 and rows.stop == len(query)
        new = query if len(parts) == 1 and whole else query[rows]
        keys = _read(k_cache, k_scale, part, query.dtype)
        # A cache of latents is both, and is read once.
        values = keys if v_cache is k_cache else _read(v_cache, v_scale, part, query.dtype)
        if isinstance(part, Together):
            result = _decode(new, keys, values, part, scale, softcap, alibi_slopes, sinks)
        else:
            # One token attends to all; heads that share keys are its rows.
            if plain and len(new) == 1:
                grouped = new.reshape(1, keys.shape[1], -1, new.shape[2])
                result = fused_attention(grouped, keys, values, None, scale).reshape(new.shape)
            else:
                result = causal_attention(
                    new.transpose(0, 1),
                    keys[0],
                    values[0],
                    scale,
                    sliding_window,
                    softcap,
                    alibi_slopes,
                    sinks,
                ).transpose(0, 1)
        if new is query:
            return result.contiguous()
        outputs.append(result)
    if output is None:
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    for part, result in zip(parts, outputs, strict=True):
        output[part.rows] = result
    return output


def _decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    part: Together,
    scale: float,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of one token of each sequence to its pages, ``[pages, page_size, ...]``."""
    kv_heads = keys.shape[2]
    sequences, heads, head_size = query.shape
    length = part.seen.shape[1]
    keys, values = (
        x.view(sequences, -1, kv_heads, head_size)[:, :length].transpose(1, 2)
        for x in (keys, values)
    )
    # [sequences, kv_heads, group, size]: heads that share keys and values are rows of one query.
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
    seen = part.seen[:, None, None]
    if softcap is None and alibi_slopes is None and sinks is None:
        # Torch takes no mask of one row for several.
        seen, bias = (x.expand(-1, 1, grouped.shape[2], -1) for x in (seen, part.bias))
        output = fused_attention(grouped, keys, values, seen, scale, bias=bias)
    else:
        slopes = None if alibi_slopes is None else alibi_slopes.view(1, kv_heads, -1, 1)
        output = _attend(grouped, keys, values, seen, part.distance, scale, softcap, slopes, sinks)
    return output.flatten(1, 2)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    distance: torch.Tensor,
    scale: float,
    softcap: float | None,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of ``query [sequences, kv_heads, group, size]`` to ``keys``, in float32.

    So it is computed for a sequence by itself, too.
    """
    dtype, query, keys, values = query.dtype, query.float(), keys.float(), values.float()
    bias = None if slopes is None else slopes * distance[:, None, None]
    sinks = None if sinks is None else sinks.view(1, query.shape[1], -1, 1)
    weights = _weights(query, keys, seen, scale, softcap, bias, sinks)
    output = weights @ values
    if not bool(output.sum().isfinite()):  # rare: NaN times a weight of zero is NaN
        output = weights @ values.masked_fill(~seen.transpose(2, 3), 0)
    return output.to(dtype)


def _read(
    cache: torch.Tensor, scale: torch.Tensor | None, part: Alone | Together, dtype: torch.dtype
) -> torch.Tensor:
    """Return the keys or values of a part as ``dtype``.

    Of one sequence they are ``[1, kv_heads, tokens, head_size]``, a view if possible; of several, a
    copy of their pages, ``[pages, page_size, kv_heads, head_size]``.
    """
    if isinstance(part, Together):
        return _dequantized(cache.index_select(0, part.pages), scale, dtype)
    _, page_size, kv_heads, head_size = cache.shape
    if part.pages is not None:
        read = cache.index_select(0, part.pages).flatten(0, 1)
        tokens = read[part.first : part.first + part.count].transpose(0, 1).unsqueeze(0)
    else:
        page, token, head, feature = cache.stride()
        if page == page_size * token:
            shape, strides = (1, kv_heads, part.count, head_size), (0, head, token, feature)
            tokens = cache.as_strided(shape, strides, cache.storage_offset() + part.first * token)
        else:
            first = part.first // page_size
            pages = cache[first : -(-(part.first + part.count) // page_size)].flatten(0, 1)
            tokens = pages.narrow(0, part.first % page_size, part.count).transpose(0, 1)[None]
    return (
        tokens
        if tokens.dtype == dtype
        else _dequantized(tokens.transpose(1, 2), scale, dtype).transpose(1, 2)
    )


def _dequantized(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return values ``x [..., kv_heads, head_size]`` of a cache as ``dtype``, times their scale."""
    if x.dtype.itemsize > 1:
        return x.to(dtype)
    return (x.float() * (1 if scale is None else scale.unsqueeze(-1))).to(dtype)


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
    """Compute causal attention of one sequence's last tokens to all of its tokens, without pages.

    Args:
        query: ``[heads, new_tokens, head_size]``.
        keys, values: ``[kv_heads, tokens, head_size]``; ``heads`` is a multiple of ``kv_heads``.
        scale, sliding_window, softcap, alibi_slopes, sinks: as for
            :func:`~vllm_module.kernels.attention.paged_attention.paged_attention`.

    Returns:
        ``[heads, new_tokens, head_size]``.

    """
    new, total = query.shape[1], keys.shape[1]
    group = query.shape[0] // keys.shape[0]
    plain = softcap is None and alibi_slopes is None and sinks is None
    compiling = torch.compiler.is_compiling()
    # A graph cannot branch, as the fused function does on the CPU for NaN.
    plain &= not (compiling and query.is_cpu)
    if sliding_window is not None and sliding_window >= total:
        sliding_window = None
    if plain and new == 1 and sliding_window is None:  # the token attends to all tokens
        grouped = query.reshape(1, -1, group, query.shape[-1])
        keys, values = keys.unsqueeze(0), values.unsqueeze(0)
        output = fused_attention(grouped, keys, values, None, scale)
        return output.reshape(query.shape)
    rows = torch.arange(total - new, total, device=query.device).unsqueeze(-1)
    columns = torch.arange(total, device=query.device)
    seen = columns <= rows
    if sliding_window is not None:
        seen &= columns > rows - sliding_window
    if plain:
        # [kv_heads, group, tokens, size]: torch's fused kernels need four dimensions, and expanding
        # copies no keys or values.
        grouped = query.unflatten(0, (-1, group))
        keys, values = (x.unsqueeze(1).expand(-1, group, -1, -1) for x in (keys, values))
        whole = new == total and sliding_window is None
        return fused_attention(grouped, keys, values, seen, scale, is_causal=whole).flatten(0, 1)
    keys, values = (x.float().repeat_interleave(group, dim=0) for x in (keys, values))
    how = scale, softcap, alibi_slopes, sinks
    if compiling:  # all rows at once: a graph for parts would be of one length only
        output = _weighed_rows(query.float(), keys, values, seen, columns - rows, *how)
        return output.to(query.dtype)
    step = max(1, SCORES_AT_ONCE // max(1, query.shape[0] * total))
    parts = zip(
        torch.split(query, step, 1), *(torch.split(x, step) for x in (seen, rows)), strict=True
    )
    outputs = [
        _weighed_rows(part.float(), keys, values, seen_of, columns - rows_of, *how)
        for part, seen_of, rows_of in parts
    ]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).to(query.dtype)


def _weighed_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    distance: torch.Tensor,
    scale: float,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of ``query [heads, rows, size]`` by matrix products; all are float32.

    Keys and values are ``[heads, tokens, size]``, ``seen`` and ``distance`` ``[rows, tokens]``.
    """
    bias = None if alibi_slopes is None else alibi_slopes[:, None, None] * distance
    sinks = None if sinks is None else sinks[:, None, None]
    weights = _weights(query, keys, seen, scale, softcap, bias, sinks)
    output = weights @ values
    if not torch.compiler.is_compiling() and not bool(output.sum().isfinite()):
        output = torch.where(output.isfinite(), output, weigh(weights, values, seen))
    return output


def _weights(
    query: torch.Tensor,
    keys: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the weights ``[..., rows, tokens]`` of values, for ``query [..., rows, size]``.

    Keys are ``[..., tokens, size]``; both are float32. ``seen`` and ``bias`` broadcast to the
    weights, and ``sinks`` to ``[..., rows, 1]``.
    """
    scores = query @ keys.transpose(-2, -1) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores += bias
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.float().expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    return scores.softmax(-1)[..., : keys.shape[-2]]
