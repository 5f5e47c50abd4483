"""Writing latents and their rotary keys into a paged cache."""

from __future__ import annotations

import torch

from vllm_module.kernels.attention.reshape_and_cache import (
    as_stored,
    check_slots,
    converted,
    place_of,
    reshape_and_cache_reference,
)
from vllm_module.kernels.dtypes import FLOATS, FP8, can_convert, greatest
from vllm_module.kernels.operators import (
    expect,
    expect_writable,
    next_power_of_2,
    nothing,
    operator,
    strides_of,
    tl,
    triton,
)

_TILE = 4096  # elements for each program


def concat_and_cache_mla(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    """Store each token's latent and rotary key, side by side, in its cache slot.

    An eight-bit cache, tokens that share a cache slot, and negative cache slots are handled as in
    :func:`~vllm_module.kernels.attention.reshape_and_cache.reshape_and_cache`.

    Args:
        latent: ``[tokens, kv_lora_rank]``, floating point.
        rope_key: ``[tokens, rope]``, of the same dtype.
        cache: ``[pages, page_size, kv_lora_rank + rope]``, floating point or FP8; written in place.
        slot_mapping: the cache slot of each token, int64 or int32 ``[tokens]``.
        scale: scale of an FP8 cache, float32 ``[1]``; by default 1.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; elements of the cache share
            memory; a cache slot is beyond the cache, if
            :func:`~vllm_module.kernels.operators.checks_values` is true. Otherwise such a token is
            not stored.

    """
    expect("latent", latent, (None, None), FLOATS)
    expect("rope_key", rope_key, (len(latent), None), (latent.dtype,), latent)
    size = latent.shape[1] + rope_key.shape[1]
    expect("cache", cache, (None, None, size), (*FLOATS, *FP8), latent)
    expect_writable("cache", cache)
    expect("slot_mapping", slot_mapping, (len(latent),), (torch.int64, torch.int32), latent)
    if scale is not None:
        expect("scale", scale, (1,), (torch.float32,), latent)
    check_slots(slot_mapping, *cache.shape[:2])
    _concat_and_cache_mla(latent, rope_key, cache, slot_mapping, scale)


def concat_and_cache_mla_reference(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    """Store in plain torch, as keys and values of one head; see :func:`concat_and_cache_mla`."""
    key, value = latent.unsqueeze(1), rope_key.unsqueeze(1)
    k_cache, v_cache = cache.unsqueeze(2).split([key.shape[2], value.shape[2]], -1)
    reshape_and_cache_reference(key, value, k_cache, v_cache, slot_mapping, scale, scale)


def concat_and_cache_mla_triton(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    """Store by a Triton kernel; see :func:`concat_and_cache_mla`."""
    if not can_convert(cache.dtype, cache):  # torch converts, and the kernel stores the bits
        latent, rope_key = (
            as_stored(each, cache.dtype, scale).view(torch.int8) for each in (latent, rope_key)
        )
        cache, scale = cache.view(torch.int8), None
    tokens, size = len(latent), cache.shape[2]
    if not (tokens and cache.numel()):
        return
    columns = next_power_of_2(size)
    rows = max(1, _TILE // columns)
    _store_latent[(-(-tokens // rows),)](
        (latent, rope_key, cache, slot_mapping, scale),
        tokens,
        cache.shape[0] * cache.shape[1],
        strides_of(latent, rope_key, cache),
        slot_mapping.stride(0),
        LATENT=latent.shape[1],
        SIZE=size,
        PAGE_SIZE=cache.shape[1],
        ROWS=rows,
        COLUMNS=columns,
        MAX=greatest(cache.dtype),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["tokens"])
def _store_latent(
    tensors,
    tokens,
    cache_slots,
    strides,
    slot_mapping_stride,
    LATENT: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAX: tl.constexpr,
):
    """Store the rows of some tokens."""
    latent_ptr, rope_ptr, cache_ptr, slot_mapping_ptr, scale_ptr = tensors
    latent_strides, rope_strides, cache_strides = strides
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)[None, :]
    token = row.to(tl.int64)
    stored, page, offset = place_of(
        slot_mapping_ptr, slot_mapping_stride, token, row < tokens, cache_slots, PAGE_SIZE
    )
    stored = stored[:, None]
    is_latent = column < LATENT

    latent_at = (token * latent_strides[0])[:, None] + column * latent_strides[1]
    latent = tl.load(latent_ptr + latent_at, mask=stored & is_latent)
    rope_at = (token * rope_strides[0])[:, None] + (column - LATENT) * rope_strides[1]
    rope = tl.load(rope_ptr + rope_at, mask=stored & ~is_latent & (column < SIZE))

    scale_at = tl.zeros((ROWS,), tl.int64)
    x = tl.where(is_latent, latent, rope)
    x = converted(x, scale_ptr, scale_at, MAX, cache_ptr.dtype.element_ty)
    cache_at = (page * cache_strides[0] + offset * cache_strides[1])[:, None]
    cache_at += column * cache_strides[2]
    tl.store(cache_ptr + cache_at, x, mask=stored & (column < SIZE))


_concat_and_cache_mla = operator(
    concat_and_cache_mla_reference, concat_and_cache_mla_triton, nothing, ("cache",)
)
