"""Cases of quantizing, alone and fused into the operation before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from gpu.cases.case import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    Case,
    Tensors,
    in_float32,
    short,
    writing,
)
from gpu.cases.rows import norm_inputs
from vllm_module.kernels.rows.act_and_mul import (
    act_and_mul_quantize_reference,
    act_and_mul_reference,
    silu_and_mul_quantize,
)
from vllm_module.kernels.rows.quantize import dequantize, quantize, quantize_reference
from vllm_module.kernels.rows.rms_norm import (
    fused_add_rms_norm_reference,
    rms_norm_quantize,
    rms_norm_quantize_reference,
    rms_norm_reference,
)


def quantizers(small: bool) -> Iterator[Case]:
    shapes = [(5, 256)] if small else [(64, 4096), (300, 4097), (8192, 4096)]
    for (tokens, columns), dtype in product(shapes, (E4M3, E5M2)):
        for way, block in {
            "tensor": (tokens, columns), "token": (1, columns), "group": (1, 128),
            "block": (128, 128),
        }.items():  # fmt: skip
            scales = -(-tokens // block[0]), -(-columns // block[1])
            timed = dtype == E4M3 and tokens != 300
            yield Case(
                name=f"quantize per {way} {tokens} x {columns} to {short(dtype)}",
                make=partial(quantizer_inputs, (tokens, columns), scales, dtype, block),
                ours=writing(quantize, 1, 2),
                reference=writing(lambda *x: quantize_reference(*x[:3], *x[3]), 1, 2),
                bucket=f"quantize, {tokens} tokens" if timed else "",
                writes=True,
                moved=3 * tokens * columns + 4 * scales[0] * scales[1],
            )


def quantizer_inputs(
    shape: tuple[int, int], scales: tuple[int, int], dtype: torch.dtype, block: tuple[int, int]
) -> Tensors:
    wide = torch.randn(shape, dtype=BF16) * torch.rand(shape[0], 1, dtype=BF16)
    return wide, torch.zeros(shape, dtype=dtype), torch.zeros(scales), block


def dequantized(group: int, result: Tensors) -> Tensors:
    """Return quantized rows in float32, and the other results as they are."""
    y, scale, *others = result
    wide = dequantize(y.view(-1, y.shape[-1]), scale, (1, group), FP32)
    return wide, *others


def fused_quantizers(small: bool) -> Iterator[Case]:
    hidden, columns = (256, 384) if small else (4096, 14336)
    grid = product((5,) if small else (64, 8192), (False, True), (BF16, FP16))
    for tokens, grouped, dtype in grid:
        bucket = f"fused quantize, {tokens} tokens" if dtype == BF16 else ""
        name = f"{'group' if grouped else 'token'} {tokens} x"
        for residual in (False, True):
            group = 128 if grouped else hidden
            plain = fused_add_rms_norm_reference if residual else rms_norm_reference
            yield Case(
                name=f"{'add_' * residual}rms_norm_quantize per {name} {hidden} {short(dtype)}",
                make=partial(norm_inputs, tokens, hidden, dtype, residual),
                ours=partial(norm_quantize, rms_norm_quantize, group),
                reference=partial(norm_quantize, rms_norm_quantize_reference, group),
                truth=in_float32(plain),
                meaning=partial(dequantized, group),
                bucket=bucket,
                moved=tokens * (hidden * (3 + 4 * residual) + 4 * hidden // group),
            )
        group = 128 if grouped else columns
        yield Case(
            name=f"silu_and_mul_quantize per {name} {columns} {short(dtype)}",
            make=lambda tokens=tokens, dtype=dtype: (
                torch.randn(tokens, 2 * columns, dtype=dtype),
            ),
            ours=partial(silu_and_mul_quantize, group=group if grouped else None),
            reference=lambda x, group=group: act_and_mul_quantize_reference(
                x, "silu", E4M3, group, None
            ),
            truth=in_float32(lambda x: act_and_mul_reference(x, "silu")),
            meaning=partial(dequantized, group),
            bucket=bucket,
            moved=tokens * (columns * 5 + 4 * columns // group),
        )


def norm_quantize(operation: Callable[..., Any], group: int, x: torch.Tensor, *rest: Any) -> Any:
    residual, weight, eps = rest if len(rest) == 3 else (None, *rest)
    # The public function takes powers of two, or None for the whole row.
    whole = operation is rms_norm_quantize and group == x.shape[-1]
    static = () if operation is rms_norm_quantize else (None,)
    return operation(x, residual, weight, eps, E4M3, None if whole else group, *static)
