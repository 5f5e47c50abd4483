"""Which of a kernel's candidates runs: the first, unless another was measured to be faster.

``choices.json`` beside this file has what was measured, by the name of the GPU, the kernel and the
case. Nothing is measured while a model runs: a choice depends on the GPU and the case alone, so
that a result has the same bits in every process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch

T = TypeVar("T")

_trial: ContextVar[Mapping[str, str]] = ContextVar("trial", default=MappingProxyType({}))


def choose(kernel: str, case: str, candidates: Mapping[str, T], device: torch.device) -> T:
    """Return one of ``candidates``.

    Args:
        kernel: the name of the operation.
        case: what the choice may depend on: shapes and dtypes that are a model's own, and for
            products the bucket of their rows; no other number of a batch, since bits may differ.
        candidates: by name; the first is the default.
        device: where the kernel runs.

    Raises ``ValueError`` if ``choices.json`` or :func:`trying` names one that does not exist.

    """
    name = _trial.get().get(kernel)
    if name is None and device.type == "cuda":
        name = _measured().get(_gpu(device), {}).get(kernel, {}).get(case)
    if name is None:
        return next(iter(candidates.values()))
    if name not in candidates:
        raise ValueError(
            f"{kernel} has no candidate {name!r} for {case!r}: expected {', '.join(candidates)}"
        )
    return candidates[name]


@contextmanager
def trying(choices: Mapping[str, str]) -> Iterator[None]:
    """Run these candidates, by kernel, whatever was measured: for checks and measurements."""
    token = _trial.set({**_trial.get(), **choices})
    try:
        yield
    finally:
        _trial.reset(token)


@cache
def _measured() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """Return the chosen candidate by GPU, kernel and case."""
    measured: dict[str, dict[str, dict[str, str]]]
    measured = json.loads(Path(__file__).with_name("choices.json").read_text())
    return measured


@cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
