"""One case of a kernel: its inputs, its reference, and torch's own ways of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPS = 1e-6
Tensors = tuple[Any, ...]


@dataclass
class Peer:
    """The same operation in torch, timed beside ours."""

    call: Callable[..., Any]
    prepare: Callable[..., Tensors] = lambda *inputs: inputs  # not timed
    judged: bool = True  # whether its result must be ours, to a few percent


@dataclass
class Case:
    """An operation on inputs of one size."""

    name: str
    make: Callable[[], Tensors]  # fresh random inputs, on torch's default device
    ours: Callable[..., Any]
    reference: Callable[..., Any]  # in plain torch and the same precision
    truth: Callable[..., Any] | None = None  # in float32; if none, the bits are the reference's
    meaning: Callable[[Any], Any] = lambda result: result  # turns a result into what truth returns
    bucket: str = ""  # the line of the summary; a case without one is checked and not timed
    writes: bool = False  # whether inputs are written to
    moved: int = 0  # bytes
    flops: int = 0
    rate: str = "bf16"  # of products, the ceiling that counts
    peers: dict[str, Peer] = field(default_factory=dict)


def short(dtype: torch.dtype) -> str:
    names = {BF16: "bf16", FP16: "fp16", FP32: "fp32", E4M3: "e4m3", E5M2: "e5m2"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def writing(operation: Callable[..., Any], *written: int) -> Callable[..., Tensors]:
    """Return the operation, made to return the arguments (by index) that it writes."""

    def call(*inputs: Any) -> Tensors:
        operation(*inputs)
        return tuple(inputs[index] for index in written)

    return call


def fused_qkv(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> Tensors:
    """Return queries, keys and values that are parts of one projection's output."""
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size, dtype=dtype)
    return qkv.split([heads, kv_heads, kv_heads], 1)


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, made to widen its inputs to float32."""

    def call(*inputs: Any) -> Any:
        return function(*(x.float() if isinstance(x, torch.Tensor) else x for x in inputs))

    return call
