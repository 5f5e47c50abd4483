"""Attention of new tokens to a paged KV cache."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def paged_attention_reference(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally, sequence by sequence, in plain torch.

    Args:
        query: new tokens of all sequences end to end, ``[tokens, heads, head_size]``.
        k_cache, v_cache: ``[pages, page_size, kv_heads, head_size]``; they hold the new tokens too.
        block_tables: pages of each sequence in order, ``[sequences, most_pages]``; entries past
            the context are never read.
        context_lens: tokens of each sequence, the new ones included, ``[sequences]``.
        query_start_loc: where each sequence's new tokens begin and end, ``[sequences + 1]``.
        scale: of the scores.
        sliding_window: how many of the last tokens, itself included, a token sees.
        k_scale, v_scale: float32 ``[1]``; what a cache of eight bits holds is multiplied by them.

    Returns:
        ``[tokens, heads, head_size]``; zeros for tokens of no sequence.

    """
    page_size = k_cache.shape[1]
    output = torch.zeros_like(query)
    starts = query_start_loc.tolist()
    for sequence, context in enumerate(context_lens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end or context == 0:
            continue
        pages = block_tables[sequence, : -(-context // page_size)].long()
        keys, values = (
            _dequantized(cache[pages].flatten(0, 1)[:context], factor, query.dtype).transpose(0, 1)
            for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
        )
        output[begin:end] = causal_attention(
            query[begin:end].transpose(0, 1), keys, values, scale, sliding_window
        ).transpose(0, 1)
    return output


def _dequantized(
    held: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if held.dtype.itemsize > 1:
        return held
    return (held.float() * (1 if scale is None else scale)).to(dtype)


def causal_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attend from one sequence's last tokens to all of it.

    Args:
        query: ``[heads, new_tokens, head_size]``.
        keys, values: ``[kv_heads, tokens, head_size]``; ``heads`` is a multiple of ``kv_heads``.

    Returns:
        ``[heads, new_tokens, head_size]``.

    """
    new, total = query.shape[1], keys.shape[1]
    rows = torch.arange(total - new, total, device=query.device).unsqueeze(-1)
    columns = torch.arange(total, device=query.device)
    seen = columns <= rows
    if sliding_window is not None:
        seen &= columns > rows - sliding_window
    group = query.shape[0] // keys.shape[0]
    return F.scaled_dot_product_attention(
        query,
        keys.repeat_interleave(group, dim=0),
        values.repeat_interleave(group, dim=0),
        attn_mask=seen,
        scale=scale,
    )


# One public function an operation; the Triton kernel will take the CUDA device's calls.
paged_attention = paged_attention_reference
