"""Quantizing rows in the kernel that computes them.

This is no operation by itself: :mod:`~vllm_module.kernels.rows.rms_norm` and
:mod:`~vllm_module.kernels.rows.act_and_mul` share it.
"""

from __future__ import annotations

import torch

from vllm_module.kernels.dtypes import FP8
from vllm_module.kernels.operators import expect, tl, triton
from vllm_module.kernels.rows.quantize import (
    absolute_bits,
    quantize,
    quantize_static,
    scale_from_bits,
    scaled_to,
)


def group_of(
    columns: int, dtype: torch.dtype, group: int | None, scale: torch.Tensor | None, x: torch.Tensor
) -> int:
    """Return how many columns share a scale; 0 for a static scale, which covers everything.

    Args:
        columns: number of columns of a row.
        dtype: dtype to quantize to.
        group: number of columns that share a scale; by default a whole row.
        scale: the static scale, if any.
        x: the input; the scale must be on its device.

    Raises:
        ValueError: arguments do not fit each other.

    """
    if dtype not in FP8:
        raise ValueError(f"dtype must be {' or '.join(map(str, FP8))}, got {dtype}")
    if scale is not None:
        if group is not None:
            raise ValueError(f"a static scale has no groups, got group={group}")
        expect("scale", scale, (1,) if scale.dim() else (), (torch.float32,), x)
        return 0
    if group is None:
        return max(1, columns)
    if group < 1 or group & (group - 1):
        raise ValueError(f"group must be a power of two, got {group}")
    return group


def empty_rows(
    y: torch.Tensor, dtype: torch.dtype, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate ``y [..., columns]`` quantized, and its scales ``[rows, groups]``."""
    quantized = torch.empty(y.shape, dtype=dtype, device=y.device)
    rows = y.shape[:-1].numel()
    groups = -(-y.shape[-1] // group) if group else 1
    return quantized, torch.empty(rows, groups, dtype=torch.float32, device=y.device)


def quantize_rows(
    y: torch.Tensor, dtype: torch.dtype, group: int, static: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``y``; a static scale is repeated for each row."""
    quantized, scale = empty_rows(y, dtype, group)
    if y.numel() == 0:
        return quantized, scale if static is None else scale.copy_(static)
    wide, narrow = (x.view(-1, x.shape[-1]) for x in (y, quantized))
    if static is None:
        quantize(wide, narrow, scale, (1, group))
    else:
        quantize_static(wide, narrow, scale.copy_(static), (1, wide.shape[1]))
    return quantized, scale


@triton.jit
def store_quantized(
    y,
    inside,
    places,
    row,
    rows,
    group,
    groups,
    y_ptr,
    scale_ptr,
    static_ptr,
    GROUP: tl.constexpr,
    MAX: tl.constexpr,
):
    """Store a tile ``[ROWS, COLUMNS]`` in eight bits, and its scales.

    ``y`` is float32, and 0 outside the mask ``inside``. ``group`` is the index of the tile's first
    group.
    """
    GROUPS: tl.constexpr = y.shape[1] // GROUP
    y = tl.reshape(y, [y.shape[0], GROUPS, GROUP])
    if static_ptr is None:
        scale = scale_from_bits(tl.max(absolute_bits(y), axis=2), MAX)
    else:
        scale = tl.zeros([y.shape[0], GROUPS], tl.float32) + tl.load(static_ptr)
    index = group + tl.arange(0, GROUPS)
    kept = (row < rows)[:, None] & (index < groups)[None, :]
    tl.store(scale_ptr + row[:, None] * groups + index[None, :], scale, mask=kept)
    y = scaled_to(y, tl.broadcast_to(scale[:, :, None], y.shape), MAX, y_ptr.dtype.element_ty)
    tl.store(y_ptr + places, tl.reshape(y, inside.shape), mask=inside)
