"""The steps of an engine one by one, by the loop that ``LLM.generate`` runs."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from vllm_module.runtime.engine import Engine
from vllm_module.runtime.metrics import StepStats
from vllm_module.runtime.sequence import Request


def unchanged(request: Request) -> Any:
    """Return a request as its own output, which takes no time."""
    return request


def steps(engine: Engine, requests: Iterable[Request]) -> Generator[StepStats, None, None]:
    """Serve requests, and yield the measurements of each step that gives one of them a token."""
    stats: list[StepStats] = []
    for _ in engine.serve(requests, unchanged, every_token=True, on_step=stats.append):
        yield from stats[-1:]
        stats.clear()
