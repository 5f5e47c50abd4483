"""What a load would do: which parts of which tensors it would read, and the memory that takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vllm_module.assignment import Assignment
from vllm_module.report import LoadReport
from vllm_module.weights import Weight


class PlannedRead(NamedTuple):
    """One part of a checkpoint tensor that this rank would read, and the slot it is for."""

    name: str
    parameter: str
    slot: str | None
    source: Weight


class LoadPlan(NamedTuple):
    """What :meth:`vLLMModule.load_weights` would do with some weights."""

    report: LoadReport
    assignments: list[Assignment]

    def reads(self) -> Iterator[PlannedRead]:
        """Yield every part that this rank would read, its handle narrowed to what is kept."""
        for each in self.assignments:
            for source, _ in each.cut():
                yield PlannedRead(each.name, each.location.path, each.slot, source)
