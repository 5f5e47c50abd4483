"""Root mean square normalization (arXiv:1910.07467), with addition and quantization fused in."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vllm_module.kernels.choices import choose
from vllm_module.kernels.dtypes import FLOATS, WIDE_FLOATS, can_convert, capability, greatest
from vllm_module.kernels.matmul.products import products_in_use
from vllm_module.kernels.operators import (
    as_rows,
    begin_early,
    expect,
    launched_early,
    next_power_of_2,
    operator,
    tl,
    triton,
)
from vllm_module.kernels.rows.few_rows import norm_few_rows, takes_few_rows
from vllm_module.kernels.rows.quantized_rows import (
    empty_rows,
    group_of,
    quantize_rows,
    store_quantized,
)

_MAX_COLUMNS = 65536
_HELD = 65536  # bytes of a row that fit registers; a quarter if it is quantized (Triton 3.6)
_PER_PROGRAM = 4096  # elements for each program, if rows are short
# By name, whether the kernel is launched before the one before has ended, on Hopper.
_CANDIDATES = {"launched in turn": False, "launched early": True}


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float | None = None
) -> torch.Tensor:
    """Divide each row by the root of its mean square, and multiply by ``weight``.

    The norm is computed in float32 and rounded to ``x.dtype`` before it is multiplied, as in Llama.
    With an offset everything is computed in float32 and rounded once: 1 in Gemma, 0 in OLMo 2.

    Args:
        x: ``[..., columns]``, floating point, at most 65536 columns.
        weight: ``[columns]``, floating point.
        eps: constant added to the mean square.
        weight_offset: constant added to the weight, in float32; ``None`` rounds before.

    Returns:
        ``[..., columns]`` in the dtype to which ``x`` and ``weight`` promote.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.

    """
    _check(x, None, weight, WIDE_FLOATS)
    in_loops = not torch.compiler.is_compiling() and products_in_use.get().pages
    if in_loops and takes_few_rows(x, weight):
        return norm_few_rows(x, None, weight, eps, weight_offset)[0]
    return _rms_norm(x, weight, eps, weight_offset)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of ``x + residual``, and the sum, which is the new residual.

    The sum is rounded before it is normalized. Arguments are not written. Shapes and errors are
    those of :func:`rms_norm`; ``residual`` has the shape of ``x``.
    """
    _check(x, residual, weight, WIDE_FLOATS)
    in_loops = not torch.compiler.is_compiling() and products_in_use.get().pages
    if in_loops and takes_few_rows(x, residual, weight):
        return norm_few_rows(x, residual, weight, eps, weight_offset)
    return _fused_add_rms_norm(x, residual, weight, eps, weight_offset)


def rms_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: int | None = None,
    scale: torch.Tensor | None = None,
    weight_offset: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the norm, quantized as by :func:`~vllm_module.kernels.rows.quantize.quantize`.

    Args:
        x, weight, eps, weight_offset: as for :func:`rms_norm`, but not float64.
        residual: as for :func:`fused_add_rms_norm`, or ``None``.
        dtype: float8_e4m3fn or float8_e5m2.
        group: columns that share a scale, a power of two; by default a whole row.
        scale: a static scale, float32 ``[]`` or ``[1]``; by default scales are computed.

    Returns:
        The quantized norm ``[..., columns]``; its scales, float32 ``[rows, groups]``; and the new
        residual, or ``None`` without one.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.

    """
    _check(x, residual, weight, FLOATS)
    group = group_of(x.shape[-1], dtype, group, scale, x)
    y, scales, total = _rms_norm_quantize(
        x, residual, weight, eps, dtype, group, scale, weight_offset
    )
    return y, scales, None if residual is None else total


def _check(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    if x.dim() == 0:
        raise ValueError("x must have columns, got the shape []")
    if x.shape[-1] > _MAX_COLUMNS:
        raise ValueError(f"x must have at most {_MAX_COLUMNS} columns, got {x.shape[-1]}")
    expect("x", x, None, dtypes)
    if residual is not None:
        expect("residual", residual, x.shape, dtypes, x)
    expect("weight", weight, x.shape[-1:], dtypes, x)


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float | None = None
) -> torch.Tensor:
    """Normalize in plain torch; see :func:`rms_norm`."""
    if weight_offset is not None:
        y = F.rms_norm(x.float(), weight.shape, weight.float() + weight_offset, eps)
        return y.to(torch.result_type(x, weight)).contiguous()
    if x.dtype == weight.dtype == torch.float32:  # torch's own norm rounds once, at the end
        return torch.rms_norm(x, weight.shape, weight, eps).contiguous()
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(x.dtype)).contiguous()


def fused_add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and normalize in plain torch; see :func:`fused_add_rms_norm`."""
    total = (x + residual).contiguous()
    return rms_norm_reference(total, weight, eps, weight_offset), total


def rms_norm_quantize_reference(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    group: int,
    static: torch.Tensor | None,
    weight_offset: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalize and quantize in plain torch; see :func:`rms_norm_quantize`.

    ``group`` is 0 with a static scale; the sum is empty without a residual.
    """
    total = x.new_empty(0) if residual is None else (x + residual).contiguous()
    y = rms_norm_reference(x if residual is None else total, weight, eps, weight_offset)
    return *quantize_rows(y, dtype, group, static), total


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float | None = None
) -> torch.Tensor:
    """Normalize in a Triton kernel, or longer rows in plain torch; see :func:`rms_norm`."""
    if not _is_held(x):
        return rms_norm_reference(x, weight, eps, weight_offset)
    y = rms_norm_fake(x, weight)
    _launch(x, None, weight, eps, y, offset=weight_offset)
    return y


def fused_add_rms_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and normalize in a Triton kernel, or longer rows in plain torch."""
    if not _is_held(x):
        return fused_add_rms_norm_reference(x, residual, weight, eps, weight_offset)
    y, total = fused_add_rms_norm_fake(x, residual, weight)
    _launch(x, residual, weight, eps, y, total, offset=weight_offset)
    return y, total


def rms_norm_quantize_triton(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    group: int,
    static: torch.Tensor | None,
    weight_offset: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalize and quantize in a Triton kernel; see :func:`rms_norm_quantize`."""
    y, scale, total = rms_norm_quantize_fake(x, residual, weight, eps, dtype, group, static)
    if x.shape[-1] and _is_held(x, 4) and can_convert(dtype, x):
        sums = None if residual is None else total
        _launch(x, residual, weight, eps, y, sums, scale, group, static, weight_offset)
        return y, scale, total
    if residual is None:
        wide = rms_norm_triton(x, weight, eps, weight_offset)
    else:
        wide, total = fused_add_rms_norm_triton(x, residual, weight, eps, weight_offset)
    return *quantize_rows(wide, dtype, group, static), total


def _is_held(x: torch.Tensor, times: int = 1) -> bool:
    return times * x.shape[-1] * x.element_size() <= _HELD


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    y: torch.Tensor,
    total: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    group: int = 0,
    static: torch.Tensor | None = None,
    offset: float | None = None,
) -> None:
    """Write ``y``, and ``total`` and ``scale`` if given; all are contiguous."""
    if not x.numel():
        return
    x, (inner, *x_strides) = as_rows(x)
    residual_strides = [0, 0]
    if residual is not None:  # it has the same shape, and so the same inner size
        residual, (_, *residual_strides) = as_rows(residual)
    rows, columns = x.shape[0] * x.shape[1], x.shape[2]
    tile = next_power_of_2(columns)
    tile_rows = max(1, _PER_PROGRAM // tile)
    early = False
    if capability(x) >= (9, 0):
        case = f"{columns}, {str(x.dtype).removeprefix('torch.')}"
        early = choose("rms_norm", case, _CANDIDATES, x.device)
    assert rows + tile_rows < 2**31  # row indices are divided in 32 bits, which is far faster
    _held_rows[(-(-rows // tile_rows),)](
        x,
        residual,
        weight.contiguous(),
        y,
        total,
        scale,
        static,
        rows,
        columns,
        inner,
        *x_strides,
        *residual_strides,
        1 if scale is None else scale.shape[1],
        eps,
        OFFSET=offset,
        ROWS=tile_rows,
        COLUMNS=tile,
        GROUP=min(next_power_of_2(group), tile) if group else tile,
        MAX=greatest(y.dtype),
        **launched_early(_held_rows, early),
        # About 32 elements a thread: enough loads in flight, and few enough registers.
        num_warps=min(16, max(4, tile_rows * tile // 1024)),
    )


@triton.jit
def _load_sum(x_ptr, residual_ptr, x_places, residual_places, inside, dtype: tl.constexpr):
    """Return ``x``, plus the residual if any, rounded to ``dtype``, as float32."""
    x = tl.load(x_ptr + x_places, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + residual_places, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def weighted(x, inverse, weight, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """Return ``x * inverse`` times the weight as float32; without an offset, rounded in between."""
    if OFFSET is not None:
        return x * inverse * (weight.to(tl.float32) + OFFSET)
    return weight.to(tl.float32) * (x * inverse).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["inner"])
def _held_rows(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    scale_ptr,
    static_ptr,
    rows,
    columns,
    inner,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    groups,
    eps,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Normalize some rows, each read once."""
    begin_early(EARLY)
    narrow: tl.constexpr = (
        x_ptr.dtype.element_ty if total_ptr is None else total_ptr.dtype.element_ty
    )
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    outer, inner = (row // inner).to(tl.int64)[:, None], (row % inner).to(tl.int64)[:, None]
    row = row.to(tl.int64)
    x_places = outer * x_outer + inner * x_inner + column[None, :]
    residual_places = outer * residual_outer + inner * residual_inner + column[None, :]
    places = row[:, None] * columns + column[None, :]
    x = _load_sum(x_ptr, residual_ptr, x_places, residual_places, inside, narrow)
    if total_ptr is not None:
        tl.store(total_ptr + places, x.to(narrow), mask=inside)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / columns + eps)
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)[None, :]
    y = weighted(x, inverse, weight, narrow, OFFSET)
    if scale_ptr is None:
        tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=inside)
    else:  # round first, as if the norm were written and then quantized
        same: tl.constexpr = narrow == weight_ptr.dtype.element_ty
        y = y.to(narrow if same else tl.float32).to(tl.float32)
        y = tl.where(inside, y, 0.0)  # padding is 0 * inf if eps and all squares are 0
        # A thread stores as many neighbours as it loads. Otherwise the compiler would give it more
        # of a row than in the norm alone, and add the squares in another order.
        SHARE: tl.constexpr = min(128 // x_ptr.dtype.element_ty.primitive_bitwidth, COLUMNS)
        places = tl.max_contiguous(places, [1, SHARE])
        store_quantized(
            y, inside, places, row, rows, 0, groups, y_ptr, scale_ptr, static_ptr, GROUP, MAX
        )


def rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    """Return an empty norm."""
    return torch.empty(x.shape, dtype=torch.result_type(x, weight), device=x.device)


def fused_add_rms_norm_fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an empty norm and sum."""
    total = torch.empty(x.shape, dtype=torch.result_type(x, residual), device=x.device)
    return rms_norm_fake(total, weight), total


def rms_norm_quantize_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    group: int,
    static: torch.Tensor | None,
    weight_offset: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an empty quantized norm, its scales, and the sum."""
    if residual is None:
        total = x.new_empty(0)
    else:
        total = torch.empty(x.shape, dtype=torch.result_type(x, residual), device=x.device)
    return *empty_rows(x, dtype, group), total


_rms_norm = operator(rms_norm_reference, rms_norm_triton, rms_norm_fake)
_fused_add_rms_norm = operator(
    fused_add_rms_norm_reference, fused_add_rms_norm_triton, fused_add_rms_norm_fake
)
_rms_norm_quantize = operator(
    rms_norm_quantize_reference, rms_norm_quantize_triton, rms_norm_quantize_fake
)
