"""Attention over a paged cache of latents (multi-head latent attention, arXiv:2405.04434).

The cache has one row for each token: a latent, from which keys and values of all heads could be
computed, and a key with rotary positions that all heads share. The matrices that would compute them
are absorbed into the query and the output. So a row is the key of every head, and its first
``kv_lora_rank`` features are the value.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.kernels.attention.mla_attention_decode import launch_decode
from vllm_module.kernels.attention.mla_attention_prefill import launch_prefill
from vllm_module.kernels.attention.mla_attention_tile import (
    LatentTensors,
    decode_candidates,
    prefill_candidates,
)
from vllm_module.kernels.attention.paged_attention import check_lengths, check_pages
from vllm_module.kernels.attention.paged_attention_reference import paged_attention_reference
from vllm_module.kernels.attention.paged_attention_tile import (
    LOG2_E,
    Arguments,
    case_of,
)
from vllm_module.kernels.choices import choose
from vllm_module.kernels.dtypes import FLOATS, FP8, can_convert, capability
from vllm_module.kernels.operators import checks_values, expect, next_power_of_2, operator

MAX_LATENT = 512
MAX_ROPE = 64


def mla_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    kv_lora_rank: int,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention from each sequence's new tokens to the latents of all its tokens.

    A token's result depends only on its own sequence, and not on the rest of the batch. In plain
    torch on a CPU that holds but for the last digits, which depend on how sequences are batched.

    Args:
        query: new tokens of all sequences end to end, ``[tokens, heads, kv_lora_rank + rope]``.
        cache: ``[pages, page_size, kv_lora_rank + rope]``; it holds the new tokens too.
        block_tables, context_lens, query_start_loc, max_query_len: as for
            :func:`~vllm_module.kernels.attention.paged_attention.paged_attention`.
        kv_lora_rank: number of features of a row that are its value, at most 512. The others, at
            most 64, are the rotary key.
        scale: factor of the scores.
        cache_scale: factor of an FP8 cache's values, float32 ``[1]``.

    Returns:
        ``[tokens, heads, kv_lora_rank]``; zeros for tokens of no sequence.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; lengths or pages are out of
            range, if :func:`~vllm_module.kernels.operators.checks_values` is true.

    """
    expect("query", query, (None, None, None), FLOATS)
    expect("cache", cache, (None, None, query.shape[-1]), (query.dtype, *FP8), query)
    if cache.dtype == torch.float8_e4m3fn and not can_convert(cache.dtype, query):
        raise ValueError(
            f"a cache of {cache.dtype} needs a GPU of compute capability 8.9: use float8_e5m2"
        )
    if cache.shape[1] < 1:
        raise ValueError("a page must hold at least one token: page_size is 0")
    rope = query.shape[-1] - kv_lora_rank
    if not (1 <= kv_lora_rank <= MAX_LATENT and 1 <= rope <= MAX_ROPE):
        raise ValueError(
            f"a row of the cache must have 1 to {MAX_LATENT} features of the latent and 1 to "
            f"{MAX_ROPE} of the rotary key, got {kv_lora_rank} and {rope}"
        )
    integers = (torch.int32,)
    expect("block_tables", block_tables, (None, None), integers, query)
    sequences = block_tables.shape[0]
    expect("context_lens", context_lens, (sequences,), integers, query)
    expect("query_start_loc", query_start_loc, (sequences + 1,), integers, query)
    if cache_scale is not None:
        expect("cache_scale", cache_scale, (1,), (torch.float32,), query)
    checked = checks_values(query)
    pages = cache, block_tables, context_lens, query_start_loc
    if checked:
        capacity = block_tables.shape[1] * cache.shape[1]
        check_lengths(context_lens, query_start_loc, len(query), max_query_len, capacity)
        if not query.is_cpu:  # on the CPU, torch raises IndexError for them
            check_pages(*pages)
    try:
        return _mla_attention(query, *pages, max_query_len, kv_lora_rank, scale, cache_scale)
    except IndexError:
        if checked:
            check_pages(*pages)
        raise


def mla_attention_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    kv_lora_rank: int,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention in plain torch, with whole rows as values; see :func:`mla_attention`."""
    rows = cache.unsqueeze(2)  # a single head of keys and values
    return paged_attention_reference(
        query,
        rows,
        rows,
        block_tables,
        context_lens,
        query_start_loc,
        max_query_len,
        scale,
        k_scale=cache_scale,
        v_scale=cache_scale,
    )[..., :kv_lora_rank].contiguous()


def mla_attention_triton(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    kv_lora_rank: int,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention by Triton kernels; see :func:`mla_attention`.

    A sequence of one new token always uses the decode kernel, and any other the prefill kernel, so
    that a token's result does not depend on the rest of the batch.
    """
    tokens, heads, size = query.shape
    output = query.new_empty(torch.Size((tokens, heads, kv_lora_rank)))
    if not output.numel():
        return output
    tensors = LatentTensors(
        query,
        cache,
        block_tables,
        # The kernels take no strides of context_lens and query_start_loc.
        context_lens.contiguous(),
        query_start_loc.contiguous(),
        cache_scale if cache.dtype.itemsize == 1 else None,
        output,
    )
    arguments = Arguments(
        tensors,
        tokens,
        len(context_lens),
        capacity=block_tables.shape[1] * cache.shape[1],
        factors=(scale * LOG2_E,),
        strides=(query.stride(), cache.stride(), *block_tables.stride(), output.stride()),
    )
    rope = size - kv_lora_rank
    constants = {
        "HEADS": heads,
        "LATENT": kv_lora_rank,
        "ROPE": rope,
        "BLOCK_L": max(16, next_power_of_2(kv_lora_rank)),
        "BLOCK_R": max(16, next_power_of_2(rope)),
        "PAGE_SIZE": cache.shape[1],
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }
    case = case_of(query, cache.unsqueeze(2))
    sizes = heads, kv_lora_rank, query.itemsize, cache.itemsize, capability(query) >= (9, 0)
    decoding = choose("mla_attention_decode", case, decode_candidates(*sizes), query.device)
    launch_decode(arguments, constants, decoding)
    if max_query_len > 1 and arguments.sequences:
        tiles = choose("mla_attention_prefill", case, prefill_candidates(*sizes), query.device)
        launch_prefill(arguments, constants, tiles)
    return output


def _empty(query: torch.Tensor, *others: Any, **__: object) -> torch.Tensor:
    """Return an empty output."""
    kv_lora_rank = others[5]
    return query.new_empty((*query.shape[:2], kv_lora_rank))


_mla_attention = operator(mla_attention_reference, mla_attention_triton, _empty)
