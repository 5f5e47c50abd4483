"""Operations with a recurrent state."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compilation.launches import FP32, Cases, meta
from vllm_module.kernels.recurrent.causal_conv1d import causal_conv1d_triton
from vllm_module.kernels.recurrent.gated_delta_rule import gated_delta_rule_triton
from vllm_module.kernels.recurrent.mamba2_scan import mamba2_scan_triton


def placed(shape: tuple[int, ...], longest: int) -> tuple[torch.Tensor | int, ...]:
    """Return states of 65 places, 64 sequences, and the tokens of the longest one."""
    integers = torch.int32
    return (
        meta(65, *shape, dtype=FP32), meta(64, dtype=torch.int64), meta(65, dtype=integers),
        meta(64, dtype=integers), longest,
    )  # fmt: skip


def convolved(
    longest: int, dtype: torch.dtype = torch.bfloat16, silu: bool = True
) -> Callable[[], object]:
    """Convolve 8192 channels, which are a part of a projection's output."""
    x = meta(4096, 12288, dtype=dtype)[:, :8192]
    weight, bias = meta(8192, 4, dtype=dtype), meta(8192, dtype=dtype)
    return lambda: causal_conv1d_triton(x, weight, bias, *placed((8192, 3), longest), silu)


def scanned(
    longest: int, features: int = 64, n: int = 128, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], object]:
    """Compute Mamba-2's recurrence with 64 heads in 8 groups."""
    x, dt = meta(4096, 64, features, dtype=dtype), meta(4096, 64, dtype=dtype)
    b, head = meta(4096, 8, n, dtype=dtype), meta(64, dtype=FP32)
    state = placed((64, features, n), longest)
    return lambda: mamba2_scan_triton(x, dt, head, b, b, head, head, *state, 0.0, 1e9)


def replaced(
    longest: int, dk: int = 128, dv: int = 128, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], object]:
    """Compute the gated delta rule with 16 heads of keys and 32 of values."""
    q, v = meta(4096, 16, dk, dtype=dtype), meta(4096, 32, dv, dtype=dtype)
    g, beta = meta(4096, 32, dtype=FP32), meta(4096, 32, dtype=dtype)
    state = placed((32, dk, dv), longest)
    return lambda: gated_delta_rule_triton(q, q, v, g, beta, *state, 0.1, True)


CASES: Cases = {
    "convolve, prompts": convolved(512),
    "convolve, single tokens": convolved(1),
    "convolve, fp32": convolved(512, FP32),
    "convolve without activation": convolved(512, silu=False),
    "scan, prompts": scanned(512),
    "scan, single tokens": scanned(1),
    "scan, 256 numbers": scanned(512, n=256),
    "scan, 16 numbers": scanned(512, 128, 16),
    "scan, fp32": scanned(512, dtype=FP32),
    "delta rule, prompts": replaced(512),
    "delta rule, single tokens": replaced(1),
    "delta rule, 64": replaced(512, 64, 64),
    "delta rule, 256": replaced(512, 256, 256),
    "delta rule, fp32": replaced(512, dtype=FP32),
}
