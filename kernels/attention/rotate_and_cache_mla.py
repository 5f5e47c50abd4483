"""Norm of latents and rotation, fused with writing latents and rotary keys to the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_module.kernels.attention.concat_and_cache_mla import (
    concat_and_cache_mla_reference,
    concat_and_cache_mla_triton,
)
from vllm_module.kernels.attention.reshape_and_cache import check_slots, converted, place_of
from vllm_module.kernels.attention.rotary_embedding import check_angles, rotary_embedding_reference
from vllm_module.kernels.attention.rotate_tile import rotate_rows
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
from vllm_module.kernels.rows.rms_norm import rms_norm_reference, weighted

_PER_PROGRAM = 2048  # features of queries, or of latents, for each program


def rotate_and_cache_mla(
    query: torch.Tensor,
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotated: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float | None = None,
    is_neox_style: bool = True,
) -> None:
    """Rotate queries and keys, and store each normalized latent and rotated key in its cache slot.

    The result is that of :func:`~vllm_module.kernels.rows.rms_norm.rms_norm` of latents,
    :func:`~vllm_module.kernels.attention.rotary_embedding.rotary_embedding` and
    :func:`~vllm_module.kernels.attention.concat_and_cache_mla.concat_and_cache_mla`, in one launch
    that rounds where they round. No derivatives are kept.

    Args:
        query: ``[tokens, heads, rope]``, floating point.
        latent: ``[tokens, kv_lora_rank]``, of the same dtype.
        rope_key: ``[tokens, rope]``, of the same dtype. ``query`` and ``rope_key`` may be
            overwritten with meaningless numbers.
        cos, sin, is_neox_style: as for ``rotary_embedding``.
        rotated: memory for the rotated queries, of the shape and dtype of ``query``; written.
        cache, slot_mapping, scale: as for ``concat_and_cache_mla``.
        weight, eps, weight_offset: arguments of the norm, as for ``rms_norm``; the weight has the
            dtype of ``latent``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; elements of a tensor share
            memory; a cache slot is beyond the cache, as for ``concat_and_cache_mla``.

    """
    expect("query", query, (None, None, None), FLOATS)
    (tokens, _, rope), same = query.shape, (query.dtype,)
    expect("latent", latent, (tokens, None), same, query)
    expect("rope_key", rope_key, (tokens, rope), same, query)
    expect("rotated", rotated, query.shape, same, query)
    for name, written in (("query", query), ("rope_key", rope_key), ("rotated", rotated)):
        expect_writable(name, written)
    cos, sin = check_angles(query, cos, sin)
    expect("cache", cache, (None, None, latent.shape[1] + rope), (*FLOATS, *FP8), query)
    expect_writable("cache", cache)
    expect("slot_mapping", slot_mapping, (tokens,), (torch.int64, torch.int32), query)
    if scale is not None:
        expect("scale", scale, (1,), (torch.float32,), query)
    expect("weight", weight, latent.shape[1:], same, query)
    check_slots(slot_mapping, *cache.shape[:2])
    _rotate_and_cache_mla(
        query, latent, rope_key, cos, sin, rotated, cache, slot_mapping, scale,
        weight, eps, weight_offset, is_neox_style,
    )  # fmt: skip


def rotate_and_cache_mla_reference(
    query: torch.Tensor,
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotated: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float | None,
    is_neox_style: bool,
) -> None:
    """Normalize, rotate and store in plain torch; see :func:`rotate_and_cache_mla`."""
    _in_torch(
        concat_and_cache_mla_reference, query, latent, rope_key, cos, sin, rotated, cache,
        slot_mapping, scale, weight, eps, weight_offset, is_neox_style,
    )  # fmt: skip


def _in_torch(store: Callable[..., None], *arguments: Any) -> None:
    """Normalize and rotate in plain torch; ``store`` stores latents and keys."""
    query, latent, rope_key, cos, sin, rotated, cache, slot_mapping, scale = arguments[:9]
    weight, eps, weight_offset, is_neox_style = arguments[9:]
    rotary_embedding_reference(query, rope_key.unsqueeze(1), cos, sin, is_neox_style)
    rotated.copy_(query)
    latent = rms_norm_reference(latent, weight, eps, weight_offset)
    store(latent, rope_key, cache, slot_mapping, scale)


def rotate_and_cache_mla_triton(*arguments: Any) -> None:
    """Normalize, rotate and store in one Triton kernel; see :func:`rotate_and_cache_mla`."""
    query, latent, rope_key, cos, sin, rotated, cache, slot_mapping = arguments[:8]
    weight, eps, weight_offset, is_neox_style = arguments[9:]
    if not can_convert(cache.dtype, cache):
        _in_torch(concat_and_cache_mla_triton, *arguments)
        return
    (tokens, heads, rope), pairs = query.shape, cos.shape[1]
    columns = next_power_of_2(latent.shape[1])
    query_rows = max(1, _PER_PROGRAM // next_power_of_2(rope))
    latent_rows = max(1, _PER_PROGRAM // columns)
    # Indices of the heads of all tokens are divided in 32 bits, which is far faster.
    assert tokens * max(heads, 1) + max(query_rows, latent_rows) < 2**31
    query_programs = -(-tokens * heads // query_rows)
    if not tokens:
        return
    _rotate_and_store_latent[(query_programs + -(-tokens // latent_rows),)](
        (*arguments[:9], weight.contiguous()),
        tokens,
        query_programs,
        cache.shape[0] * cache.shape[1],
        strides_of(query, latent, rope_key, rotated, cache),
        cos.stride(1),
        sin.stride(1),
        slot_mapping.stride(0),
        eps,
        COS_TOKEN=cos.stride(0),  # a constant, because it is often divisible by 8 and not by 16
        SIN_TOKEN=sin.stride(0),
        HEADS=heads,
        LATENT=latent.shape[1],
        ROPE=rope,
        PAIRS=pairs,
        PAGE_SIZE=cache.shape[1],
        QUERY_ROWS=query_rows,
        LATENT_ROWS=latent_rows,
        COLUMNS=columns,
        TILE=next_power_of_2(pairs),
        REST=next_power_of_2(rope - 2 * pairs) if rope > 2 * pairs else 0,
        OFFSET=weight_offset,
        NEOX=is_neox_style,
        MAX=greatest(cache.dtype),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["tokens", "query_programs"])
def _rotate_and_store_latent(
    tensors,
    tokens,
    query_programs,
    cache_slots,
    strides,
    cos_pair,
    sin_pair,
    slot_mapping_stride,
    eps,
    COS_TOKEN: tl.constexpr,
    SIN_TOKEN: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    LATENT_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    REST: tl.constexpr,
    OFFSET: tl.constexpr,
    NEOX: tl.constexpr,
    MAX: tl.constexpr,
):
    """Rotate some heads of the query, or store the latents and keys of some tokens."""
    query_ptr, latent_ptr, rope_ptr, cos_ptr, sin_ptr, rotated_ptr = tensors[:6]
    cache_ptr, slot_mapping_ptr, scale_ptr, weight_ptr = tensors[6:]
    query_strides, latent_strides, rope_strides, rotated_strides, cache_strides = strides
    program = tl.program_id(0)
    if program < query_programs:
        row = program * QUERY_ROWS + tl.arange(0, QUERY_ROWS)
        token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
        x_at = token * query_strides[0] + head * query_strides[1]
        y_at = token * rotated_strides[0] + head * rotated_strides[1]
        rotate_rows(
            query_ptr, x_at, query_strides[2], None,
            rotated_ptr, y_at, rotated_strides[2], None, head,
            cos_ptr, sin_ptr, token, cos_pair, sin_pair, token < tokens, eps,
            COS_TOKEN, SIN_TOKEN, ROPE, PAIRS, QUERY_ROWS, TILE, REST, OFFSET, NEOX, MAX,
        )  # fmt: skip
        return
    narrow: tl.constexpr = latent_ptr.dtype.element_ty
    row = (program - query_programs) * LATENT_ROWS + tl.arange(0, LATENT_ROWS)
    token = row.to(tl.int64)
    stored, page, offset = place_of(
        slot_mapping_ptr, slot_mapping_stride, token, row < tokens, cache_slots, PAGE_SIZE
    )
    cache_at = page * cache_strides[0] + offset * cache_strides[1]

    column = tl.arange(0, COLUMNS)[None, :]
    mask = stored[:, None] & (column < LATENT)
    latent_ptrs = latent_ptr + (token * latent_strides[0])[:, None] + column * latent_strides[1]
    latent = tl.load(latent_ptrs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < LATENT, other=0.0)
    inverse = tl.rsqrt(tl.sum(latent * latent, axis=1, keep_dims=True) / LATENT + eps)
    latent = weighted(latent, inverse, weight, narrow, OFFSET).to(narrow)
    scale_at = tl.zeros((LATENT_ROWS,), tl.int64)
    latent = converted(latent, scale_ptr, scale_at, MAX, cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + cache_at[:, None] + column * cache_strides[2], latent, mask=mask)
    rotate_rows(
        rope_ptr, token * rope_strides[0], rope_strides[1], None, cache_ptr,
        cache_at + LATENT * cache_strides[2], cache_strides[2], scale_ptr, scale_at,
        cos_ptr, sin_ptr, token, cos_pair, sin_pair, stored, eps,
        COS_TOKEN, SIN_TOKEN, ROPE, PAIRS, LATENT_ROWS, TILE, REST, OFFSET, NEOX, MAX,
    )  # fmt: skip


_rotate_and_cache_mla = operator(
    rotate_and_cache_mla_reference,
    rotate_and_cache_mla_triton,
    nothing,
    ("query", "rope_key", "rotated", "cache"),
)
