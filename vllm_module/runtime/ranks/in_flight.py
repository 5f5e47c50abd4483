"""Steps of a pipeline that are under way, seen from rank 0 and from the others."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from vllm_module.base.waiting import taken
from vllm_module.build.consistency import demand_alike
from vllm_module.distributed import together
from vllm_module.errors import ModelNotReadyError
from vllm_module.kernels.matmul.products import Products, products
from vllm_module.runtime.ranks.group import Ranks
from vllm_module.runtime.ranks.worker import SequenceMemory, Worker
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


class PipelineSteps:
    """The methods of an executor that are for several pipeline stages."""

    worker: Worker
    products: Products
    refusal: str | None
    _ranks: Ranks
    _closed: str | None
    _timeout: float
    _step_timeout: float
    _do: Callable[..., Any]
    _tell: Callable[..., None]
    _or_end: Callable[..., AbstractContextManager[None]]

    def __init__(self) -> None:
        self._in_flight = StepsInFlight(self._compute)

    def launch(self, inputs: StepInputs, sampled: torch.Tensor | None = None) -> StepInFlight:
        """Tell the other stages of a step, and return it; rank 0 computes its own stage later.

        Raises what :meth:`run` raises.
        """
        assert sampled is None, "tokens are read before their sequences are scheduled again"
        if self.refusal is not None:
            raise ModelNotReadyError(self.refusal)
        with self._or_end(self._step_timeout):
            self._tell("run", inputs, self.products)
            self._expect(inputs)
            return self._in_flight.add(inputs)

    def settle(self) -> None:
        """Compute this rank's part of steps that others are told of; they wait for it."""
        with suppress(Exception):  # which ends the engine
            if self._closed is None:
                self._in_flight.compute()

    def _expect(self, inputs: StepInputs) -> None:
        self.worker.expect(len(inputs.input_ids))

    def _compute(self, inputs: StepInputs) -> torch.Tensor:
        if self._closed is not None:
            raise RuntimeError(f"the engine has ended: {self._closed}")
        with self._or_end(self._step_timeout), products(self.products):
            result: torch.Tensor = self._do("run", inputs)
        return result

    def _load_stage(self, make: Callable[[], Worker]) -> None:
        """Load this rank's stage; all stages load, of one model, or none does."""

        def load() -> tuple[SequenceMemory, dict[str, str]]:
            self.worker = make()
            return self.worker.kept, self.worker.described

        loaded = together(load, timeout=self._timeout, group=self._ranks.control)
        kept, described = zip(*loaded, strict=True)
        demand_alike(described)
        self.worker.other_stages = kept


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
                name = message[0]
                if name == "run":
                    expect(message[1][0])
            except BaseException as error:
                arrived.put(error)
                return
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
