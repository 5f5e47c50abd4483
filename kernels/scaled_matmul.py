"""Multiplying by an eight-bit weight with scales."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vllm_module.kernels.quantize import dequantize, greatest


def scaled_matmul_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize the weight to ``x.dtype`` and multiply, in plain torch.

    Args:
        x: ``[..., input]``.
        weight: ``[output, input]``, float8_e4m3fn or int8.
        scale: float32 ``[ceil(output / block[0]), ceil(input / block[1])]``.
        block: rows and columns of the weight that share a scale.
        bias: ``[output]``.

    Returns:
        ``[..., output]``.

    """
    return F.linear(x, dequantize(weight, scale, block, x.dtype), bias)


def scaled_matmul_rowwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply in FP8 by ``torch._scaled_mm``: a scale for each token and each output feature.

    Args:
        x: ``[..., input]``, bfloat16 or float16; ``input`` a multiple of 16.
        weight: float8_e4m3fn ``[output, input]``; ``output`` a multiple of 16.
        scale: float32 ``[output, 1]``.
        bias: ``[output]``, as ``x``.
        input_scale: float32 ``[]``, the static scale of ``x``; each token's own unless given.

    Returns:
        ``[..., output]``, as ``x``.

    """
    tokens = x.reshape(-1, x.shape[-1])
    most = greatest(weight.dtype)
    if input_scale is None:
        # At least what vLLM takes, so that a token of zeros stays zero.
        x_scale = tokens.abs().amax(-1, keepdim=True).float().div(most).clamp_(min=1e-12)
    else:
        x_scale = input_scale.repeat(len(tokens), 1)  # not a view: of one token its stride is 0
    quantized = (tokens.float() / x_scale).clamp_(-most, most).to(weight.dtype)
    y = torch._scaled_mm(
        quantized, weight.t(), scale_a=x_scale, scale_b=scale.t(), bias=bias, out_dtype=x.dtype
    )
    return y.view(*x.shape[:-1], -1)


def scaled_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    *,
    quantize_input: bool = True,
) -> torch.Tensor:
    """Multiply by whatever fits: FP8 units of a CUDA device, else dequantize and multiply.

    Arguments are those of :func:`scaled_matmul_reference` and :func:`scaled_matmul_rowwise`;
    without ``quantize_input`` the weight alone is in eight bits.
    """
    by_rows = block == (1, weight.shape[1]) and weight.dtype == torch.float8_e4m3fn
    if quantize_input and by_rows and x.is_cuda and _has_fp8(x, weight):
        return scaled_matmul_rowwise(x, weight, scale, bias, input_scale)
    return scaled_matmul_reference(x, weight, scale, block, bias)


def _has_fp8(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``torch._scaled_mm`` takes a scale for each row here (Hopper and later)."""
    aligned = all(size % 16 == 0 for size in weight.shape) and x.numel() > 0
    # By rows, it gives bfloat16.
    taken = aligned and x.dtype == torch.bfloat16
    return taken and torch.cuda.get_device_capability(x.device) >= (9, 0)
