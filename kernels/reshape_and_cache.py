"""Writing new keys and values into the paged KV cache."""

from __future__ import annotations

import torch

from vllm_module.kernels.quantize import greatest


def reshape_and_cache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store each token's key and value in its slot, in plain torch.

    Args:
        key, value: ``[tokens, kv_heads, head_size]``.
        k_cache, v_cache: ``[pages, page_size, kv_heads, head_size]``, written in place.
        slot_mapping: int64 ``[tokens]``, ``page * page_size + offset``; -1 stores nothing.
        k_scale, v_scale: float32 ``[1]``; a cache of eight bits holds keys and values divided by
            them, and 1 unless given.

    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    page_size = k_cache.shape[1]
    for cache, new, scale in ((k_cache, key, k_scale), (v_cache, value, v_scale)):
        tokens = new[kept]
        if cache.dtype.itemsize == 1:
            most = greatest(cache.dtype)
            tokens = (tokens.float() / (1 if scale is None else scale)).clamp_(-most, most)
            tokens = tokens if cache.dtype.is_floating_point else tokens.round_()
        cache[slots // page_size, slots % page_size] = tokens.to(cache.dtype)


# One public function an operation; the Triton kernel will take the CUDA device's calls.
reshape_and_cache = reshape_and_cache_reference
