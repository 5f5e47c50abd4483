"""Multiplying by eight-bit weights."""

from __future__ import annotations

import pytest
import torch

from vllm_module.kernels.quantize import dequantize, quantize
from vllm_module.kernels.scaled_matmul import scaled_matmul, scaled_matmul_rowwise


def quantized(rows: int, columns: int, block: tuple[int, int], dtype=torch.float8_e4m3fn):
    weight = torch.empty(rows, columns, dtype=dtype)
    scale = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    quantize(torch.randn(rows, columns), weight, scale, block)
    return weight, scale


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("block", [(1, 24), (5, 7), (40, 24)])
def test_the_cpu_multiplies_by_the_dequantized_weight(block, dtype: torch.dtype) -> None:
    """Activations stay as they are, in their own dtype, whether or not they could be quantized."""
    weight, scale = quantized(40, 24, block, dtype)
    for wide in (torch.float32, torch.bfloat16):
        x, bias = torch.randn(2, 3, 24, dtype=wide), torch.randn(40, dtype=wide)
        y = scaled_matmul(x, weight, scale, block, bias)
        assert y.dtype == wide
        expected = x.double() @ dequantize(weight, scale, block, wide).double().t() + bias
        eps = torch.finfo(wide).eps
        torch.testing.assert_close(y.double(), expected, rtol=eps, atol=24 * eps)


@pytest.mark.parametrize("tokens", [(5,), (2, 3), (1,)])
@pytest.mark.parametrize("static", [False, True])
def test_fp8_by_rows_is_what_fp8_numbers_multiply_to(tokens, static: bool) -> None:
    """torch's scaled matmul, which serves Hopper: both sides are rounded to FP8, and no more."""
    weight, scale = quantized(48, 32, (1, 32))
    x, bias = torch.randn(*tokens, 32).bfloat16(), torch.randn(48).bfloat16()
    x[0] *= 100
    input_scale = x.abs().max().float() / 448 if static else None
    y = scaled_matmul_rowwise(x, weight, scale, bias, input_scale)
    assert (y.shape, y.dtype) == ((*tokens, 48), torch.bfloat16)
    x_scale = input_scale if static else x.abs().amax(-1, keepdim=True).float() / 448
    rounded = (x.float() / x_scale).to(torch.float8_e4m3fn).double() * x_scale
    expected = rounded @ (weight.double() * scale).t() + bias.double()
    error = (y.double() - expected).abs()
    assert bool((error <= expected.abs() * 2**-7 + 1e-2).all()), error.max()


def test_a_token_of_zeros_stays_zero() -> None:
    """Padding in a batch does not become NaN."""
    weight, scale = quantized(16, 16, (1, 16))
    y = scaled_matmul_rowwise(torch.zeros(2, 16).bfloat16(), weight, scale)
    assert torch.equal(y, torch.zeros(2, 16).bfloat16())
