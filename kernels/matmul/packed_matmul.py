"""Matmul with weights of two, three, four or eight bits and a scale for each group of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.matmul.code_rows import packed_rows
from vllm_module.kernels.matmul.code_rows_matmul import multiplied_by_codes
from vllm_module.kernels.matmul.matmul_configurations import packed_config_of
from vllm_module.kernels.matmul.packed_matmul_tiles import (
    PackedProduct,
    multiply_packed_tiles,
    tiles_take,
)
from vllm_module.kernels.matmul.packed_words import Packing, check_packed, dequantized_rows
from vllm_module.kernels.operators import checks_values, expect, operator


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
    """Multiply by a packed weight, accumulating in float32.

    On a GPU, codes are unpacked in the kernel. Codes of 3 bits, which cross word boundaries, are
    dequantized by torch before the product, some rows of the weight at a time, as on a CPU.

    On a GPU, the order of sums depends on the bucket of the number of tokens (``BUCKETS`` of
    :mod:`~vllm_module.kernels.matmul.matmul_configurations`): a token's bits depend on its own
    input and on the bucket of its batch. If torch's own matmul was chosen, and for 3 bits, they
    depend on the number of tokens.

    Args:
        x: ``[..., input]``, bfloat16, float16 or float32.
        words, scales, packing, group_size, zeros, group_of, codebook: the weight ``[output,
            input]``, as for :func:`~vllm_module.kernels.matmul.packed_words.dequantize_packed`.
        bias: ``[output]``, of the dtype of ``x``.

    Returns:
        ``[..., output]``, of the dtype of ``x``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other, words cannot have the packing,
            or, if values are checked, groups do not exist.

    """
    expect("x", x, None, FLOATS)
    expect("words", words, (None, None))
    output, columns = check_packed(x, words, scales, packing, group_size, zeros, group_of)
    if x.dim() < 1 or x.shape[-1] != columns:
        raise ValueError(f"x must have {columns} features, as the weight, got {list(x.shape)}")
    if group_of is not None and columns and checks_values(group_of):
        _expect_groups(group_of, scales.shape[1])
    if codebook is not None:
        expect("codebook", codebook, (1 << packing.bits,), (torch.float32,), x)
        if zeros is not None:
            raise ValueError("the values of a codebook have no zeros, and zeros are given")
    if bias is not None:
        expect("bias", bias, (output,), (x.dtype,), x)
    return _packed_matmul(x, words, scales, *packing, group_size, zeros, group_of, codebook, bias)


def _expect_groups(group_of: torch.Tensor, count: int) -> None:
    least, most = (int(each) for each in group_of.aminmax())
    if least < 0 or most >= count:
        raise ValueError(f"group_of must be of 0 to {count - 1}, got {least} to {most}")


def packed_matmul_reference(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    along: int,
    order: Sequence[int] | None,
    group_size: int,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor | None,
    codebook: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Dequantize some rows of the weight at a time and multiply, in plain torch."""
    packing = Packing.of(bits, along, order)
    weight = words, scales, packing, group_size, zeros, group_of, codebook
    product = multiplied_by_codes(x, packed_rows, *weight, bias=bias)
    if product is not None:
        return product
    parts, first = [x.new_empty(*x.shape[:-1], 0)], 0
    for rows in dequantized_rows(
        words, scales, packing, group_size, x.dtype, zeros, group_of, codebook
    ):
        last = first + len(rows)
        parts.append(F.linear(x, rows, None if bias is None else bias[first:last]))
        first = last
    return torch.cat(parts, -1)


def packed_matmul_triton(*arguments: Any) -> torch.Tensor:
    """Multiply by a Triton kernel; see :func:`packed_matmul`."""
    x, words, scales, *layout, group_size, zeros, group_of, codebook, bias = arguments
    packing, y = Packing.of(*layout), _empty(*arguments)
    if not tiles_take(packing) or not x.numel() or not y.numel():
        return packed_matmul_reference(*arguments)
    rows, flat = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    product = PackedProduct(
        rows, words, scales, packing, group_size, zeros, group_of, codebook, bias, flat
    )
    config = packed_config_of(len(rows), product.weight(), rows)
    if config.way == "torch":
        return packed_matmul_reference(*arguments)
    multiply_packed_tiles(product, config)
    return y


def _empty(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, *_: object) -> torch.Tensor:
    """Return an empty product."""
    return x.new_empty(*x.shape[:-1], scales.shape[0])


_packed_matmul = operator(packed_matmul_reference, packed_matmul_triton, _empty)
