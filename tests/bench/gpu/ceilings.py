"""The most that the device does: bytes read, bytes copied, products of large matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gpu.check import CLOSE, error
from gpu.device import Call, Gpu
from gpu.timing import Work

_BLOCK = 8192  # bytes of a program's step: 64 for each of its threads
_PROGRAMS = 132 * 8  # on every multiprocessor as many as fit


@dataclass
class Ceiling:
    """What is replayed, and what a replay does: bytes or floating-point operations."""

    work: Work
    amount: float


@triton.jit
def _read(source, sums, steps, BLOCK: tl.constexpr):  # noqa: N803 - a constant of Triton's
    """Add up a part of ``source``: nothing but the sum is written."""
    program = tl.program_id(0).to(tl.int64)
    offsets = program * steps * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for _ in range(steps):
        total += tl.load(source + offsets)
        offsets += BLOCK
    tl.store(sums + program, tl.sum(total))


def ceilings(device: Gpu, size: int = 8192, copied: int = 2 << 30) -> dict[str, Ceiling]:
    """Return the ceilings; ``size`` is of the matrices, ``copied`` bytes are read and copied."""
    if device.dry:
        size, copied = 64, 1 << 16
    with torch.device(device.name):
        words = torch.randint(2**8, (copied // 4,), dtype=torch.int32)
        a, b = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
        one = torch.ones(())
        target = torch.empty_like(words)
        sums = torch.empty(_PROGRAMS, dtype=torch.int32)
    x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    steps = len(words) // (_PROGRAMS * _BLOCK // 4)

    def read() -> None:
        if device.dry:  # the kernel needs a GPU
            words.sum()
        else:
            _read[(_PROGRAMS,)](words, sums, steps, BLOCK=_BLOCK // 4, num_warps=4)

    def multiply_fp8() -> torch.Tensor:
        return torch._scaled_mm(
            x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    amount = copied if device.dry else 4 * steps * _PROGRAMS * _BLOCK // 4
    if not device.dry:  # a rate counts only if the whole work was done
        read()
        assert int(sums.sum()) == int(words[: amount // 4].sum(dtype=torch.int64)), "a wrong sum"
    rows = slice(64)
    assert error(torch.mm(a, b)[rows], a[rows].float() @ b.float()) < CLOSE
    assert error(multiply_fp8()[rows], x[rows].float() @ y.float()) < CLOSE
    calls: dict[str, tuple[Call, float]] = {
        "read": (read, amount),
        "copy": (lambda: target.copy_(words), 2 * copied),
        "bf16": (lambda: torch.mm(a, b), 2 * size**3),
        "fp8": (multiply_fp8, 2 * size**3),
    }
    for call, _ in calls.values():
        call()
    return {name: Ceiling(Work(device.graph(call)), most) for name, (call, most) in calls.items()}


def rates(
    times: Mapping[str, Sequence[float]], ceilings: Mapping[str, Ceiling]
) -> dict[str, list[float]]:
    """Return what each ceiling did in a second, for each round."""
    return {
        name: [ceiling.amount / each for each in times[name]] for name, ceiling in ceilings.items()
    }
