"""Steps of a pipeline that are under way, seen from rank 0 and from the others."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_module.base.waiting import taken
from vllm_module.runtime.step_inputs import StepInputs


class StepInFlight:
    """A step that the other ranks were told of; call it for its logits, ``[rows, vocab]``."""

    def __init__(self, steps: StepsInFlight, inputs: StepInputs) -> None:
        self.inputs, self.logits = inputs, torch.empty(0)
        self._steps = steps

    def __call__(self) -> torch.Tensor:
        """Compute this rank's stage of the step, unless that was done, and return its logits."""
        self._steps.compute(self)
        return self.logits


class StepsInFlight:
    """The steps that rank 0 has yet to compute its stage of, in the order of telling others.

    Stages compute all steps in this order. So before any other message, rank 0 computes its part of
    the steps that it has told, and after an update no step has weights of two versions.

    Args:
        compute: computes a step on this rank, with what the stage before sends.

    """

    def __init__(self, compute: Callable[[StepInputs], torch.Tensor]) -> None:
        self._compute = compute
        self._steps: deque[StepInFlight] = deque()

    def add(self, inputs: StepInputs) -> StepInFlight:
        """Return a step that the others were told of."""
        self._steps.append(StepInFlight(self, inputs))
        return self._steps[-1]

    def compute(self, last: StepInFlight | None = None) -> None:
        """Compute the steps up to ``last``, or all, if that was not done."""
        while self._steps and (last is None or last in self._steps):
            step = self._steps.popleft()
            step.logits = self._compute(step.inputs)


def heard_ahead(hear: Callable[[], Any], expect: Callable[[StepInputs], object]) -> Iterator[Any]:
    """Yield the messages that ``hear`` returns, up to one called "close".

    ``expect`` is called with each step when it is heard of.

    While steps are computed, a thread receives further messages. Else rank 0, whose messages go to
    all ranks at once, would wait for the slowest stage before it told the first one of a step.
    """
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    carried_out = threading.Event()

    def receive() -> None:
        name = ""
        while name != "close":
            try:
                message = hear()
            except BaseException as error:
                arrived.put(error)
                return
            name = message[0]
            if name == "run":
                expect(message[1][0])
            arrived.put(message)
            # Other messages have a part that the main thread receives.
            if name not in ("run", "close"):
                carried_out.wait()
                carried_out.clear()

    threading.Thread(target=receive, name="messages", daemon=True).start()
    while True:
        message = taken(arrived)
        yield message
        if message[0] == "close":
            return
        if message[0] != "run":
            carried_out.set()
