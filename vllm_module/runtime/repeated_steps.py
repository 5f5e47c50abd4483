"""Repeating a step that failed, to find the request at fault and compute the others."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm_module.base.messages import describe_error
from vllm_module.runtime.launched import Launched
from vllm_module.runtime.requests import Requests
from vllm_module.runtime.sequence import Request, Sequence
from vllm_module.runtime.step_inputs import Step

_log = logging.getLogger(__name__)


class RepeatedSteps(Requests):
    """The methods of an engine that repeat a failed step, each sequence by itself.

    Attributes:
        repeatable: whether the model can be run again after it has raised.

    """

    repeatable: bool
    _launch: Callable[[Step], Launched]
    _finish_step: Callable[[Launched], list[Request]]
    _read_prompt_logprobs: Callable[[Launched], None]

    def _compute_apart(self, step: Step, error: Exception) -> list[Request]:
        """Compute each sequence of a failed step by itself; end requests that fail again.

        If layers have states, which the step may have advanced, all running sequences start over,
        and each of the step is computed from its first token.

        Raises ``error`` if the request at fault cannot be found: pages were moved, which cannot be
        repeated, or every sequence fails, or no other request is left.
        """
        if not self.repeatable or step.moves:
            raise error
        computed: list[Launched] = []
        failed: dict[Request, Exception] = {}
        ends = [sequence.num_computed + count for sequence, count in step.scheduled]
        if self.scheduler.has_states and len(step.scheduled) > 1:
            self.scheduler.start_over()
        for (sequence, _), end in zip(step.scheduled, ends, strict=True):
            try:
                if len(step.scheduled) == 1:
                    raise error
                if (alone := self._launch_alone(sequence, end)) is not None:
                    assert alone.logits is not None
                    alone.logits = alone.logits.clone()  # the next graph writes where these are
                    computed.append(alone)
            except Exception as again:
                failed[sequence.request] = again
        if not computed and (len(step.scheduled) > 1 or len(self.requests) == 1):
            raise error
        _log.warning(
            "a step%s failed and was repeated for each of its sequences alone: %s",
            step.of_requests(),
            describe_error(error),
        )
        for request, cause in failed.items():
            reason = f"a step with this request alone failed: {describe_error(cause)}"
            self._end_request(request, "error", reason)
        changed = list(failed)
        for launched in computed:
            if launched.step.scheduled[0][0].finish_reason is None:
                changed += self._finish_step(launched)
        return list(dict.fromkeys(changed))

    def _launch_alone(self, sequence: Sequence, end: int) -> Launched | None:
        """Compute the tokens of one sequence up to ``end``; return its last step, launched.

        Returns None if other sequences, which start over too, have left too few pages.
        """
        while True:
            step = self.scheduler.schedule_alone(sequence, end)
            if step is None:
                return None
            launched = self._launch(step)
            if sequence.num_computed + step.scheduled[0][1] == end:
                return launched
            self.scheduler.mark_computed(step)
            self._read_prompt_logprobs(launched)
