"""The most that the device does: bytes read, bytes copied, products of large matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from gpu.attempt import attempt
from gpu.check import CLOSE, error
from gpu.device import Call, Gpu
from gpu.timing import Work
from gpu.worker import Emit

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


def ceilings(
    emit: Emit,
    device: Gpu,
    without: Collection[str] = (),
    size: int = 8192,
    copied: int = 2 << 30,
) -> dict[str, Ceiling]:
    """Return the ceilings that could be measured, and emit why another could not.

    Those in ``without`` are not tried. ``size`` is of the matrices; ``copied`` bytes are read and
    copied.
    """
    if device.dry:
        size, copied = 64, 1 << 16
    found: dict[str, Ceiling] = {}
    for name, make in {"read": reading, "copy": copying, "bf16": in_bf16, "fp8": in_fp8}.items():
        if name in without:
            continue

        def work(name: str = name, make: Any = make) -> dict[str, Any]:
            call, amount = make(device, size if make in (in_bf16, in_fp8) else copied)
            call()
            found[name] = Ceiling(Work(device.graph(call)), amount)
            return {"amount": amount}

        attempt(emit, {"name": f"ceiling: {name}"}, work)
    return found


def reading(device: Gpu, copied: int) -> tuple[Call, float]:
    """Read all of a tensor; the sum shows that no part was left out."""
    words = torch.randint(2**8, (copied // 4,), dtype=torch.int32, device=device.name)
    sums = torch.empty(_PROGRAMS, dtype=torch.int32, device=device.name)
    if device.dry:  # the kernel needs a GPU
        return words.sum, copied
    steps = len(words) // (_PROGRAMS * _BLOCK // 4)
    amount = 4 * steps * _PROGRAMS * _BLOCK // 4

    def read() -> None:
        _read[(_PROGRAMS,)](words, sums, steps, BLOCK=_BLOCK // 4, num_warps=4)

    read()
    assert int(sums.sum()) == int(words[: amount // 4].sum(dtype=torch.int64)), "a wrong sum"
    return read, amount


def copying(device: Gpu, copied: int) -> tuple[Call, float]:
    source = torch.randint(2**8, (copied // 4,), dtype=torch.int32, device=device.name)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * copied


def in_bf16(device: Gpu, size: int) -> tuple[Call, float]:
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=device.name)
    assert error(torch.mm(a, b)[:64], a[:64].float() @ b.float()) < CLOSE
    return lambda: torch.mm(a, b), 2 * size**3


def in_fp8(device: Gpu, size: int) -> tuple[Call, float]:
    a, b = torch.randn(2, size, size, device=device.name).to(torch.float8_e4m3fn)
    y, one = b.t(), torch.ones((), device=device.name)

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(
            a, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    assert error(multiply()[:64], a[:64].float() @ y.float()) < CLOSE
    return multiply, 2 * size**3


def rates(
    times: Mapping[str, Sequence[float]], ceilings: Mapping[str, Ceiling]
) -> dict[str, list[float]]:
    """Return what each ceiling did in a second, for each round."""
    return {
        name: [ceiling.amount / each for each in times[name]] for name, ceiling in ceilings.items()
    }
