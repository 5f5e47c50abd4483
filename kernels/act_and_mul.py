"""Gated activations (arXiv:2002.05202): one half of the features, activated, times the other."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vllm_module.kernels.dtypes import FLOATS, WIDE_FLOATS, can_convert, greatest
from vllm_module.kernels.operators import as_rows, expect, next_power_of_2, operator, tl, triton
from vllm_module.kernels.quantized_rows import empty_rows, group_of, quantize_rows, store_quantized

_TILE = 2048  # elements of the result that a program works on: 16 a thread, of both halves
# Bytes of a row's half that a program can hold, to find one scale for all of it; half as many where
# gelu's error function takes registers too.
_HELD = 65536


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, where ``x`` is gate and up side by side.

    Args:
        x: ``[..., 2 * columns]``, floating point.

    Returns:
        ``[..., columns]``, as ``x``. On CUDA it is computed in float32 and rounded once; in plain
        torch, the gate's activation is rounded before it multiplies.

    Raises:
        ValueError: an odd number of features, or a dtype that is not floating point.

    """
    return _act_and_mul(_checked(x, WIDE_FLOATS), "silu")


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Return ``gelu(gate) * up``; ``approximate`` by ``"tanh"`` or not at all, ``"none"``.

    Shapes and errors as for :func:`silu_and_mul`.
    """
    return _act_and_mul(_checked(x, WIDE_FLOATS), _gelu(approximate))


def silu_and_mul_quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: int | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the activation as :func:`~vllm_module.kernels.quantize.quantize` gives it.

    Args:
        x: as for :func:`silu_and_mul`, but not float64.
        dtype: float8_e4m3fn or float8_e5m2.
        group: columns that share a scale, a power of two; all of a row unless given.
        scale: float32 ``[]`` or ``[1]``, by which all is divided; else scales come of the result.

    Returns:
        ``[..., columns]`` in ``dtype``, and float32 ``[rows, groups]``, what it was divided by.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other.

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
    """Return the activation in eight bits; see gelu_and_mul and silu_and_mul_quantize."""
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
    """Activate and multiply in plain torch: ``activation`` is silu, gelu or gelu_tanh."""
    gate, up = x.chunk(2, dim=-1)
    if activation == "silu":
        return (F.silu(gate) * up).contiguous()
    approximate = "none" if activation == "gelu" else "tanh"
    return (F.gelu(gate, approximate=approximate) * up).contiguous()


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
    y = act_and_mul_fake(x, activation)
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
    most = _HELD // 2 if activation == "gelu" else _HELD
    held = min(group, columns) * x.element_size() <= most
    if not (columns and held and can_convert(dtype, x)):
        return quantize_rows(act_and_mul_triton(x, activation), dtype, group, static)
    y, scale = act_and_mul_quantize_fake(x, activation, dtype, group, static)
    _launch(x, activation, y, scale, group, static)
    return y, scale


def _launch(
    x: torch.Tensor,
    activation: str,
    y: torch.Tensor,
    scale: torch.Tensor | None = None,
    group: int = 0,
    static: torch.Tensor | None = None,
) -> None:
    """Write ``y``, and ``scale`` where it is wanted, both contiguous."""
    if not x.numel():
        return
    x, (inner, outer_stride, inner_stride) = as_rows(x)
    rows, columns = x.shape[0] * x.shape[1], x.shape[2] // 2
    whole = next_power_of_2(columns)
    shared = min(next_power_of_2(group), whole)  # by columns of a tile
    tile = max(min(_TILE, whole), shared)
    together = max(1, _TILE // tile)
    assert rows + together < 2**31  # a row's number is divided in 32 bits, many times as fast
    _tiles[(-(-rows // together), -(-columns // tile))](
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
        ACTIVATION=activation,
        ROWS=together,
        COLUMNS=tile,
        GROUP=shared if group else tile,
        MOST=greatest(y.dtype),
        num_warps=min(16, max(4, together * tile // 1024)),
    )


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    """Return what activates float32 numbers; no step overflows where the result does not."""
    if ACTIVATION == "silu":
        return gate / (1 + tl.exp(-gate))
    if ACTIVATION == "gelu":
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    # (1 + tanh(z)) / 2 is the sigmoid of 2 z, whose exponential is 0 or infinite at the ends.
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
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    MOST: tl.constexpr,
):
    """One program some rows, or a part of one."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    outer, inner = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    row = row.to(tl.int64)
    gates = (outer * outer_stride + inner * inner_stride)[:, None] + column[None, :]
    gate = tl.load(x_ptr + gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + gates + columns, mask=inside, other=0.0).to(tl.float32)
    y = _activated(gate, ACTIVATION) * up
    places = row[:, None] * columns + column[None, :]
    if scale_ptr is None:
        tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=inside)
    else:  # what is quantized is the result as it would have been written
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        group = tl.program_id(1) * (COLUMNS // GROUP)
        store_quantized(
            y, inside, places, row, rows, group, groups, y_ptr, scale_ptr, static_ptr, GROUP, MOST
        )


def act_and_mul_fake(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return an empty result."""
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


def act_and_mul_quantize_fake(
    x: torch.Tensor,
    activation: str,
    dtype: torch.dtype,
    group: int,
    static: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an empty quantized result and its scales."""
    return empty_rows(act_and_mul_fake(x, activation), dtype, group)


_act_and_mul = operator(act_and_mul_reference, act_and_mul_triton, act_and_mul_fake)
_act_and_mul_quantize = operator(
    act_and_mul_quantize_reference, act_and_mul_quantize_triton, act_and_mul_quantize_fake
)
