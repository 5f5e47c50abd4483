"""Writing new keys and values into the paged KV cache."""

from __future__ import annotations

import torch

from vllm_module.kernels.attention.paged_layout import PagedLayout, kinds
from vllm_module.kernels.dtypes import EIGHT_BITS, FLOATS, can_convert, greatest
from vllm_module.kernels.operators import (
    checks_values,
    expect,
    expect_writable,
    next_power_of_2,
    nothing,
    operator,
    strides_of,
    tl,
    triton,
)
from vllm_module.kernels.recording import recording_in_use
from vllm_module.kernels.rows.quantize import scaled_to

_TILE = 2048  # elements of keys for each program, with as many of values


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    layout: PagedLayout | None = None,
) -> None:
    """Store each token's key and value in its cache slot.

    For an eight-bit cache they are divided by a scale in float32 and rounded to even; numbers out
    of range saturate. If tokens share a cache slot, one of them is stored. The bits are the same on
    every device.

    Args:
        key, value: ``[tokens, kv_heads, head_size]``, floating point.
        k_cache, v_cache: ``[pages, page_size, kv_heads, head_size]``, floating point, or
            float8_e4m3fn, float8_e5m2 or int8; written in place. They may be views of one tensor.
        slot_mapping: cache slot of each token, int64 or int32 ``[tokens]``: ``page * page_size +
            offset``. A token with a negative slot is not stored.
        k_scale, v_scale: scales of an eight-bit cache, float32 ``[1]`` or ``[kv_heads]``; by
            default 1.
        layout: layout with this ``slot_mapping``, if it is on a CPU and several calls share it. No
            derivatives are kept.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; elements of a cache share
            memory; a cache slot is beyond the cache, if
            :func:`~vllm_module.kernels.operators.checks_values` is true. Otherwise such a token is
            not stored.

    """
    tensors = key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale
    fits = None if layout is None else kinds(*tensors)
    if layout is None or fits not in layout.checked:
        expect("key", key, (None, None, None), FLOATS)
        expect("value", value, key.shape, FLOATS, key)
        check_caches(key, k_cache, v_cache, slot_mapping, k_scale, v_scale, layout)
    if layout is None:
        _reshape_and_cache(*tensors)
    else:
        layout.checked.add(fits)
        store_in_torch(*tensors, layout.slot_bounds[0] >= 0)


def check_caches(
    key: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    layout: PagedLayout | None,
) -> None:
    """Raise ``ValueError`` unless the keys, and values like them, can be stored."""
    tokens, heads, head_size = key.shape
    expect("k_cache", k_cache, (None, None, heads, head_size), (*FLOATS, *EIGHT_BITS), key)
    expect("v_cache", v_cache, k_cache.shape, (k_cache.dtype,), key)
    expect_writable("k_cache", k_cache)
    expect_writable("v_cache", v_cache)
    expect("slot_mapping", slot_mapping, (tokens,), (torch.int64, torch.int32), key)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            count = 1 if scale.shape == (1,) else heads
            expect(name, scale, (count,), (torch.float32,), key)
    check_slots(slot_mapping, k_cache.shape[0], k_cache.shape[1], layout)


def check_slots(
    slot_mapping: torch.Tensor, pages: int, page_size: int, layout: PagedLayout | None = None
) -> None:
    """Raise ``ValueError`` for a cache slot beyond the cache, if values are checked."""
    if len(slot_mapping) and (layout is not None or checks_values(slot_mapping)):
        largest = int(slot_mapping.max()) if layout is None else layout.slot_bounds[1]
        if largest >= pages * page_size:
            raise ValueError(
                f"slot_mapping has cache slot {largest}, and the cache has {pages * page_size}: "
                f"{pages} pages of {page_size}"
            )


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
    inside = holds_slots(k_cache, slot_mapping)
    store_in_torch(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, inside)


def holds_slots(cache: torch.Tensor, slot_mapping: torch.Tensor) -> bool:
    """Return whether the cache has every slot of ``slot_mapping``, as of each recorded step."""
    if recording_in_use.get() is not None:
        return True
    least, most = map(int, slot_mapping.aminmax() if len(slot_mapping) else (0, 0))
    return least >= 0 and most < cache.shape[0] * cache.shape[1]


def store_in_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    inside: bool,
) -> None:
    """Store in plain torch; ``inside`` is True if the cache has all slots of ``slot_mapping``."""
    pages, page_size = k_cache.shape[:2]
    slots = slot_mapping if slot_mapping.dtype == torch.int64 else slot_mapping.long()
    if not inside:
        kept = (slots >= 0) & (slots < pages * page_size)
        slots, key, value = slots[kept], key[kept], value[kept]
    for cache, tokens, scale in ((k_cache, key, k_scale), (v_cache, value, v_scale)):
        if tokens.dtype != cache.dtype:
            tokens = as_stored(tokens, cache.dtype, scale)
        # index_copy_ does not support FP8.
        if cache.is_contiguous() and cache.dtype not in EIGHT_BITS:
            cache.view(pages * page_size, *cache.shape[2:]).index_copy_(0, slots, tokens)
        else:
            cache.index_put_((slots // page_size, slots % page_size), tokens)


def as_stored(tokens: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Return keys or values ``[tokens, heads, head_size]`` in the dtype of their cache."""
    if dtype in EIGHT_BITS:
        limit = greatest(dtype)
        tokens = tokens.float() / (1 if scale is None else scale[:, None])
        tokens = tokens.clamp_(-limit, limit)
        tokens = tokens if dtype.is_floating_point else tokens.round_()
    return tokens.to(dtype)


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
    if not can_convert(k_cache.dtype, k_cache):  # torch converts, and the kernel stores the bits
        key = as_stored(key, k_cache.dtype, k_scale).view(torch.int8)
        value = as_stored(value, v_cache.dtype, v_scale).view(torch.int8)
        k_cache, v_cache = k_cache.view(torch.int8), v_cache.view(torch.int8)
        k_scale = v_scale = None
    tokens, heads, head_size = key.shape
    pages, page_size = k_cache.shape[:2]
    if not (key.numel() and k_cache.numel()):
        return
    columns = next_power_of_2(head_size)
    rows = max(1, _TILE // columns)
    _store[(-(-tokens * heads // rows),)](
        (key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale),
        tokens * heads,
        pages * page_size,
        strides_of(key, value, k_cache, v_cache),
        slot_mapping.stride(0),
        scale_stride(k_scale),
        scale_stride(v_scale),
        HEADS=heads,
        HEAD_SIZE=head_size,
        PAGE_SIZE=page_size,
        ROWS=rows,
        COLUMNS=columns,
        MAX=greatest(k_cache.dtype),
        num_warps=4,
    )


def scale_stride(scale: torch.Tensor | None) -> int:
    """Return the stride between the scales of two heads; 0 if they share one."""
    return 0 if scale is None or len(scale) == 1 else scale.stride(0)


@triton.jit(do_not_specialize=["rows"])
def _store(
    tensors,
    rows,
    cache_slots,
    strides,
    slot_mapping_stride,
    k_scale_stride,
    v_scale_stride,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAX: tl.constexpr,
):
    """Store some rows, one for each token and head; divisors are compile-time constants."""
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr = tensors[:4]
    slot_mapping_ptr, k_scale_ptr, v_scale_ptr = tensors[4:]
    key_strides, value_strides, k_cache_strides, v_cache_strides = strides
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    stored, page, offset = place_of(
        slot_mapping_ptr, slot_mapping_stride, token, row < rows, cache_slots, PAGE_SIZE
    )
    mask = stored[:, None] & (column < HEAD_SIZE)[None, :]
    # Both are loaded before either is stored, so that the loads overlap.
    key = loaded_rows(key_ptr, key_strides, token, head, column, mask)
    value = loaded_rows(value_ptr, value_strides, token, head, column, mask)
    key = converted(key, k_scale_ptr, head * k_scale_stride, MAX, k_cache_ptr.dtype.element_ty)
    value = converted(value, v_scale_ptr, head * v_scale_stride, MAX, v_cache_ptr.dtype.element_ty)
    store_rows(key, k_cache_ptr, k_cache_strides, page, offset, head, column, mask)
    store_rows(value, v_cache_ptr, v_cache_strides, page, offset, head, column, mask)


@triton.jit
def place_of(slots_ptr, stride, token, exists, cache_slots, PAGE_SIZE: tl.constexpr):
    """Return whether tokens are stored, and the page and the offset in it of their cache slots."""
    slot = tl.load(slots_ptr + token * stride, mask=exists, other=-1).to(tl.int64)
    return (slot >= 0) & (slot < cache_slots), slot // PAGE_SIZE, slot % PAGE_SIZE


@triton.jit
def loaded_rows(ptr, strides, token, head, column, mask):
    """Return rows of a tensor ``[tokens, heads, columns]``."""
    at = (token * strides[0] + head * strides[1])[:, None] + column[None, :] * strides[2]
    return tl.load(ptr + at, mask=mask)


@triton.jit
def store_rows(x, cache_ptr, strides, page, offset, head, column, mask):
    """Store rows in a cache ``[pages, page_size, heads, columns]``."""
    at = page * strides[0] + offset * strides[1] + head * strides[2]
    tl.store(cache_ptr + at[:, None] + column[None, :] * strides[3], x, mask=mask)


@triton.jit
def converted(x, scale_ptr, scale_at, MAX: tl.constexpr, dtype: tl.constexpr):
    """Return rows in the cache's dtype, divided by their scales if it has eight bits."""
    if x.dtype == dtype:  # keeps the bits of NaN too
        return x
    x = x.to(tl.float32)
    if dtype.primitive_bitwidth != 8:
        return x.to(dtype)
    scale = tl.full(scale_at.shape, 1.0, tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + scale_at)
    return scaled_to(x, tl.broadcast_to(scale[:, None], x.shape), MAX, dtype)


_reshape_and_cache = operator(
    reshape_and_cache_reference, reshape_and_cache_triton, nothing, ("k_cache", "v_cache")
)
