"""The tile of heads that kernels normalize, rotate and write.

This is no operation by itself: :mod:`~vllm_module.kernels.attention.rotate_and_cache` and
:mod:`~vllm_module.kernels.attention.rotate_and_cache_mla` share it.
"""

from __future__ import annotations

from vllm_module.kernels.attention.reshape_and_cache import converted
from vllm_module.kernels.operators import tl, triton
from vllm_module.kernels.rows.rms_norm import weighted


@triton.jit
def rotate_rows(
    x_ptr,
    x_at,
    x_column,
    weight_ptr,
    y_ptr,
    y_at,
    y_column,
    scale_ptr,
    scale_at,
    cos_ptr,
    sin_ptr,
    token,
    cos_pair,
    sin_pair,
    kept,
    eps,
    COS_TOKEN: tl.constexpr,
    SIN_TOKEN: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    REST: tl.constexpr,
    OFFSET: tl.constexpr,
    NEOX: tl.constexpr,
    MAX: tl.constexpr,
):
    """Normalize the ``kept`` rows if there is a weight, rotate them, and write them to ``y``.

    ``x`` and ``y`` may be the same rows.
    """
    narrow: tl.constexpr = x_ptr.dtype.element_ty
    x_ptrs, y_ptrs = x_ptr + x_at[:, None], y_ptr + y_at[:, None]
    pair = tl.arange(0, TILE)[None, :]
    turned = kept[:, None] & (pair < PAIRS)
    token = token[:, None]
    cos = tl.load(cos_ptr + token * COS_TOKEN + pair * cos_pair, mask=turned, other=0.0)
    sin = tl.load(sin_ptr + token * SIN_TOKEN + pair * sin_pair, mask=turned, other=0.0)
    neighbour = tl.arange(0, 2 * TILE)[None, :]
    together = kept[:, None] & (neighbour < 2 * PAIRS)
    if NEOX:
        first = tl.load(x_ptrs + pair * x_column, mask=turned, other=0.0).to(tl.float32)
        second = tl.load(x_ptrs + (pair + PAIRS) * x_column, mask=turned, other=0.0).to(tl.float32)
    else:  # neighbours are loaded together and split in registers
        x = tl.load(x_ptrs + neighbour * x_column, mask=together, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [ROWS, TILE, 2]))
    if REST > 0:
        column = 2 * PAIRS + tl.arange(0, REST)[None, :]
        unturned = kept[:, None] & (column < HEAD_SIZE)
        rest = tl.load(x_ptrs + column * x_column, mask=unturned, other=0.0)

    if weight_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        if REST > 0:
            wide = rest.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1, keep_dims=True)
        inverse = tl.rsqrt(squares / HEAD_SIZE + eps)
        inside = pair < PAIRS
        at = pair if NEOX else 2 * pair
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
        first = weighted(first, inverse, weight, narrow, OFFSET).to(narrow).to(tl.float32)
        at = pair + PAIRS if NEOX else 2 * pair + 1
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
        second = weighted(second, inverse, weight, narrow, OFFSET).to(narrow).to(tl.float32)
        if REST > 0:
            weight = tl.load(weight_ptr + column, mask=column < HEAD_SIZE, other=0.0)
            rest = weighted(wide, inverse, weight, narrow, OFFSET).to(narrow)

    tl.debug_barrier()  # several warps may read a small tile that one of them writes
    # Rounded before the conversion, as if rows were written first and stored afterwards.
    held: tl.constexpr = y_ptr.dtype.element_ty
    a, b = first * cos - second * sin, second * cos + first * sin
    if NEOX:
        a = converted(a.to(narrow), scale_ptr, scale_at, MAX, held)
        b = converted(b.to(narrow), scale_ptr, scale_at, MAX, held)
        tl.store(y_ptrs + pair * y_column, a, mask=turned)
        tl.store(y_ptrs + (pair + PAIRS) * y_column, b, mask=turned)
    else:
        y = tl.reshape(tl.join(a, b), [ROWS, 2 * TILE]).to(narrow)
        y = converted(y, scale_ptr, scale_at, MAX, held)
        tl.store(y_ptrs + neighbour * y_column, y, mask=together)
    if REST > 0:
        rest = converted(rest, scale_ptr, scale_at, MAX, held)
        tl.store(y_ptrs + column * y_column, rest, mask=unturned)
