"""Gated activations (arXiv:2002.05202): half of the features, activated, times the other half."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vllm_module.kernels.dtypes import FLOATS, WIDE_FLOATS, can_convert, greatest
from vllm_module.kernels.matmul.products import products_in_use
from vllm_module.kernels.operators import as_rows, expect, next_power_of_2, operator, tl, triton
from vllm_module.kernels.rows.few_rows import activate_few_rows, takes_few_rows
from vllm_module.kernels.rows.quantized_rows import (
    empty_rows,
    group_of,
    quantize_rows,
    store_quantized,
)

_TILE = 2048  # elements of the result for each program: 16 for each thread, from both halves
# Bytes of half a row that a program can hold in registers to find one scale for all of it. For gelu
# half as many, because its error function needs registers too.
_HELD = 65536


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, where ``x`` is gate and up side by side.

    Args:
        x: ``[..., 2 * columns]``, floating point.

    Returns:
        ``[..., columns]``, as ``x``. CUDA computes in float32 and rounds once; plain torch rounds
        the activated gate before it multiplies.

    Raises:
        ValueError: the number of features is odd, or the dtype is not floating point.

    """
    in_loops = not torch.compiler.is_compiling() and products_in_use.get().pages
    if in_loops and takes_few_rows(_checked(x, WIDE_FLOATS)):
        return activate_few_rows(x, "silu")
    return _act_and_mul(_checked(x, WIDE_FLOATS), "silu")


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Return ``gelu(gate) * up``, exact or approximated by ``"tanh"``.

    Shapes and errors are those of :func:`silu_and_mul`.
    """
    in_loops = not torch.compiler.is_compiling() and products_in_use.get().pages
    if in_loops and approximate == "tanh" and takes_few_rows(_checked(x, WIDE_FLOATS)):
        return activate_few_rows(x, "gelu_tanh")
    return _act_and_mul(_checked(x, WIDE_FLOATS), _gelu(approximate))


def swiglu_oai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """Return ``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped numbers, as gpt-oss does.

    ``gate`` is at most ``limit``, and ``up`` is between ``-limit`` and ``limit``. NaN stays NaN.

    Shapes and errors are those of :func:`silu_and_mul`. The halves lie side by side, even if a
    checkpoint interleaves them.
    """
    return _swiglu_oai_and_mul(_checked(x, WIDE_FLOATS), alpha, limit)


def silu_and_mul_quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: int | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``silu(gate) * up``, quantized.

    The values and scales are those of :func:`~vllm_module.kernels.rows.quantize.quantize`.

    Args:
        x: as for :func:`silu_and_mul`, but not float64.
        dtype: float8_e4m3fn or float8_e5m2.
        group: columns that share a scale, a power of two; by default a whole row.
        scale: a static scale, float32 ``[]`` or ``[1]``; by default scales are computed.

    Returns:
        ``[..., columns]`` in ``dtype``, and its scales, float32 ``[rows, groups]``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.

    """
    group = group_of(_checked(x, FLOATS).shape[-1] // 2, dtype, group, scale, x)
    return _act_and_mul_quantize(x, "silu", dtype, group, scale)


def gelu_and_mul_quantize(
    x: torch.Tensor,
    approximate: str = "none",
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: int | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`gelu_and_mul`, quantized as by :func:`silu_and_mul_quantize`."""
    group = group_of(_checked(x, FLOATS).shape[-1] // 2, dtype, group, scale, x)
    return _act_and_mul_quantize(x, _gelu(approximate), dtype, group, scale)


def _checked(x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    expect("x", x, None, dtypes)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"x must have gate and up in one dimension, got the shape {list(x.shape)}")
    return x


def _gelu(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return "gelu" if approximate == "none" else "gelu_tanh"


def act_and_mul_reference(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Activate and multiply in plain torch; ``activation`` is silu, gelu or gelu_tanh."""
    gate, up = x.chunk(2, dim=-1)
    if activation == "silu":
        y = F.silu(gate)
    else:
        y = F.gelu(gate, approximate="none" if activation == "gelu" else "tanh")
    # Derivatives need the activated gate.
    return (y * up if torch.is_grad_enabled() else y.mul_(up)).contiguous()


def swiglu_oai_and_mul_reference(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Clamp, activate and multiply in plain torch; see :func:`swiglu_oai_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate * torch.sigmoid(gate * alpha))).contiguous()


def act_and_mul_quantize_reference(
    x: torch.Tensor,
    activation: str,
    dtype: torch.dtype,
    group: int,
    static: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activate, multiply and quantize in plain torch; ``group`` is 0 with a static scale."""
    return quantize_rows(act_and_mul_reference(x, activation), dtype, group, static)


def act_and_mul_triton(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Activate and multiply in a Triton kernel."""
    y = act_and_mul_fake(x)
    _launch(x, activation, y)
    return y


def act_and_mul_quantize_triton(
    x: torch.Tensor,
    activation: str,
    dtype: torch.dtype,
    group: int,
    static: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activate, multiply and quantize in a Triton kernel."""
    columns = x.shape[-1] // 2
    limit = _HELD // 2 if activation == "gelu" else _HELD
    fits = min(group, columns) * x.element_size() <= limit
    if not (columns and fits and can_convert(dtype, x)):
        return quantize_rows(act_and_mul_triton(x, activation), dtype, group, static)
    y, scale = act_and_mul_quantize_fake(x, activation, dtype, group)
    _launch(x, activation, y, scale, group, static)
    return y, scale


def swiglu_oai_and_mul_triton(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Clamp, activate and multiply in a Triton kernel; see :func:`swiglu_oai_and_mul`."""
    y = act_and_mul_fake(x)
    _launch(x, "swiglu_oai", y, alpha=alpha, limit=limit)
    return y


def _launch(
    x: torch.Tensor,
    activation: str,
    y: torch.Tensor,
    scale: torch.Tensor | None = None,
    group: int = 0,
    static: torch.Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> None:
    """Write ``y``, and ``scale`` if given; both are contiguous."""
    if not x.numel():
        return
    x, (inner, outer_stride, inner_stride) = as_rows(x)
    rows, columns = x.shape[0] * x.shape[1], x.shape[2] // 2
    padded = next_power_of_2(columns)
    shared = min(next_power_of_2(group), padded)  # columns of a tile that share a scale
    tile = max(min(_TILE, padded), shared)
    tile_rows = max(1, _TILE // tile)
    assert rows + tile_rows < 2**31  # row indices are divided in 32 bits, which is far faster
    _tiles[(-(-rows // tile_rows), -(-columns // tile))](
        x,
        y,
        scale,
        static,
        rows,
        columns,
        inner,
        outer_stride,
        inner_stride,
        1 if scale is None else scale.shape[1],
        alpha,
        limit,
        ACTIVATION=activation,
        ROWS=tile_rows,
        COLUMNS=tile,
        GROUP=shared if group else tile,
        MAX=greatest(y.dtype),
        num_warps=min(16, max(4, tile_rows * tile // 1024)),
    )


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    """Activate float32 numbers; no step overflows unless the result does."""
    if ACTIVATION == "silu":
        return gate / (1 + tl.exp(-gate))
    if ACTIVATION == "gelu":
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    # (1 + tanh(z)) / 2 is sigmoid(2 z), whose exponential may be 0 or infinite.
    z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + tl.exp(-2 * z))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["inner"])
def _tiles(
    x_ptr,
    y_ptr,
    scale_ptr,
    static_ptr,
    rows,
    columns,
    inner,
    outer_stride,
    inner_stride,
    groups,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX: tl.constexpr,
):
    """Write a tile, which is some rows or part of one."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    outer, inner = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    row = row.to(tl.int64)
    gates = (outer * outer_stride + inner * inner_stride)[:, None] + column[None, :]
    gate = tl.load(x_ptr + gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + gates + columns, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "swiglu_oai":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        y = (up + 1) * (gate / (1 + tl.exp(-alpha * gate)))
    else:
        y = _activated(gate, ACTIVATION) * up
    places = row[:, None] * columns + column[None, :]
    if scale_ptr is None:
        tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=inside)
    else:  # round first, as if the result were written and then quantized
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        group = tl.program_id(1) * (COLUMNS // GROUP)
        store_quantized(
            y, inside, places, row, rows, group, groups, y_ptr, scale_ptr, static_ptr, GROUP, MAX
        )


def act_and_mul_fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    """Return an empty result."""
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


def act_and_mul_quantize_fake(
    x: torch.Tensor, activation: str, dtype: torch.dtype, group: int, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an empty quantized result and its scales."""
    return empty_rows(x[..., : x.shape[-1] // 2], dtype, group)


_act_and_mul = operator(act_and_mul_reference, act_and_mul_triton, act_and_mul_fake)
_swiglu_oai_and_mul = operator(
    swiglu_oai_and_mul_reference, swiglu_oai_and_mul_triton, act_and_mul_fake
)
_act_and_mul_quantize = operator(
    act_and_mul_quantize_reference, act_and_mul_quantize_triton, act_and_mul_quantize_fake
)
