"""Whether an operation computes what its reference does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
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


def check(case: Case, device: Gpu, seed: int) -> dict[str, float]:
    """Return the errors of an operation and of its reference; raise if the operation is wrong."""
    inputs = made(case, device, seed)
    results = poisoned(case.ours, inputs)
    if case.writes:
        inputs = made(case, device, seed)
    if case.truth is None:
        expected = case.reference(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs))
        for result, wanted in zip(tensors(results), tensors(expected), strict=True):
            assert result.shape == wanted.shape, f"{list(result.shape)} {list(wanted.shape)}"
            got, want = (x.cpu().contiguous().view(torch.uint8) for x in (result, wanted))
            differ = int((got != want).sum())
            assert not differ, f"{differ} of {want.numel()} bytes are not the reference's"
        return {"error": 0.0, "allowed": 0.0}
    plain = case.meaning(case.reference(*inputs))
    if case.writes:
        inputs = made(case, device, seed)
    truths = case.truth(*inputs)
    worst = {"error": 0.0, "allowed": math.inf}
    lists = (tensors(x) for x in (case.meaning(results), plain, truths))
    for result, low, truth in zip(*lists, strict=True):
        found, allowed = error(result, truth), 2 * error(low, truth) + SMALLEST
        assert found <= allowed, f"its error is {found:.3g}, and {allowed:.3g} is allowed"
        if found / allowed >= worst["error"] / worst["allowed"]:
            worst = {"error": found, "allowed": allowed}
    return worst
