"""Paged attention in Triton: a decode launch for single new tokens, a prefill launch for others."""

from __future__ import annotations

import torch

from vllm_module.kernels.attention.paged_attention_decode import launch_decode
from vllm_module.kernels.attention.paged_attention_prefill import launch_prefill
from vllm_module.kernels.attention.paged_attention_tile import (
    LOG2_E,
    Arguments,
    Tensors,
)
from vllm_module.kernels.attention.reshape_and_cache import scale_stride
from vllm_module.kernels.operators import next_power_of_2


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
    """Compute attention in Triton; see :mod:`~vllm_module.kernels.attention.paged_attention`.

    A sequence of one new token always uses the decode kernel, and any other the prefill kernel, so
    that a token's result does not depend on the rest of the batch.
    """
    _, heads, head_size = query.shape
    output = query.new_empty(query.shape)
    if not output.numel():
        return output
    # The kernels take no strides of these four.
    context_lens, query_start_loc = context_lens.contiguous(), query_start_loc.contiguous()
    alibi_slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    page_size, kv_heads = k_cache.shape[1:3]
    scales = (k_scale, v_scale) if k_cache.dtype.itemsize == 1 else (None, None)
    tensors = Tensors(
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
    )
    arguments = Arguments(
        tensors,
        len(query),
        len(context_lens),
        capacity=block_tables.shape[1] * page_size,
        factors=(scale * LOG2_E, 1.0) if softcap is None else (scale / softcap, softcap * LOG2_E),
        strides=(
            query.stride(),
            k_cache.stride(),
            v_cache.stride(),
            *block_tables.stride(),
            output.stride(),
            scale_stride(tensors.k_scale),
            scale_stride(tensors.v_scale),
        ),
    )
    constants = {
        "GROUP": heads // kv_heads,
        "HEAD_SIZE": head_size,
        "BLOCK_D": max(16, next_power_of_2(head_size)),
        "PAGE_SIZE": page_size,
        "SAME_STRIDES": k_cache.stride() == v_cache.stride(),
        "WINDOW": min(sliding_window or 0, 2**31 - 1),
        "SOFTCAP": softcap is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }
    launch_decode(arguments, constants)
    if max_query_len > 1 and arguments.sequences:
        launch_prefill(arguments, constants)
    return output
