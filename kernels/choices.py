"""Choosing a kernel's candidate: the first one, unless another was measured to be faster.

``choices.json`` beside this file has the measured choices, by GPU name, kernel and case. Nothing is
measured while a model runs: a choice depends only on the GPU and the case, so that a result has the
same bits in every process.
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
        kernel: name of the operation.
        case: everything on which the choice may depend: shapes and dtypes of the model, and for
            matmuls the bucket of their rows. No other number of a batch, because bits may differ.
        candidates: candidates by name; the first is the default.
        device: device on which the kernel runs.

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
    """Run these candidates, by kernel, instead of the chosen ones; for checks and measurements."""
    token = _trial.set({**_trial.get(), **choices})
    try:
        yield
    finally:
        _trial.reset(token)


@cache
def _measured() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """Return the measured candidate's name by GPU, kernel and case."""
    measured: dict[str, dict[str, dict[str, str]]]
    measured = json.loads(Path(__file__).with_name("choices.json").read_text())
    return measured


@cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
