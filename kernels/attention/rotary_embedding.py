"""Rotary position embedding (arXiv:2104.09864)."""

from __future__ import annotations

import torch

from vllm_module.kernels.dtypes import WIDE_FLOATS
from vllm_module.kernels.operators import (
    expect,
    expect_writable,
    next_power_of_2,
    nothing,
    operator,
    tl,
    triton,
)

_PER_PROGRAM = 2048  # pairs rotated by a program, 16 for each thread


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_neox_style: bool = True,
) -> None:
    """Rotate pairs of each head's first features by the angles of its token, in place.

    Angles are applied in float32 and the result is rounded once. Features beyond the first ``2 *
    pairs`` are kept.

    Args:
        query: ``[tokens, heads, head_size]``, floating point; written.
        key: ``[tokens, kv_heads, head_size]``, written. Query and key may be views of one tensor
            that share no element.
        cos, sin: float32 ``[tokens, pairs]`` or ``[tokens, 1, pairs]``.
        is_neox_style: True if a pair is one feature of each half (GPT-NeoX, Llama), False if it is
            two neighbours (GPT-J).

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; elements of one tensor share
            memory.

    """
    expect("query", query, (None, None, None), WIDE_FLOATS)
    tokens, _, head_size = query.shape
    expect("key", key, (tokens, None, head_size), (query.dtype,), query)
    expect_writable("query", query)
    expect_writable("key", key)
    cos, sin = check_angles(query, cos, sin)
    _rotary_embedding(query, key, cos, sin, is_neox_style)


def check_angles(
    query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return angles as ``[tokens, pairs]``; raise ``ValueError`` unless they fit the query."""
    tokens, _, head_size = query.shape
    one_head = cos.dim() == 3 and cos.shape[1] == 1
    expect("cos", cos, (tokens, 1, None) if one_head else (tokens, None), (torch.float32,), query)
    expect("sin", sin, cos.shape, (torch.float32,), query)
    if 2 * cos.shape[-1] > head_size:
        raise ValueError(f"cos rotates {2 * cos.shape[-1]} features, and heads have {head_size}")
    if one_head:
        cos, sin = cos[:, 0], sin[:, 0]
    return cos, sin


def rotary_embedding_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_neox_style: bool,
) -> None:
    """Rotate in plain torch; see :func:`rotary_embedding`."""
    pairs, cos, sin = cos.shape[1], cos.unsqueeze(1), sin.unsqueeze(1)
    if is_neox_style and query.dtype == torch.float32:  # nothing is rounded, so rotate in place
        cos, sin = cos.unsqueeze(1), torch.stack((-sin, sin), 2)
        for x in (query, key):
            whole = x if x.shape[-1] == 2 * pairs else x[..., : 2 * pairs]
            halves = whole.view(*x.shape[:-1], 2, pairs)
            swapped = halves.flip(-2)
            halves.mul_(cos).addcmul_(swapped, sin)
        return
    for x in (query, key):
        if is_neox_style:
            first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
        else:
            first, second = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        a, b = first.float(), second.float()
        rotated = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
        first.copy_(rotated[0])
        second.copy_(rotated[1])


def rotary_embedding_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_neox_style: bool,
) -> None:
    """Rotate query and key in one Triton kernel; see :func:`rotary_embedding`."""
    pairs = cos.shape[1]
    if not pairs:
        return
    tile = next_power_of_2(pairs)
    tile_heads = max(1, _PER_PROGRAM // tile)
    tokens, heads, _ = query.shape
    kv_heads = key.shape[1]
    # Indices of the heads of all tokens are divided in 32 bits, which is far faster.
    assert tokens * max(heads, kv_heads) + tile_heads < 2**31
    query_programs = -(-tokens * heads // tile_heads)
    key_programs = -(-tokens * kv_heads // tile_heads)
    if not query_programs + key_programs:
        return
    _rotate_both[(query_programs + key_programs,)](
        query,
        key,
        cos,
        sin,
        tokens,
        heads,
        kv_heads,
        query_programs,
        query.stride(),
        key.stride(),
        cos.stride(1),
        sin.stride(1),
        PAIRS=pairs,
        COS_TOKEN=cos.stride(0),  # a constant, because it is often divisible by 8 and not by 16
        SIN_TOKEN=sin.stride(0),
        HEADS=tile_heads,
        TILE=tile,
        NEOX=is_neox_style,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["tokens", "query_programs"])
def _rotate_both(
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    heads,
    kv_heads,
    query_programs,
    query_strides,
    key_strides,
    cos_pair,
    sin_pair,
    PAIRS: tl.constexpr,
    COS_TOKEN: tl.constexpr,
    SIN_TOKEN: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    NEOX: tl.constexpr,
):
    """Rotate some heads of the query or of the key, from any tokens."""
    program = tl.program_id(0)
    if program < query_programs:
        _rotate(
            query_ptr, cos_ptr, sin_ptr, program, tokens, heads,
            query_strides, cos_pair, sin_pair,
            PAIRS, COS_TOKEN, SIN_TOKEN, HEADS, TILE, NEOX,
        )  # fmt: skip
    else:
        _rotate(
            key_ptr, cos_ptr, sin_ptr, program - query_programs, tokens, kv_heads,
            key_strides, cos_pair, sin_pair,
            PAIRS, COS_TOKEN, SIN_TOKEN, HEADS, TILE, NEOX,
        )  # fmt: skip


@triton.jit
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    program,
    tokens,
    heads,
    x_strides,
    cos_pair,
    sin_pair,
    PAIRS: tl.constexpr,
    COS_TOKEN: tl.constexpr,
    SIN_TOKEN: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    NEOX: tl.constexpr,
):
    index = program * HEADS + tl.arange(0, HEADS)
    token, head = (index // heads).to(tl.int64)[:, None], (index % heads).to(tl.int64)[:, None]
    pair = tl.arange(0, TILE)[None, :]
    inside = (token < tokens) & (pair < PAIRS)
    cos = tl.load(cos_ptr + token * COS_TOKEN + pair * cos_pair, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + token * SIN_TOKEN + pair * sin_pair, mask=inside, other=0.0)
    heads_ptr = x_ptr + token * x_strides[0] + head * x_strides[1]
    if NEOX:
        first_ptr = heads_ptr + pair * x_strides[2]
        second_ptr = heads_ptr + (pair + PAIRS) * x_strides[2]
        first = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(second_ptr, mask=inside, other=0.0).to(tl.float32)
        tl.store(first_ptr, (first * cos - second * sin).to(x_ptr.dtype.element_ty), mask=inside)
        tl.store(second_ptr, (second * cos + first * sin).to(x_ptr.dtype.element_ty), mask=inside)
    else:  # neighbours are loaded together and split in registers
        feature = tl.arange(0, 2 * TILE)[None, :]
        pair_ptrs = heads_ptr + feature * x_strides[2]
        inside = (token < tokens) & (feature < 2 * PAIRS)
        x = tl.load(pair_ptrs, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [HEADS, TILE, 2]))
        rotated = tl.join(first * cos - second * sin, second * cos + first * sin)
        rotated = tl.reshape(rotated, [HEADS, 2 * TILE]).to(x_ptr.dtype.element_ty)
        tl.store(pair_ptrs, rotated, mask=inside)


_rotary_embedding = operator(
    rotary_embedding_reference, rotary_embedding_triton, nothing, ("query", "key")
)
