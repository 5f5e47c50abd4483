"""Products with weights of two, three, four or eight bits, and a scale for each group of inputs."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.operators import expect
from vllm_module.kernels.packed_words import WORDS, Packing, dequantize_packed


def packed_matmul(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    packing: Packing,
    group_size: int,
    *,
    zeros: torch.Tensor | None = None,
    group_of: torch.Tensor | None = None,
    codebook: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by a packed weight, which is dequantized for the product.

    Args:
        x: ``[..., input]``, bfloat16, float16 or float32.
        words, scales, packing, group_size, zeros, group_of, codebook: the weight ``[output,
            input]``, as for :func:`~vllm_module.kernels.packed_words.dequantize_packed`.
        bias: ``[output]``, of the dtype of ``x``.

    Returns:
        ``[..., output]``, of the dtype of ``x``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other.

    """
    expect("x", x, None, FLOATS)
    expect("words", words, (None, None), WORDS, x)
    output, columns = packing.codes(words.shape, words.dtype.itemsize * 8)
    if x.dim() < 1 or x.shape[-1] != columns:
        raise ValueError(f"x must have {columns} features, as the weight, got {list(x.shape)}")
    expect("scales", scales, (output, None), FLOATS, x)
    if zeros is not None:
        expect("zeros", zeros, scales.shape, (torch.uint8,), x)
    if group_of is not None:
        expect("group_of", group_of, (columns,), (torch.int32,), x)
    elif scales.shape[1] != -(-columns // group_size):
        raise ValueError(
            f"scales must have one column for each group of {group_size} of {columns} inputs, got "
            f"{list(scales.shape)}"
        )
    if codebook is not None:
        expect("codebook", codebook, (1 << packing.bits,), (torch.float32,), x)
    if bias is not None:
        expect("bias", bias, (output,), (x.dtype,), x)
    weight = dequantize_packed(
        words, scales, packing, group_size, x.dtype, zeros, group_of, codebook
    )
    return F.linear(x, weight, bias)
