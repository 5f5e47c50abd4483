"""States of sequences that are scheduled, preempted, swapped, aborted, and computed again."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.runtime.step_inputs import StepInputs

# Pytest's importlib mode has no imports between test files.
HYBRID: Any = runpy.run_path(str(Path(__file__).with_name("hybrid.py")))
greedy, expected, Setup = (HYBRID[name] for name in ("greedy", "expected", "Setup"))
assert_right, schedules, setups = (HYBRID[name] for name in ("assert_right", "schedules", "setups"))
soak = HYBRID["soak"]


@given(setups, schedules)
@settings(max_examples=80)
def test_tokens_are_those_of_a_sequence_alone_whatever_the_schedule(
    setup: Setup, schedule: list[Any]
) -> None:
    """Arrivals, chunks, preemption, swapping and samples change no state."""
    asked = setup.serve(schedule)
    setup.run()
    assert_right(asked)
    assert {s.finish_reason for request, _ in asked for s in request.sequences} == {"length"}


@given(setups, schedules, st.data())
@settings(max_examples=40)
def test_states_are_right_after_aborts_and_new_weights(
    setup: Setup, schedule: list[Any], data: st.DataObject
) -> None:
    """Requests that end in mid-prompt, and steps that are dropped, leave no state behind."""

    def between(index: int) -> None:
        for number in data.draw(st.sets(st.integers(0, index), max_size=2)):
            setup.engine.abort(str(number))
        if data.draw(st.booleans()):
            setup.engine.resume()

    asked = setup.serve(schedule, between)
    setup.run()
    assert_right(asked)


@given(setups, schedules, st.data())
@settings(max_examples=70)
def test_states_are_right_after_steps_that_failed(
    setup: Setup, schedule: list[Any], data: st.DataObject
) -> None:
    """Wherever a step raises, before or after states were advanced, later tokens are right."""
    outcomes = st.sampled_from(["right"] * 3 + ["fails before", "fails after", "is interrupted"])

    def failing(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        outcome = data.draw(outcomes)
        if outcome == "fails before":
            raise RuntimeError(outcome)
        logits = setup.model(inputs, sampled)
        if outcome != "right":
            raise RuntimeError(outcome) if outcome == "fails after" else KeyboardInterrupt
        return logits

    setup.engine.execute = failing
    asked = setup.serve(schedule)
    setup.engine.execute = setup.model
    setup.run()
    assert_right(asked)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("number", [2, 5])
def test_a_step_that_failed_after_it_advanced_states(early: bool, number: int) -> None:
    """Launched in its turn or before, it is computed again from the first tokens."""
    setup = Setup(async_scheduling=early)
    launched = []

    def failing(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = setup.model(inputs, sampled)
        launched.append(inputs.num_sampled > 0)
        if len(launched) == number:
            raise RuntimeError("after all was computed")
        return logits

    setup.engine.execute = failing
    asked = []
    for index in range(3):
        request = setup.engine.add(str(index), [index] * 5, greedy(12))
        asked.append((request, expected([index] * 5, 12)))
    setup.run()
    assert launched[number - 1] == early
    assert {request.sequences[0].finish_reason for request, _ in asked} == {"length"}
    assert_right(asked)


def test_a_sequence_that_ends_in_host_memory_gives_its_state_back() -> None:
    """Aborted while it is swapped out, it leaves no slot of the host taken."""
    setup = Setup(num_pages=8, host_pages=20, host_states=2)
    for index in range(4):
        setup.engine.add(str(index), [index] * 7, greedy(16))
    while not (swapped := [s for s in setup.scheduler.waiting if s.host_state >= 0]):
        setup.engine.step()
    setup.engine.abort(swapped[0].request.request_id)
    setup.run()


@pytest.mark.parametrize("caching", [False, True])
def test_a_soak_returns_every_page_and_state(caching: bool) -> None:
    """A hundred and fifty requests of all kinds leave nothing behind."""
    soak(150, caching=caching)
