"""Whatever the schedule, requests get the tokens that they would get alone."""

from __future__ import annotations

import random
import runpy
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.runtime.sequence import Request
from vllm_module.runtime.step_inputs import StepInputs

# Pytest's importlib mode has no imports between test files.
PAGED: Any = runpy.run_path(str(Path(__file__).with_name("paged.py")))
VOCAB, keys_of, expected, Setup, greedy = (
    PAGED[name] for name in ("VOCAB", "keys_of", "expected", "Setup", "greedy")
)
# Prompts of two different tokens, so that many have a common prefix.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
schedules = st.lists(
    st.tuples(
        prompts, st.integers(1, 10), st.sampled_from([0, 0, 1, 4]), st.sampled_from([1, 1, 3])
    ),
    min_size=3,
    max_size=10,
)
setups = st.builds(
    Setup,
    num_pages=st.integers(8, 20),
    size=st.sampled_from([3, 4]),
    host_pages=st.sampled_from([0, 3, 20]),
    max_num_seqs=st.integers(3, 8),
    max_num_batched_tokens=st.sampled_from([1, 5, 16, 100]),
    prefix_caching=st.booleans(),
    window=st.sampled_from([None, None, 1, 6]),
    async_scheduling=st.booleans(),
    batches=st.sampled_from([1, 1, 2, 3]),
)


@given(setups, schedules)
@settings(max_examples=300)
def test_tokens_are_those_of_a_sequence_alone_whatever_the_schedule(
    setup: Setup, schedule: list[tuple[list[int], int, int, int]]
) -> None:
    """Arrivals, chunks, page sizes, preemption, swapping, prefixes and samples change no token."""
    asked = []
    for index, (prompt, count, steps, n) in enumerate(schedule):
        params = greedy(count, n=n, prompt_logprobs=0 if index % 3 == 1 else None)
        request = setup.engine.add(str(index), prompt, params)
        asked.append((request, expected(prompt, count, setup.window)))
        for _ in range(steps):
            setup.engine.step()
    setup.run()
    for request, tokens in asked:
        assert [sequence.output for sequence in request.sequences] == [tokens] * request.params.n
        assert {sequence.finish_reason for sequence in request.sequences} == {"length"}
        if request.params.prompt_logprobs is not None:
            assert_prompt_logprobs(request, setup.window)


def assert_prompt_logprobs(request: Request, window: int | None) -> None:
    """Check that the prompt's tokens have the logprobs that the model gives them."""
    prompt, logprobs = request.prompt_token_ids, request.prompt_logprobs
    assert logprobs is not None
    assert len(logprobs) == len(prompt)
    likely = torch.tensor([1.0] + [0.0] * (VOCAB - 1)).log_softmax(0)
    keys = keys_of(prompt, window)
    for position, entry in enumerate(logprobs[1:], start=1):
        wanted = likely[0] if keys[position - 1] % VOCAB == prompt[position] else likely[1]
        assert entry is not None
        assert entry[prompt[position]].logprob == pytest.approx(float(wanted))


@given(setups, schedules, st.data())
@settings(max_examples=75)
def test_aborted_requests_free_their_pages_and_change_no_other_request(
    setup: Setup, schedule: list[tuple[list[int], int, int, int]], data: st.DataObject
) -> None:
    """Requests aborted at any time leave the other requests' tokens alone, and free all pages."""
    asked = []
    for index, (prompt, count, steps, n) in enumerate(schedule):
        asked.append((setup.engine.add(str(index), prompt, greedy(count, n=n)), prompt, count))
        for _ in range(steps):
            setup.engine.step()
        gone = data.draw(st.sets(st.integers(0, index), max_size=2))
        for number in gone:
            setup.engine.abort(str(number))
    setup.run()
    for request, prompt, count in asked:
        tokens = expected(prompt, count, setup.window)
        for sequence in request.sequences:
            if sequence.finish_reason == "length":
                assert sequence.output == tokens
            else:
                assert sequence.finish_reason == "abort"
                assert sequence.output == tokens[: len(sequence.output)]


@given(setups, schedules, st.data())
@settings(max_examples=75)
def test_block_tables_are_right_after_steps_that_failed(
    setup: Setup, schedule: list[tuple[list[int], int, int, int]], data: st.DataObject
) -> None:
    """Wherever a step raises, before or after the tables were written, later tokens are right."""
    outcomes = st.sampled_from(["right"] * 3 + ["fails before", "fails after", "is interrupted"])

    def failing(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        outcome = data.draw(outcomes) if len(inputs.table_rows) > 1 else "right"
        if outcome == "fails before":
            raise RuntimeError(outcome)
        logits = setup.pages(inputs, sampled)
        if outcome != "right":
            raise RuntimeError(outcome) if outcome == "fails after" else KeyboardInterrupt
        return logits

    setup.engine.execute = failing
    asked = []
    for index, (prompt, count, steps, n) in enumerate(schedule):
        asked.append((setup.engine.add(str(index), prompt, greedy(count, n=n)), prompt, count))
        for _ in range(steps):
            with suppress(RuntimeError, KeyboardInterrupt):
                setup.engine.step()
    setup.engine.execute = setup.pages
    setup.run()
    for request, prompt, count in asked:
        tokens = expected(prompt, count, setup.window)
        for sequence in request.sequences:
            assert sequence.output == tokens[: len(sequence.output)]
            assert sequence.finish_reason == "error" or sequence.output == tokens


def test_threads_share_an_engine() -> None:
    """Requests of several threads are computed together, each as if it were alone."""
    setup = Setup(num_pages=40, host_pages=4)
    wrong: list[Any] = []

    def serve(thread: int) -> None:
        for index in range(20):
            prompt = [thread % 3, index % 3]
            request = setup.engine.add(f"{thread}-{index}", prompt, greedy(6))
            if index % 5 == 4:
                setup.engine.abort(request.request_id)
                continue
            while not request.finished:
                setup.engine.step()
            if request.error or request.sequences[0].output != expected(prompt, 6):
                wrong.append(request)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=serve, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    setup.run()


def test_a_soak_keeps_nothing_but_the_pages() -> None:
    """After thousands of requests, many of them aborted, no memory but the pages is in use."""
    setup = Setup(num_pages=9, host_pages=6)
    draw = random.Random(0).randrange
    swapped = 0
    for index in range(3000):
        prompt = [draw(2) for _ in range(1 + draw(12))]
        request = setup.engine.add(str(index), prompt, greedy(1 + draw(6), n=1 + draw(2)))
        if draw(4) == 0:
            aborted = setup.engine.requests.get(str(index - draw(14)))
            if aborted is not None:
                swapped += any(sequence.host_pages for sequence in aborted.sequences)
                setup.engine.abort(aborted.request_id)
        while len(setup.engine.requests) > 12:
            for request in setup.engine.step():
                tokens = expected(request.prompt_token_ids, request.params.max_tokens)
                for sequence in request.sequences:
                    assert sequence.output == tokens[: len(sequence.output)]
        setup.pages.steps.clear()
    setup.run()
    assert setup.scheduler.preemptions > 300
    assert swapped > 3  # aborted while they were swapped out
    assert len(setup.pool._cached) == len(setup.pool._keys) <= setup.num_pages
    assert setup.engine.requests == {}


@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("dropping", ["drop", "resume"])
def test_what_is_in_flight_when_steps_are_dropped_is_computed_again(
    batches: int, dropping: str
) -> None:
    """After any number of steps, so that prompts, outputs and ends are under way."""
    flew = 0
    for steps in range(12):
        setup = Setup(num_pages=40, batches=batches)
        prompts = [[at] * (3 + at) for at in range(5)]
        requests = [
            setup.engine.add(str(at), prompt, greedy(4 + at % 2))
            for at, prompt in enumerate(prompts)
        ]
        for _ in range(steps):
            setup.engine.step()
        flew += bool(setup.scheduler.in_flight)
        getattr(setup.engine, dropping)()
        setup.run(100)
        for prompt, request in zip(prompts, requests, strict=True):
            (sequence,) = request.sequences
            assert sequence.output == expected(prompt, request.params.max_tokens or 0)
    assert (flew > 5) == (batches > 1)
