"""Writing new keys and values into the paged KV cache."""

from __future__ import annotations

import torch


def reshape_and_cache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store each token's key and value in its slot, in plain torch.

    Args:
        key, value: ``[tokens, kv_heads, head_size]``.
        k_cache, v_cache: ``[pages, page_size, kv_heads, head_size]``, written in place.
        slot_mapping: int64 ``[tokens]``, ``page * page_size + offset``; -1 stores nothing.

    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    page_size = k_cache.shape[1]
    k_cache[slots // page_size, slots % page_size] = key[kept].to(k_cache.dtype)
    v_cache[slots // page_size, slots % page_size] = value[kept].to(v_cache.dtype)


# One public function an operation; the Triton kernel will take the CUDA device's calls.
reshape_and_cache = reshape_and_cache_reference
