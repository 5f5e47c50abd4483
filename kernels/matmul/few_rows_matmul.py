"""Matmul of at most 16 rows with 16-bit weights, in Triton.

The time is that of reading the weight. The weight is the left operand of a tile, so that few rows
fill one. Inputs are split among programs until there are enough for a GPU, and the splits are added
in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vllm_module.kernels.choices import choose
from vllm_module.kernels.dtypes import capability
from vllm_module.kernels.matmul.product_tile import added, clamped, loaded, written
from vllm_module.kernels.matmul.scaled_matmul_tiles import add_splits
from vllm_module.kernels.operators import (
    begin_early,
    expect,
    launched_early,
    operator,
    tl,
    triton,
)

ROWS = 16  # rows of a tile, and the largest number of rows
KERNEL = "linear"  # name of the kernel in choices.json


class FewRowsConfig(NamedTuple):
    """The tiles of a matmul and the steps of a program.

    Attributes:
        columns: output features of a tile.
        depth: input features of a step.
        early: whether the kernel is launched before the one before has ended, on Hopper.

    """

    columns: int
    depth: int
    warps: int
    stages: int
    early: bool = False


# The first candidate is torch's own matmul.
_CANDIDATES = {
    "torch": None,
    "few rows": FewRowsConfig(64, 128, 4, 5),
    "few rows, narrow": FewRowsConfig(32, 128, 4, 6),
}
_ON_HOPPER = _CANDIDATES | {"few rows, launched early": FewRowsConfig(64, 128, 4, 5, True)}


def config_of(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> FewRowsConfig | None:
    """Return the chosen configuration of a matmul, or ``None`` if torch computes it.

    Only a measurement chooses another candidate than torch. A result's bits do not depend on its
    number of rows.

    Args:
        x: ``[..., input]``, on a GPU.
        weight: ``[output, input]``.
        bias: ``[output]``, or ``None``.

    """
    columns = x.shape[-1] if x.dim() else 0
    if not columns or x.numel() > ROWS * columns or weight.dim() != 2 or columns % 16:
        return None
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    fits = weight.shape[1] == columns and weight.is_contiguous()
    if bias is not None:
        fits = fits and bias.dtype == x.dtype and bias.shape == weight.shape[:1]
    if not fits or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if capability(x) < (8, 0):
        return None
    candidates = _ON_HOPPER if capability(x) >= (9, 0) else _CANDIDATES
    name = str(x.dtype).removeprefix("torch.")
    case = f"{ROWS} x {weight.shape[0]} x {columns}, {name}"
    return choose(KERNEL, case, candidates, x.device)


def few_rows_matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: FewRowsConfig
) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, accumulated in float32.

    Args:
        x: ``[..., input]``, at most 16 rows.
        weight: ``[output, input]``, of the dtype of ``x``.
        bias: ``[output]``, of the same dtype, or ``None``.
        config: tiles and steps of the matmul.

    Returns:
        ``[..., output]``, of the same dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other, or there are more rows.

    """
    expect("weight", weight, (None, x.shape[-1]), (x.dtype,), x)
    if bias is not None:
        expect("bias", bias, weight.shape[:1], (x.dtype,), x)
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > ROWS:
        raise ValueError(f"x must have at most {ROWS} rows, got {len(rows)}")
    y = _few_rows_matmul(rows, weight, bias, *config)
    return y.view(*x.shape[:-1], len(weight))


def few_rows_matmul_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    columns: int,
    depth: int,
    warps: int,
    stages: int,
    early: bool,
) -> torch.Tensor:
    """Multiply in plain torch; see :func:`few_rows_matmul`."""
    return torch.nn.functional.linear(x, weight, bias)


def few_rows_matmul_triton(*arguments: Any) -> torch.Tensor:
    """Multiply by Triton kernels; see :func:`few_rows_matmul`."""
    x, weight, bias, columns, depth, warps, stages, early = arguments
    (M, K), N = x.shape, len(weight)
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    # Splits depend only on the weight's shape: two programs for each of 132 multiprocessors.
    splits, tiles = 1, -(-N // columns)
    while splits * tiles < 256 and splits * 8 * depth <= K:
        splits *= 2
    parts = y
    if splits > 1:
        parts = torch.empty(splits, M, N, dtype=torch.float32, device=x.device)
    _multiply_few[tiles, splits](
        x,
        weight,
        bias if splits == 1 else None,
        parts,
        M,
        N,
        K,
        x.stride(),
        weight.stride(0),
        1 if bias is None else bias.stride(0),
        EVEN=K % depth == 0,
        BLOCK_M=ROWS,
        BLOCK_N=columns,
        BLOCK_K=depth,
        SPLITS=splits,
        num_warps=warps,
        num_stages=stages,
        **launched_early(_multiply_few, early),
    )
    if splits > 1:
        add_splits(parts, bias, y)
    return y


@triton.jit(do_not_specialize=["M"])
def _multiply_few(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    x_strides,
    weight_row,
    bias_stride,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Multiply a tile of the weight by all rows; rows beyond the last repeat it."""
    begin_early(EARLY)
    left = tl.program_id(0) * BLOCK_N
    m = tl.arange(0, BLOCK_M).to(tl.int64)
    x_ptrs = x_ptr + tl.minimum(m, M - 1)[:, None] * x_strides[0]
    weight_ptrs = weight_ptr + clamped(left, N, BLOCK_N).to(tl.int64)[:, None] * weight_row
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    steps = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(steps, SPLITS)
    first = tl.program_id(1) * each
    for step in range(first, tl.minimum(first + each, steps)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = (k < K)[None, :]
        x = loaded(x_ptrs + k.to(tl.int64)[None, :] * x_strides[1], inside, EVEN)
        weight = loaded(weight_ptrs + k.to(tl.int64)[None, :], inside, EVEN)
        sums = added(sums, x, weight, None, None, True)
    y_ptrs = y_ptr + (tl.program_id(1).to(tl.int64) * M + m[None, :]) * N
    written(y_ptrs, bias_ptr, sums, None, None, m[None, :] < M, left, N, bias_stride, True, BLOCK_N)


def _empty(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    """Return an empty product."""
    return x.new_empty(len(x), len(weight))


_few_rows_matmul = operator(few_rows_matmul_reference, few_rows_matmul_triton, _empty)
