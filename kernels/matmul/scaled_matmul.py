"""Matmul with eight-bit weights and their scales."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from vllm_module.kernels.dtypes import FLOATS, can_convert, capability
from vllm_module.kernels.matmul.code_rows import eight_bit_rows
from vllm_module.kernels.matmul.code_rows_matmul import multiplied_by_codes
from vllm_module.kernels.matmul.matmul_configurations import (
    ScaledWeight,
    scaled_config_of,
    scaled_default_of,
)
from vllm_module.kernels.matmul.scaled_matmul_described import descriptors_take, multiply_described
from vllm_module.kernels.matmul.scaled_matmul_tiles import Product, multiply_tiles
from vllm_module.kernels.matmul.scaled_matmul_torch import multiply_by_torch, torch_takes
from vllm_module.kernels.operators import expect, operator
from vllm_module.kernels.rows.quantize import dequantize, quantize_static_triton, quantize_triton

_FP8 = torch.float8_e4m3fn


def scaled_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    *,
    quantize_input: bool = True,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply by an eight-bit weight, accumulating in float32.

    If the weight is FP8 and the GPU multiplies FP8 (compute capability 8.9), the input is quantized
    to FP8 too: by the static scale, or by a scale for each token and block of the weight's columns.
    On other devices, with INT8 weights or without ``quantize_input``, the input is not quantized.

    On a GPU, the order of sums depends on the bucket of the number of tokens (``BUCKETS`` of
    :mod:`~vllm_module.kernels.matmul.matmul_configurations`): a token's bits depend on its own
    input and on the bucket of its batch. If torch's own matmul was chosen, they depend on the
    number of tokens.

    Args:
        x: ``[..., input]``, bfloat16, float16 or float32; or float8_e4m3fn, already quantized.
        weight: ``[output, input]``, float8_e4m3fn or int8.
        scale: float32 ``[ceil(output / block[0]), ceil(input / block[1])]``.
        block: rows and columns of the weight that share a scale.
        bias: ``[output]``, of the output's dtype.
        input_scale: float32. The static scale of ``x``, one element. If ``x`` is already quantized,
            its scales: one, ``[tokens, 1]`` or ``[tokens, ceil(input / block[1])]``.
        quantize_input: True if ``x`` may be quantized.
        dtype: dtype of the output; by default that of ``x``. Required if ``x`` is already
            quantized.

    Returns:
        ``[..., output]``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.

    """
    dtype = x.dtype if dtype is None else dtype
    if dtype not in FLOATS:
        raise ValueError(f"the output must be {' or '.join(map(str, FLOATS))}, got {dtype}")
    if x.dim() < 1 or block[0] < 1 or block[1] < 1:
        raise ValueError(f"x must have features, and a block rows and columns, got {block}")
    expect("weight", weight, (None, x.shape[-1]), (_FP8, torch.int8), x)
    expect("x", x, None, (*FLOATS, _FP8))
    groups = -(-x.shape[-1] // block[1])
    expect("scale", scale, (-(-weight.shape[0] // block[0]), groups), (torch.float32,), x)
    if bias is not None:
        expect("bias", bias, weight.shape[:1], (dtype,), x)
    check_input_scale(x, weight, input_scale, groups)
    return _scaled_matmul(x, weight, scale, *block, bias, input_scale, quantize_input, dtype)


def check_input_scale(
    x: torch.Tensor, weight: torch.Tensor, input_scale: torch.Tensor | None, groups: int
) -> None:
    """Raise ``ValueError`` unless ``input_scale`` fits ``x``, whose rows have up to ``groups``."""
    if x.dtype == _FP8:
        if input_scale is None:
            raise ValueError("x is quantized, and its scale is missing")
        if weight.dtype != _FP8:
            raise ValueError(f"x is quantized, and its weight must be {_FP8}, got {weight.dtype}")
    if input_scale is not None:
        shape = tuple(input_scale.shape)
        if shape not in ((), (1,)):
            last = 1 if shape[-1] == 1 else groups
            shape = (prod(x.shape[:-1]), last) if x.dtype == _FP8 else ()
        expect("input_scale", input_scale, shape, (torch.float32,), x)


def quantizes_inputs(x: torch.Tensor) -> bool:
    """Return whether :func:`scaled_matmul` quantizes ``x`` for FP8 weights.

    The GPU must multiply FP8. Always ``False`` while a graph is traced.
    """
    # Checked first, because a CPU needs no further check.
    real = x.is_cuda and type(x) is torch.Tensor
    return real and x.dtype in FLOATS and not torch.compiler.is_compiling()


def scaled_matmul_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block_rows: int,
    block_columns: int,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    quantize_input: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Dequantize to ``dtype`` and multiply, in plain torch; no input is quantized."""
    block = block_rows, block_columns
    product = multiplied_by_codes(x, eight_bit_rows, weight, scale, block, bias=bias, dtype=dtype)
    if product is not None:
        return product
    if x.dtype == _FP8:
        rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
        x = dequantized_input(rows, input_scale, block_columns, dtype).view(x.shape)
    wide = dequantize(weight, scale, block, dtype)
    return F.linear(x.to(dtype), wide, bias)


def dequantized_input(
    x: torch.Tensor, input_scale: torch.Tensor | None, block_columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return FP8 ``x [rows, input]`` times its scales, in ``dtype``."""
    assert input_scale is not None
    scales = input_scale.expand(len(x), -(-x.shape[1] // block_columns))
    return dequantize(x, scales, (1, block_columns), dtype)


def quantized_input(
    x: torch.Tensor, input_scale: torch.Tensor | None, block_columns: int, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x [rows, input]`` in FP8, and its scales ``[rows, groups]``."""
    if x.dtype == _FP8:
        assert input_scale is not None
        return x, input_scale.expand(len(x), groups)
    quantized = torch.empty(x.shape, dtype=_FP8, device=x.device)
    if input_scale is None:
        scales = torch.empty(len(x), groups, dtype=torch.float32, device=x.device)
        quantize_triton(x, quantized, scales, 1, block_columns)
    else:
        scales = input_scale.expand(len(x), groups)
        quantize_static_triton(x, quantized, scales, 1, block_columns)
    return quantized, scales


def scaled_matmul_triton(*arguments: Any) -> torch.Tensor:
    """Multiply by Triton kernels; see :func:`scaled_matmul`."""
    x, weight, scale, block_rows, block_columns, bias, input_scale, quantize, dtype = arguments
    if not can_convert(weight.dtype, weight) or not x.numel() or not weight.numel():
        return scaled_matmul_reference(*arguments)
    y = torch.empty(*x.shape[:-1], weight.shape[0], dtype=dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    (M, K), N = rows.shape, weight.shape[0]
    block, x_scale = (block_rows, block_columns), None
    if x.dtype == _FP8 or (weight.dtype == _FP8 and quantize):
        rows, x_scale = quantized_input(rows, input_scale, block_columns, scale.shape[1])
    product = Product(rows, weight, scale, x_scale, block, bias, y.view(M, N))
    described = ScaledWeight(N, K, block, rows.dtype, capability(rows))
    config = scaled_config_of(M, described, rows)
    if config.way == "torch" and torch_takes(product):
        multiply_by_torch(product)
    elif config.way == "descriptors" and descriptors_take(product):
        multiply_described(product, config)
    else:
        if config.way != "pointers":
            config = scaled_default_of(M, described)
        multiply_tiles(product, config)
    return y


def _empty(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return an empty product."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=others[-1])


_scaled_matmul = operator(scaled_matmul_reference, scaled_matmul_triton, _empty)
