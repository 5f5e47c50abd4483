"""Matmul with FP8 weights by torch, which calls cuBLAS and CUTLASS.

This is no operation by itself: it belongs to :mod:`~vllm_module.kernels.matmul.scaled_matmul`.
"""

from __future__ import annotations

import torch

from vllm_module.kernels.matmul.scaled_matmul_tiles import Product


def torch_takes(product: Product) -> bool:
    """Return whether torch supports these scales, layouts and dtypes."""
    x, weight, scale, x_scale, _, bias, y = product
    return (
        x_scale is not None
        and y.dtype == torch.bfloat16
        and len(x) > 1  # the layout of one token's scales is not visible in their strides
        and (scale.shape[1] == 1 or len(x) % 4 == 0)  # cuBLAS's rule for block scales
        and all(each.stride(1) == 1 and each.stride(0) % 16 == 0 for each in (x, weight))
        and all(each.is_meta or each.data_ptr() % 16 == 0 for each in (x, weight, y))
        and scale.is_contiguous()
        and (bias is None or bias.is_contiguous())
    )


def multiply_by_torch(product: Product) -> None:
    """Multiply by ``torch._scaled_mm``, whose sums of FP8 products are promoted as ours are.

    It supports a scale for ``x`` and one for the weight; scales for each token and each output; or,
    from torch 2.9 on, a scale for each token and 128 inputs and one for each block of 128 by 128.
    """
    x, weight, scale, x_scale, _, bias, y = product
    assert x_scale is not None
    if scale.shape[1] > 1:
        # Column by column: tokens are adjacent in memory.
        x_scale = x_scale.t().contiguous().t()
    elif scale.numel() == 1 and x_scale.stride(0) == 0:
        x_scale = x_scale[:1]
    else:
        x_scale = x_scale.contiguous()
        scale = scale.expand(len(weight), 1).contiguous()
    torch._scaled_mm(
        x, weight.t(), scale_a=x_scale, scale_b=scale.t(), bias=bias, out_dtype=y.dtype, out=y
    )
