"""Norm and rotation of queries and keys, fused with writing keys and values to the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vllm_module.kernels.attention.attention_on_pages import rotate_on_pages, takes_rotation
from vllm_module.kernels.attention.paged_layout import PagedLayout, kinds
from vllm_module.kernels.attention.reshape_and_cache import (
    check_caches,
    converted,
    loaded_rows,
    place_of,
    reshape_and_cache_reference,
    reshape_and_cache_triton,
    scale_stride,
    store_in_torch,
    store_rows,
)
from vllm_module.kernels.attention.rotary_embedding import check_angles, rotary_embedding_reference
from vllm_module.kernels.attention.rotate_tile import rotate_rows
from vllm_module.kernels.dtypes import FLOATS, can_convert, greatest
from vllm_module.kernels.matmul.products import products_in_use
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
from vllm_module.kernels.rows.rms_norm import rms_norm_reference

_PER_PROGRAM = 2048  # features of queries for each program, or of keys with as many of values


def rotate_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    is_neox_style: bool = True,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float | None = None,
    *,
    layout: PagedLayout | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, and store each token's rotated key and its value in its cache slot.

    With weights, each head is normalized first. The result is that of
    :func:`~vllm_module.kernels.rows.rms_norm.rms_norm` of both,
    :func:`~vllm_module.kernels.attention.rotary_embedding.rotary_embedding` and
    :func:`~vllm_module.kernels.attention.reshape_and_cache.reshape_and_cache`, in one launch that
    rounds where they round. No derivatives are kept.

    Args:
        query: ``[tokens, heads, head_size]``, floating point; written.
        key: ``[tokens, kv_heads, head_size]``, of the same dtype. It may be overwritten with
            meaningless numbers. Query and key may be views of one tensor that share no element.
        value: ``[tokens, kv_heads, head_size]``, of the same dtype.
        cos, sin, is_neox_style: as for ``rotary_embedding``.
        k_cache, v_cache, slot_mapping, k_scale, v_scale, layout: as for ``reshape_and_cache``.
        q_weight, k_weight: weights of the norms, ``[head_size]``, of the dtype of ``query``; both
            or none.
        eps, weight_offset: as for ``rms_norm``.

    Returns:
        The rotated queries: ``query``, or on a CPU another tensor.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; elements of a tensor share
            memory; a cache slot is beyond the cache, as for ``reshape_and_cache``.

    """
    heads = query, key, value
    stored = k_cache, v_cache, slot_mapping, k_scale, v_scale
    fits = None if layout is None else kinds(*heads, cos, sin, *stored, q_weight, k_weight)
    if layout is None or fits not in layout.checked:
        _check(*heads, cos, sin, q_weight, k_weight)
        check_caches(key, *stored, layout)
    if cos.dim() == 3:
        cos, sin = cos[:, 0], sin[:, 0]
    arguments = *heads, cos, sin, *stored, is_neox_style, q_weight, k_weight, eps, weight_offset
    if layout is not None:
        layout.checked.add(fits)
        taken = cos, sin, *heads, k_cache, v_cache, q_weight, k_weight
        if products_in_use.get().pages and takes_rotation(*taken):
            rotate_on_pages(
                query, key, value, cos, sin, k_cache, v_cache, slot_mapping, is_neox_style,
                q_weight, k_weight, eps, weight_offset,
            )  # fmt: skip
            return query
        return _in_torch(partial(store_in_torch, inside=layout.slot_bounds[0] >= 0), *arguments)
    _rotate_and_cache(*arguments)
    return query


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
) -> None:
    expect("query", query, (None, None, None), FLOATS)
    tokens, _, head_size = query.shape
    expect("key", key, (tokens, None, head_size), (query.dtype,), query)
    expect("value", value, key.shape, (query.dtype,), query)
    expect_writable("query", query)
    expect_writable("key", key)
    check_angles(query, cos, sin)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("queries and keys must both be normalized, or none: a weight is missing")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            expect(name, weight, (head_size,), (query.dtype,), query)


def rotate_and_cache_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    is_neox_style: bool,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    weight_offset: float | None,
) -> None:
    """Normalize, rotate and store in plain torch; see :func:`rotate_and_cache`."""
    _in_place(
        reshape_and_cache_reference, query, key, value, cos, sin, k_cache, v_cache,
        slot_mapping, k_scale, v_scale, is_neox_style, q_weight, k_weight, eps, weight_offset,
    )  # fmt: skip


def _in_place(store: Callable[..., None], query: torch.Tensor, *arguments: Any) -> None:
    rotated = _in_torch(store, query, *arguments)
    if rotated is not query:
        query.copy_(rotated)


def _in_torch(store: Callable[..., None], *arguments: Any) -> torch.Tensor:
    """Return the rotated query; ``store`` stores keys and values."""
    query, key, value, cos, sin, k_cache, v_cache, slot_mapping, k_scale, v_scale = arguments[:10]
    is_neox_style, q_weight, k_weight, eps, weight_offset = arguments[10:]
    if q_weight is not None and k_weight is not None:
        query = rms_norm_reference(query, q_weight, eps, weight_offset)
        key = rms_norm_reference(key, k_weight, eps, weight_offset)
    rotary_embedding_reference(query, key, cos, sin, is_neox_style)
    store(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return query


def rotate_and_cache_triton(*arguments: Any) -> None:
    """Normalize, rotate and store in one Triton kernel; see :func:`rotate_and_cache`."""
    query, key, value, cos, sin, k_cache, v_cache, slot_mapping, k_scale, v_scale = arguments[:10]
    is_neox_style, q_weight, k_weight, eps, weight_offset = arguments[10:]
    if not can_convert(k_cache.dtype, k_cache):
        _in_place(reshape_and_cache_triton, *arguments)
        return
    tokens, heads, head_size = query.shape
    kv_heads, pairs = key.shape[1], cos.shape[1]
    pages, page_size = k_cache.shape[:2]
    columns = next_power_of_2(head_size)
    rows = max(1, _PER_PROGRAM // columns)
    # Indices of the heads of all tokens are divided in 32 bits, which is far faster.
    assert tokens * max(heads, kv_heads) + rows < 2**31
    query_programs = -(-tokens * heads // rows)
    key_programs = -(-tokens * kv_heads // rows)
    if not head_size or not query_programs + key_programs:
        return
    norms = (None if x is None else x.contiguous() for x in (q_weight, k_weight))
    _rotate_and_store[(query_programs + key_programs,)](
        (*arguments[:10], *norms),
        tokens,
        query_programs,
        pages * page_size,
        strides_of(query, key, value, k_cache, v_cache),
        cos.stride(1),
        sin.stride(1),
        slot_mapping.stride(0),
        scale_stride(k_scale),
        scale_stride(v_scale),
        eps,
        COS_TOKEN=cos.stride(0),  # a constant, because it is often divisible by 8 and not by 16
        SIN_TOKEN=sin.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        PAIRS=pairs,
        PAGE_SIZE=page_size,
        ROWS=rows,
        COLUMNS=columns,
        TILE=next_power_of_2(pairs),
        REST=next_power_of_2(head_size - 2 * pairs) if head_size > 2 * pairs else 0,
        OFFSET=weight_offset,
        NEOX=is_neox_style,
        MAX=greatest(k_cache.dtype),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["tokens", "query_programs"])
def _rotate_and_store(
    tensors,
    tokens,
    query_programs,
    cache_slots,
    strides,
    cos_pair,
    sin_pair,
    slot_mapping_stride,
    k_scale_stride,
    v_scale_stride,
    eps,
    COS_TOKEN: tl.constexpr,
    SIN_TOKEN: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    REST: tl.constexpr,
    OFFSET: tl.constexpr,
    NEOX: tl.constexpr,
    MAX: tl.constexpr,
):
    """Rotate some heads of the query in place, or store some heads of keys and values."""
    query_ptr, key_ptr, value_ptr, cos_ptr, sin_ptr, k_cache_ptr, v_cache_ptr = tensors[:7]
    slot_mapping_ptr, k_scale_ptr, v_scale_ptr, q_weight_ptr, k_weight_ptr = tensors[7:]
    query_strides, key_strides, value_strides, k_cache_strides, v_cache_strides = strides
    program = tl.program_id(0)
    if program < query_programs:
        row = program * ROWS + tl.arange(0, ROWS)
        token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
        at, column = token * query_strides[0] + head * query_strides[1], query_strides[2]
        rotate_rows(
            query_ptr, at, column, q_weight_ptr, query_ptr, at, column, None, head,
            cos_ptr, sin_ptr, token, cos_pair, sin_pair, token < tokens, eps,
            COS_TOKEN, SIN_TOKEN, HEAD_SIZE, PAIRS, ROWS, TILE, REST, OFFSET, NEOX, MAX,
        )  # fmt: skip
        return
    row = (program - query_programs) * ROWS + tl.arange(0, ROWS)
    token, head = (row // KV_HEADS).to(tl.int64), (row % KV_HEADS).to(tl.int64)
    stored, page, offset = place_of(
        slot_mapping_ptr, slot_mapping_stride, token, token < tokens, cache_slots, PAGE_SIZE
    )
    column = tl.arange(0, COLUMNS).to(tl.int64)
    mask = stored[:, None] & (column < HEAD_SIZE)[None, :]
    # Loaded before keys, so that the loads overlap.
    value = loaded_rows(value_ptr, value_strides, token, head, column, mask)
    key_at = page * k_cache_strides[0] + offset * k_cache_strides[1] + head * k_cache_strides[2]
    rotate_rows(
        key_ptr, token * key_strides[0] + head * key_strides[1], key_strides[2], k_weight_ptr,
        k_cache_ptr, key_at, k_cache_strides[3], k_scale_ptr, head * k_scale_stride,
        cos_ptr, sin_ptr, token, cos_pair, sin_pair, stored, eps,
        COS_TOKEN, SIN_TOKEN, HEAD_SIZE, PAIRS, ROWS, TILE, REST, OFFSET, NEOX, MAX,
    )  # fmt: skip
    value = converted(value, v_scale_ptr, head * v_scale_stride, MAX, v_cache_ptr.dtype.element_ty)
    store_rows(value, v_cache_ptr, v_cache_strides, page, offset, head, column, mask)


_rotate_and_cache = operator(
    rotate_and_cache_reference,
    rotate_and_cache_triton,
    nothing,
    ("query", "key", "k_cache", "v_cache"),
)
