"""Faults in every part of a dry run, for the test that the other parts' figures are kept.

A process that jobs are forked from imports this last.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from gpu import candidates, ceilings, engine, engine_checks, kernel_checks, loading
from gpu.attempt import attempt


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def failing_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, whose first call in a process fails."""
    calls: list[Any] = [fails]
    return lambda *args, **kwargs: (calls.pop() if calls else function)(*args, **kwargs)


def dies_with_0_6b(emit: Any, device: Any, model: str, *args: Any, **kwargs: Any) -> None:
    if model == "Qwen3-0.6B":
        os._exit(9)
    _serve(emit, device, model, *args, **kwargs)


def loads_after_a_failure(emit: Any, *args: Any) -> None:
    attempt(emit, {"name": "loads of planted"}, fails)
    _load(emit, *args)


_serve, _load = engine.main, loading.main
engine.main = dies_with_0_6b  # type: ignore[assignment]
engine_checks.CHECKS["tokens"] = lambda test, *_: test("planted", fails)
kernel_checks.checked = failing_once(kernel_checks.checked)  # type: ignore[assignment]
for name in ("reading", "copying"):
    setattr(ceilings, name, fails)
loading.main = loads_after_a_failure
candidates.decide = failing_once(candidates.decide)  # type: ignore[assignment]
