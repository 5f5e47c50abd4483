"""Attention of whole prompts, of which nothing is cached before: from pages, or by torch.

A step of whole prompts has all keys and values in memory, so the cache need not be read. Torch's
own attention is then a candidate, which runs if it was measured to be faster.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch

from vllm_module.kernels.attention.paged_attention_reference import causal_attention
from vllm_module.kernels.attention.paged_attention_tile import case_of
from vllm_module.kernels.choices import choose
from vllm_module.kernels.dtypes import capability
from vllm_module.kernels.operators import operator

__all__ = ["Way", "fresh_attention", "way_of_fresh_prompts"]

Way = Literal["pages", "cudnn", "flash"]

KERNEL = "paged_attention_fresh"  # name of the kernel in choices.json
_CANDIDATES: dict[str, Way] = {"pages": "pages", "cudnn": "cudnn", "torch": "flash"}


def way_of_fresh_prompts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> Way:
    """Return the way chosen for attention of whole prompts: pages, or :func:`fresh_attention`.

    The latter is a candidate only if it gives the result of reading pages: torch's kernels lack the
    last three options, and a cache of another dtype rounds. On a GPU, they need 16-bit numbers and
    a head size that is a multiple of 8, up to 256. The arguments are those of
    :class:`~vllm_module.layers.Attention`.
    """
    if softcap is not None or alibi_slopes is not None or sinks is not None:
        return "pages"
    if not query.dtype == key.dtype == value.dtype == k_cache.dtype:
        return "pages"
    size = query.shape[-1]
    if query.is_cuda and (
        query.itemsize != 2 or size % 8 or size > 256 or capability(query) < (8, 0)
    ):
        return "pages"
    case = case_of(query, k_cache) if query.is_cuda else ""  # nothing is measured for a CPU
    return choose(KERNEL, case, _CANDIDATES, query.device)


def fresh_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    by_cudnn: bool = False,
) -> torch.Tensor:
    """Compute causal attention within sequences that lie end to end, by torch's fused kernels.

    A token's result depends only on its own sequence, as in
    :func:`~vllm_module.kernels.attention.paged_attention.paged_attention`, but its bits differ.

    Args:
        query: ``[tokens, heads, head_size]``; every token belongs to a sequence.
        key, value: ``[tokens, kv_heads, head_size]``; ``heads`` is a multiple of ``kv_heads``.
        query_start_loc: begin and end of each sequence, int32 ``[sequences + 1]``.
        max_query_len: largest number of tokens of a sequence.
        scale: factor of the scores.
        sliding_window: number of last tokens, itself included, that a token attends to.
        by_cudnn: True for cuDNN, which has no windows, instead of FlashAttention on a GPU.

    Returns:
        ``[tokens, heads, head_size]``.

    """
    return _fresh_attention(
        query, key, value, query_start_loc, max_query_len, scale, sliding_window, by_cudnn
    )


def fresh_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int | None,
    by_cudnn: bool,
) -> torch.Tensor:
    """Compute attention by a call for each sequence; see :func:`fresh_attention`."""
    outputs = [query.new_empty(0, *query.shape[1:])]
    for begin, end in pairwise(query_start_loc.tolist()):
        if begin < end:
            q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
            outputs.append(causal_attention(q, k, v, scale, sliding_window).transpose(0, 1))
    return torch.cat(outputs)


def fresh_attention_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int | None,
    by_cudnn: bool,
) -> torch.Tensor:
    """Compute attention by one call for all sequences; see :func:`fresh_attention`.

    This function is called by ``torch.nn.attention.varlen``, whose arguments differ between
    versions.
    """
    left = -1 if sliding_window is None or sliding_window >= max_query_len else sliding_window - 1
    starts = query_start_loc.contiguous()
    qkv = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)]
    output: torch.Tensor
    if by_cudnn and left < 0:
        output = torch.ops.aten._cudnn_attention_forward(
            *qkv, None, starts, starts, max_query_len, max_query_len, False, 0.0, True, scale=scale
        )[0]
        return output
    output = torch.ops.aten._flash_attention_forward(
        *qkv,
        starts,
        starts,
        max_query_len,
        max_query_len,
        0.0,
        left < 0,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=0,
    )[0]
    return output


def _empty(query: torch.Tensor, *_: object) -> torch.Tensor:
    """Return an empty output."""
    return query.new_empty(query.shape)


_fresh_attention = operator(fresh_attention_reference, fresh_attention_flash, _empty)
