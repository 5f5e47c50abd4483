"""Whether an operation computes what its reference does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu.cases.case import Case
from gpu.device import Gpu

CLOSE = 0.05  # relative difference to a peer's result, beyond which it computes something else
SMALLEST = 1e-6  # an error that float32 may have, whatever the reference's


def tensors(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result that have elements."""
    results = [result] if isinstance(result, torch.Tensor) else result
    return [x for x in results if x is not None and x.numel()]


def made(case: Case, device: Gpu, seed: int) -> tuple[Any, ...]:
    """Make a case's inputs, the same for the same seed, since an operation may write to them."""
    torch.manual_seed(seed)
    with torch.device(device.name):
        return case.make()


def poisoned(operation: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """Call with new memory full of NaN, so that unwritten elements show."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic", UserWarning)
        before = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("warn")
        try:
            return operation(*inputs)
        finally:
            torch.set_deterministic_debug_mode(before)


def error(result: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the norm of the difference over that of the truth."""
    if result.shape != truth.shape:
        raise AssertionError(f"its shape is {list(result.shape)}, and not {list(truth.shape)}")
    exact = truth.double()
    difference = (result.double() - exact).norm() / exact.norm().clamp(min=1e-30)
    return float(difference)


@dataclass
class Expected:
    """What a case's results are compared with, on the host.

    Attributes:
        bits: of the reference, if the results must have them.
        truths: of each result, in float32.
        allowed: the error of each, over the norm of its truth.

    """

    bits: list[torch.Tensor] = field(default_factory=list)
    truths: list[torch.Tensor] = field(default_factory=list)
    allowed: list[float] = field(default_factory=list)


def expected(case: Case, device: Gpu, seed: int) -> Expected:
    """Compute what a case's results are compared with: twice the reference's error is allowed."""
    inputs = made(case, device, seed)
    if case.truth is None:
        on_host = (x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs)
        return Expected(bits=tensors(case.reference(*on_host)))
    plain = tensors(case.meaning(case.reference(*inputs)))
    if case.writes:
        inputs = made(case, device, seed)
    truths = tensors(case.truth(*inputs))
    pairs = list(zip(plain, truths, strict=True))
    allowed = [2 * error(low, truth) + SMALLEST for low, truth in pairs]
    return Expected(truths=[truth.cpu() for truth in truths], allowed=allowed)


def check(case: Case, device: Gpu, seed: int, wanted: Expected) -> dict[str, float]:
    """Return the errors of an operation and what is allowed; raise if the operation is wrong."""
    results = poisoned(case.ours, made(case, device, seed))
    if case.truth is None:
        for result, bits in zip(tensors(results), wanted.bits, strict=True):
            assert result.shape == bits.shape, f"{list(result.shape)} {list(bits.shape)}"
            got, want = (x.cpu().contiguous().view(torch.uint8) for x in (result, bits))
            differ = int((got != want).sum())
            assert not differ, f"{differ} of {want.numel()} bytes are not the reference's"
        return {"error": 0.0, "allowed": 0.0}
    worst = {"error": 0.0, "allowed": math.inf}
    lists = tensors(case.meaning(results)), wanted.truths, wanted.allowed
    for result, truth, allowed in zip(*lists, strict=True):
        found = error(result, truth.to(result.device))
        assert found <= allowed, f"its error is {found:.3g}, and {allowed:.3g} is allowed"
        if found / allowed >= worst["error"] / worst["allowed"]:
            worst = {"error": found, "allowed": allowed}
    return worst
