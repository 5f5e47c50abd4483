"""Writing new keys and values into the paged KV cache."""

from __future__ import annotations

import torch

from vllm_module.kernels.dtypes import EIGHT_BITS, FLOATS, can_convert, greatest
from vllm_module.kernels.operators import (
    checks_values,
    expect,
    expect_writable,
    next_power_of_2,
    nothing,
    operator,
    tl,
    triton,
)
from vllm_module.kernels.quantize import scaled_to

_TILE = 2048  # elements of keys, and as many of values, that a program stores


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store each token's key and value in its slot.

    A cache of eight bits holds them divided by a scale, in float32, rounded to even; what is beyond
    its greatest number becomes that. Of tokens that have one slot, any may be the one it keeps. The
    bits are the same on every device.

    Args:
        key, value: ``[tokens, kv_heads, head_size]``, floating point.
        k_cache, v_cache: ``[pages, page_size, kv_heads, head_size]``, floating point or, in eight
            bits, float8_e4m3fn, float8_e5m2 or int8; written in place. They may be views of one
            tensor.
        slot_mapping: int64 or int32 ``[tokens]``, ``page * page_size + offset``; what is negative
            stores nothing.
        k_scale, v_scale: float32 ``[1]`` or ``[kv_heads]``, of a cache of eight bits; 1 unless
            given.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other; elements of a cache that
            share memory; a slot beyond the cache, which stores nothing where values are not checked
            (:func:`~vllm_module.kernels.operators.checks_values`).

    """
    expect("key", key, (None, None, None), FLOATS)
    tokens, heads, head_size = key.shape
    expect("value", value, key.shape, FLOATS, key)
    expect("k_cache", k_cache, (None, None, heads, head_size), (*FLOATS, *EIGHT_BITS), key)
    expect("v_cache", v_cache, k_cache.shape, (k_cache.dtype,), key)
    expect_writable("k_cache", k_cache)
    expect_writable("v_cache", v_cache)
    expect("slot_mapping", slot_mapping, (tokens,), (torch.int64, torch.int32), key)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            count = 1 if scale.shape == (1,) else heads
            expect(name, scale, (count,), (torch.float32,), key)
    if tokens and checks_values(slot_mapping):
        pages, page_size = k_cache.shape[:2]
        greatest_slot = int(slot_mapping.max())
        if greatest_slot >= pages * page_size:
            raise ValueError(
                f"slot_mapping has slot {greatest_slot}, and the cache has {pages * page_size}: "
                f"{pages} pages of {page_size}"
            )
    _reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def reshape_and_cache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store in plain torch; see :func:`reshape_and_cache`."""
    pages, page_size = k_cache.shape[:2]
    slots = slot_mapping.long()
    least, most = map(int, slots.aminmax() if len(slots) else (0, 0))
    if least < 0 or most >= pages * page_size:
        kept = (slots >= 0) & (slots < pages * page_size)
        slots, key, value = slots[kept], key[kept], value[kept]
    places = slots // page_size, slots % page_size
    for cache, tokens, scale in ((k_cache, key, k_scale), (v_cache, value, v_scale)):
        if cache.dtype in EIGHT_BITS:
            limit = greatest(cache.dtype)
            tokens = tokens.float() / (1 if scale is None else scale[:, None])
            tokens = tokens.clamp_(-limit, limit)
            tokens = tokens if cache.dtype.is_floating_point else tokens.round_()
        cache.index_put_(places, tokens.to(cache.dtype))


def reshape_and_cache_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store by a Triton kernel; see :func:`reshape_and_cache`."""
    if not can_convert(k_cache.dtype, k_cache):
        reshape_and_cache_reference(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        return
    tokens, heads, head_size = key.shape
    pages, page_size = k_cache.shape[:2]
    if not (key.numel() and k_cache.numel()):
        return
    columns = next_power_of_2(head_size)
    rows = max(1, _TILE // columns)
    _store[(-(-tokens * heads // rows),)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale,
        v_scale,
        tokens * heads,
        pages * page_size,
        *key.stride(),
        *value.stride(),
        *k_cache.stride(),
        *v_cache.stride(),
        slot_mapping.stride(0),
        _stride(k_scale),
        _stride(v_scale),
        HEADS=heads,
        HEAD_SIZE=head_size,
        PAGE_SIZE=page_size,
        ROWS=rows,
        COLUMNS=columns,
        MOST=greatest(k_cache.dtype),
        num_warps=4,
    )


def _stride(scale: torch.Tensor | None) -> int:
    """Return what lies between the scales of two heads: nothing, where they have one."""
    return 0 if scale is None or len(scale) == 1 else scale.stride(0)


@triton.jit(do_not_specialize=["rows"])
def _store(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    k_scale_ptr,
    v_scale_ptr,
    rows,
    slots,
    key_token,
    key_head,
    key_column,
    value_token,
    value_head,
    value_column,
    k_cache_page,
    k_cache_offset,
    k_cache_head,
    k_cache_column,
    v_cache_page,
    v_cache_offset,
    v_cache_head,
    v_cache_column,
    slot_stride,
    k_scale_stride,
    v_scale_stride,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Store some rows, of one token and head each; sizes that divide are constants."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    slot = tl.load(slot_ptr + token * slot_stride, mask=row < rows, other=-1).to(tl.int64)
    kept = (slot >= 0) & (slot < slots)
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    inside = kept[:, None] & (column < HEAD_SIZE)[None, :]

    # Both are read before either is written, so that their reads overlap.
    places = (token * key_token + head * key_head)[:, None] + column[None, :] * key_column
    key = tl.load(key_ptr + places, mask=inside)
    places = (token * value_token + head * value_head)[:, None] + column[None, :] * value_column
    value = tl.load(value_ptr + places, mask=inside)

    key = _held(key, k_scale_ptr, head * k_scale_stride, MOST, k_cache_ptr.dtype.element_ty)
    value = _held(value, v_scale_ptr, head * v_scale_stride, MOST, v_cache_ptr.dtype.element_ty)

    rows_at = page * k_cache_page + offset * k_cache_offset + head * k_cache_head
    places = rows_at[:, None] + column[None, :] * k_cache_column
    tl.store(k_cache_ptr + places, key, mask=inside)
    rows_at = page * v_cache_page + offset * v_cache_offset + head * v_cache_head
    places = rows_at[:, None] + column[None, :] * v_cache_column
    tl.store(v_cache_ptr + places, value, mask=inside)


@triton.jit
def _held(x, scale_ptr, places, MOST: tl.constexpr, dtype: tl.constexpr):
    """Return rows as a cache of this type holds them."""
    if x.dtype == dtype:  # the bits of a NaN stay too
        return x
    x = x.to(tl.float32)
    if dtype.primitive_bitwidth != 8:
        return x.to(dtype)
    scale = tl.full(places.shape, 1.0, tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + places)
    return scaled_to(x, tl.broadcast_to(scale[:, None], x.shape), MOST, dtype)


_reshape_and_cache = operator(
    reshape_and_cache_reference, reshape_and_cache_triton, nothing, ("k_cache", "v_cache")
)
