"""What works on rows: norms, gated activations, quantization, drawing tokens, digests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compilation.launches import E4M3, FP32, Cases, meta, tried
from vllm_module.kernels.digest.boxes import matrices
from vllm_module.kernels.digest.digest_matrix import digest_matrix_triton
from vllm_module.kernels.rows.act_and_mul import (
    act_and_mul_quantize_triton,
    act_and_mul_triton,
    swiglu_oai_and_mul_triton,
)
from vllm_module.kernels.rows.adjust_logits import adjust_logits_triton, count_tokens_triton
from vllm_module.kernels.rows.draw_tokens import draw_tokens_triton
from vllm_module.kernels.rows.quantize import quantize_static_triton, quantize_triton
from vllm_module.kernels.rows.rms_norm import (
    fused_add_rms_norm_triton,
    rms_norm_quantize_triton,
    rms_norm_triton,
)
from vllm_module.kernels.rows.token_logprobs import token_logprobs_triton


def norm(
    rows: int,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
    residual: bool = False,
    group: int | None = None,
    offset: float | None = None,
) -> Callable[[], object]:
    """Normalize rows, with or without a residual, and quantize by groups (0: by a static scale)."""

    def launch() -> None:
        x, weight = meta(2, rows, columns, dtype=dtype)[0], meta(columns, dtype=dtype)
        added = x if residual else None
        if group is not None:
            scale = meta(1, dtype=FP32) if group == 0 else None
            rms_norm_quantize_triton(x, added, weight, 1e-6, E4M3, group, scale, offset)
        elif added is not None:
            fused_add_rms_norm_triton(x, added, weight, 1e-6, offset)
        else:
            rms_norm_triton(x, weight, 1e-6, offset)

    return launch


def norm_of_heads() -> object:
    query = meta(8192, 6144)[:, :4096].unflatten(-1, (32, 128))
    return rms_norm_triton(query, meta(128), 1e-6)


def gated(columns: int, activation: str, group: int | None = None) -> Callable[[], object]:
    """Multiply by an activated gate, and quantize by groups (0: by a static scale)."""

    def launch() -> object:
        x = meta(8192, 2 * columns)
        if group is None:
            return act_and_mul_triton(x, activation)
        scale = meta(1, dtype=FP32) if group == 0 else None
        return act_and_mul_quantize_triton(x, activation, E4M3, group, scale)

    return launch


def quantized(
    rows: int, columns: int, block: tuple[int, int], dtype: torch.dtype, static: bool = False
) -> Callable[[], object]:
    """Quantize by blocks, with computed or given scales."""
    scale = meta(-(-rows // block[0]), -(-columns // block[1]), dtype=FP32)
    quantize = quantize_static_triton if static else quantize_triton
    return lambda: quantize(meta(rows, columns), meta(rows, columns, dtype=dtype), scale, *block)


def adjusted(dtype: torch.dtype) -> Callable[[], object]:
    """Count tokens, and adjust and rank logits of 64 rows."""
    longs, doubles = meta(64, 8, dtype=torch.int64), meta(64, 3, dtype=torch.float64)
    table, tokens = meta(2, 64, 1024, dtype=torch.int32), meta(64, dtype=torch.int64)
    logits = meta(64, 151936, dtype=dtype)

    def launch() -> None:
        count_tokens_triton(table, longs, tokens, tokens)
        adjust_logits_triton(logits, longs, doubles, doubles, tokens, table)
        for width in (0, 20):
            token_logprobs_triton(logits, tokens, tokens, width)

    return launch


def drawn(dtype: torch.dtype) -> Callable[[], object]:
    """Draw tokens of 64 rows by all searches."""
    rows, settings = meta(64, dtype=torch.int64), meta(64, 5, dtype=torch.float64)
    return lambda: draw_tokens_triton(meta(64, 151936, dtype=dtype), rows, settings, True, True)


def digested(*shape: int, dtype: torch.dtype) -> Callable[[], object]:
    """Add up a box at the end of a tensor that has another row."""
    starts = 1, *[0] * (len(shape) - 1)
    whole = shape[0] + 1, *shape[1:]

    def launch() -> None:
        for matrix in matrices(meta(*shape, dtype=dtype), starts, whole):
            digest_matrix_triton(*matrix)

    return launch


CASES: Cases = {
    "norm 4096": norm(8192, 4096),
    "norm 1024": norm(8192, 1024),
    "norm 5120": norm(8192, 5120),
    "norm 32768": norm(64, 32768),
    "norm of heads": norm_of_heads,
    "add-norm 4096": norm(8192, 4096, residual=True),
    "add-norm 3584, offset": norm(8192, 3584, residual=True, offset=1.0),
    "add-norm 2880, rounded once": norm(8192, 2880, residual=True, offset=0.0),
    "norm 16384, fp32, offset": norm(64, 16384, FP32, offset=1.0),
    "add-norm 16384, fp32": norm(64, 16384, FP32, residual=True),
    "silu 14336": gated(14336, "silu"),
    "silu 768": gated(768, "silu"),
    "gelu 14336": gated(14336, "gelu"),
    "gelu_tanh 14336": gated(14336, "gelu_tanh"),
    "quantize to int8 by token": quantized(4096, 4096, (1, 4096), torch.int8),
    "quantize to int8 by tensor": quantized(4096, 4096, (4096, 4096), torch.int8),
    "draw tokens": drawn(torch.bfloat16),
    "draw tokens, fp32": drawn(FP32),
    "adjust logits": adjusted(torch.bfloat16),
    "adjust logits, fp32": adjusted(FP32),
    "digest bf16": digested(4096, 4096, dtype=torch.bfloat16),
    "digest fp32, one row": digested(2**31, dtype=FP32),
    "digest bytes, 16": digested(128, 5760, 90, 16, dtype=torch.uint8),
    "digest int64": digested(64, 4096, dtype=torch.int64),
    "swiglu of gpt-oss": lambda: swiglu_oai_and_mul_triton(meta(8192, 5760), 1.702, 7.0),
}
HOPPER: Cases = {
    "norm, launched early": tried("rms_norm", "launched early", norm(16, 4096)),
    "add-norm to FP8 by token": norm(8192, 4096, residual=True, group=4096),
    "add-norm to FP8 by group": norm(8192, 7168, residual=True, group=128),
    "add-norm to FP8 by token, 8192": norm(64, 8192, residual=True, group=8192),
    "add-norm to FP8 by token, offset": norm(8192, 3584, residual=True, group=4096, offset=1.0),
    "norm to FP8, static": norm(8192, 4096, group=0),
    "silu to FP8 by token": gated(14336, "silu", 14336),
    "silu to FP8 by token, 29568": gated(29568, "silu", 29568),
    "gelu to FP8 by token, 16384": gated(16384, "gelu", 16384),
    "gelu to FP8 by token, 32768": gated(32768, "gelu", 32768),
    "gelu_tanh to FP8 by token, 32768": gated(32768, "gelu_tanh", 32768),
    "silu to FP8 by group": gated(14336, "silu", 128),
    "silu to FP8, static": gated(14336, "silu", 0),
    "quantize by token": quantized(4096, 4096, (1, 4096), E4M3),
    "quantize by token, 28672": quantized(4096, 28672, (1, 28672), E4M3),
    "quantize by token, 100000": quantized(1, 100000, (1, 100000), E4M3),
    "quantize by group": quantized(4096, 4096, (1, 128), E4M3),
    "quantize by block": quantized(4096, 4096, (128, 128), E4M3),
    "quantize by tensor": quantized(4096, 4096, (4096, 4096), E4M3),
    "quantize, static": quantized(4096, 4096, (4096, 4096), E4M3, static=True),
}
