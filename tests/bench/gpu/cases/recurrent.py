"""Cases of operations with a recurrent state: prompts that begin or go on, and single tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from gpu.cases.case import BF16, FP32, Case, Tensors, short
from vllm_module.kernels.recurrent.causal_conv1d import causal_conv1d, causal_conv1d_reference
from vllm_module.kernels.recurrent.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_rule_reference,
)
from vllm_module.kernels.recurrent.mamba2_scan import mamba2_scan, mamba2_scan_reference

Inputs = Callable[[int, torch.dtype], list[Any]]  # of some tokens


def recurrences(small: bool) -> Iterator[Case]:
    """Yield steps of prompts and of single tokens, by chunks and, in float32, by tokens."""
    steps = {"64 single": [1] * 64, "prompts": [2048, 300, 1, 17, 700], "1 x 8192": [8192]}
    if small:
        steps = {"2 single": [1] * 2, "prompts": [19, 1]}
    for name, lengths in steps.items():
        for dtype in (BF16, FP32):
            if dtype == BF16 or name == "prompts":
                yield from (make(name, lengths, dtype, small) for make in (conv, scan, rule))


def conv(name: str, lengths: list[int], dtype: torch.dtype, small: bool) -> Case:
    channels, width = (24 if small else 8192), 4

    def inputs(tokens: int, dtype: torch.dtype) -> list[Any]:
        x = torch.randn(tokens, channels + channels // 2, dtype=dtype)[:, :channels]
        return [x, torch.randn(channels, width, dtype=dtype), torch.randn(channels, dtype=dtype)]

    both = partial(causal_conv1d, silu=True), lambda *args: causal_conv1d_reference(*args, True)
    title = f"causal_conv1d {name} c{channels} {short(dtype)}"
    return recurrence(title, lengths, dtype, (channels, width - 1), inputs, *both)


def scan(name: str, lengths: list[int], dtype: torch.dtype, small: bool) -> Case:
    """Have the shapes of Bamba-9B."""
    heads, groups, features, n = (2, 1, 16, 16) if small else (128, 1, 64, 128)

    def inputs(tokens: int, dtype: torch.dtype) -> list[Any]:
        x, dt = torch.randn(tokens, heads, features, dtype=dtype), torch.randn(tokens, heads)
        b, c = torch.randn(2, tokens, groups, n, dtype=dtype) / n**0.5
        a, d = -4 * torch.rand(heads), torch.randn(heads, dtype=dtype)
        return [x, dt.to(dtype), a, b, c, d, torch.randn(heads, dtype=dtype)]

    both = (partial(each, dt_min=0.0, dt_max=torch.inf) for each in
            (mamba2_scan, mamba2_scan_reference))  # fmt: skip
    title = f"mamba2_scan {name} h{heads} {features} x {n} {short(dtype)}"
    return recurrence(title, lengths, dtype, (heads, features, n), inputs, *both)


def rule(name: str, lengths: list[int], dtype: torch.dtype, small: bool) -> Case:
    """Have the shapes of Qwen3-Next-80B-A3B."""
    heads, key_heads, size = (2, 1, 16) if small else (32, 16, 128)

    def inputs(tokens: int, dtype: torch.dtype) -> list[Any]:
        q, k = torch.randn(2, tokens, key_heads, size, dtype=dtype)
        v, beta = torch.randn(tokens, heads, size, dtype=dtype), torch.rand(tokens, heads)
        return [q, k, v, F.logsigmoid(2 * torch.randn(tokens, heads)), beta.to(dtype)]

    both = (partial(each, scale=size**-0.5, l2_norm=True) for each in
            (gated_delta_rule, gated_delta_rule_reference))  # fmt: skip
    title = f"gated_delta_rule {name} h{heads}/{key_heads} {size} {short(dtype)}"
    return recurrence(title, lengths, dtype, (heads, size, size), inputs, *both)


def recurrence(
    name: str,
    lengths: list[int],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    inputs: Inputs,
    operation: Callable[..., Any],
    reference: Callable[..., Any],
) -> Case:
    """Return a case whose every second sequence goes on from a state."""

    def make() -> Tensors:
        count = len(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        contexts = torch.tensor([n + 5 * (i % 2) for i, n in enumerate(lengths)]).int()
        state = torch.randn(count + 1, *shape) / shape[-1] ** 0.5
        given = inputs(sum(lengths), dtype)
        return *given, state, torch.randperm(count + 1)[:count], starts, contexts

    def call(run: Callable[..., Any], *given: Any) -> Tensors:
        return run(*given, max(lengths)), given[-4]

    def truth(*given: Any) -> Tensors:
        wide = [x.float() if x.is_floating_point() else x for x in given]
        return call(reference, *wide)

    def rounded(result: Tensors) -> Tensors:
        # The reference adds up in float32 and would be exact. The device multiplies parts in 16
        # bits or TF32, and adds in another order: all is compared as bfloat16.
        return tuple(each.to(BF16) for each in result)

    given = sum(lengths) * 2 * shape[0] * (shape[-2] if len(shape) > 2 else 1) * dtype.itemsize
    kept = 2 * len(lengths) * 4 * int(torch.Size(shape).numel())
    return Case(
        name=name,
        make=make,
        ours=partial(call, operation),
        reference=partial(call, reference),
        truth=truth,
        meaning=rounded,
        bucket=f"{name.split()[0]}, {'single' if max(lengths) == 1 else 'prompts'}"
        if dtype == BF16
        else "",
        writes=True,
        moved=given + kept,
    )
