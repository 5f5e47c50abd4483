"""The engine, with a model whose next token depends on pages and on the states of sequences."""

from __future__ import annotations

import random
import runpy
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.runtime.engine import Engine
from vllm_module.runtime.page_pool import PagePool
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.step_inputs import StepInputs

# Pytest's importlib mode has no imports between test files.
PAGED: Any = runpy.run_path(str(Path(__file__).with_name("test_engine.py")))
VOCAB, Pages, key_of, greedy = (PAGED[name] for name in ("VOCAB", "Pages", "key_of", "greedy"))
GARBAGE = 10**9  # what slots hold at first: another number each


def advance(state: int, token: int) -> int:
    return hash((state, token))


class Hybrid:
    """A model of pages, as those of test_engine.py, and a state in each row of the block tables.

    A token's logits are of the sum of its key and the state after it. Zeroing is the model's: a
    sequence whose tokens of a step are its first starts from 0.
    """

    def __init__(self, size: int, window: int | None, rows: int, host: int) -> None:
        self.pages = Pages(size, window)
        self.states = {row: GARBAGE + row for row in range(rows)}
        self.host = {slot: -GARBAGE - slot for slot in range(host)}
        self.steps: list[StepInputs] = []

    def __call__(self, inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        self.steps.append(inputs)
        if inputs.states is not None:
            self.move(inputs.states)
        tokens = inputs.input_ids if sampled is None else sampled[inputs.input_ids].tolist()
        rows = inputs.rows
        inputs.rows = list(range(len(tokens)))
        keys = self.pages(inputs, sampled).argmax(1).tolist()
        inputs.rows = rows
        for row, context, (begin, end) in zip(
            inputs.table_rows, inputs.context_lens, pairwise(inputs.query_start_loc), strict=True
        ):
            state = 0 if context == end - begin else self.states[row]
            for index in range(begin, end):
                state = advance(state, tokens[index])
                keys[index] = (keys[index] + state) % VOCAB
            self.states[row] = state
        return torch.eye(VOCAB)[[keys[row] for row in rows]]

    def move(self, moves: Any) -> None:
        for source, target in moves.swapped_out:
            self.host[target] = self.states[source]
        read = [self.states[source] for source, _ in moves.copied]
        targets = [target for _, target in moves.copied]
        assert len(set(targets)) == len(targets), "two states are copied to one slot"
        self.states.update(zip(targets, read, strict=True))
        for source, target in moves.swapped_in:
            self.states[target] = self.host[source]


def expected(prompt: list[int], count: int, window: int | None = None) -> list[int]:
    tokens = list(prompt)
    keys: list[int] = []
    state = 0
    while len(tokens) < len(prompt) + count:
        for token in tokens[len(keys) :]:
            keys.append(key_of(token, keys, window))
            state = advance(state, token)
        tokens.append((keys[-1] % VOCAB + state) % VOCAB)
    return tokens[len(prompt) :]


class Setup:
    """An engine of a model with states, whose pages run out."""

    def __init__(
        self,
        num_pages: int = 60,
        size: int = 4,
        host_pages: int = 0,
        host_states: int = 0,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        window: int | None = None,
        async_scheduling: bool = False,
    ) -> None:
        self.pool, self.host = PagePool(num_pages, size), PagePool(host_pages, size)
        self.window, self.rows, self.host_states = window, max_num_seqs, host_states
        self.scheduler = Scheduler(
            self.pool, self.host, max_num_seqs, max_num_batched_tokens, False, window,
            has_states=True, host_states=host_states,
        )  # fmt: skip
        self.model = Hybrid(size, window, max_num_seqs, host_states)
        self.engine = Engine(
            self.model, self.scheduler, VOCAB, 1000, async_scheduling=async_scheduling
        )

    def run(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.engine.requests:
                break
            self.engine.step()
        assert not self.engine.requests, "requests never end"
        self.assert_all_free()

    def assert_all_free(self) -> None:
        """Check that no page, row or state of the host is taken, and no sequence scheduled."""
        assert self.pool.free_pages == self.pool.num_pages
        assert self.host.free_pages == self.host.num_pages
        assert sorted(self.scheduler._free_rows) == list(range(self.rows))
        assert sorted(self.scheduler._free_host_states) == list(range(self.host_states))
        assert not self.scheduler._forked
        assert not self.scheduler.running
        assert not self.scheduler.waiting

    def serve(self, schedule: list[Any], between: Any = lambda index: None) -> list[Any]:
        """Add requests, with steps between them; return each with the tokens of it alone."""
        asked = []
        for index, (prompt, count, steps, n) in enumerate(schedule):
            logprobs = 0 if index % 3 == 1 else None
            params = greedy(count, n=min(n, self.rows), prompt_logprobs=logprobs)
            request = self.engine.add(str(index), prompt, params)
            asked.append((request, expected(prompt, count, self.window)))
            for _ in range(steps):
                with suppress(RuntimeError, KeyboardInterrupt):
                    self.engine.step()
            between(index)
        return asked


def assert_right(asked: list[tuple[Request, list[int]]]) -> None:
    for request, tokens in asked:
        ended_early = request.sequences[0].finish_reason in ("abort", "error")
        assert len(request.sequences) == request.params.n or ended_early
        for sequence in request.sequences:
            assert sequence.output == tokens[: len(sequence.output)]
            assert sequence.finish_reason in ("abort", "error") or sequence.output == tokens


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
schedules = st.lists(
    st.tuples(
        prompts, st.integers(1, 10), st.sampled_from([0, 0, 1, 4]), st.sampled_from([1, 1, 3, 4])
    ),
    min_size=3,
    max_size=10,
)
setups = st.builds(
    Setup,
    num_pages=st.integers(8, 20),
    size=st.sampled_from([3, 4]),
    host_pages=st.sampled_from([0, 3, 20]),
    host_states=st.sampled_from([0, 1, 5]),
    max_num_seqs=st.integers(2, 8),
    max_num_batched_tokens=st.sampled_from([1, 5, 16, 100]),
    window=st.sampled_from([None, None, 1, 6]),
    async_scheduling=st.booleans(),
)


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


def test_a_soak_returns_every_page_and_state() -> None:
    """A hundred and fifty requests of all kinds leave nothing behind."""
    soak(150)


def soak(requests: int, seed: int = 0) -> int:
    """Serve so many requests on a hybrid; return how many sequences were preempted."""
    chance = random.Random(seed)
    setup = Setup(num_pages=24, host_pages=8, host_states=2, max_num_seqs=6, async_scheduling=True)
    asked = []
    for index in range(requests):
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 40))]
        count, n = chance.randint(1, 20), chance.choice([1, 1, 1, 2, 4])
        asked.append((setup.engine.add(str(index), prompt, greedy(count, n=n)), prompt, count))
        for _ in range(chance.choice([0, 1, 5, 20])):
            setup.engine.step()
        if chance.random() < 0.1:
            setup.engine.abort(str(chance.randint(max(0, index - 5), index)))
    setup.run(10**6)
    assert_right([(request, expected(prompt, count)) for request, prompt, count in asked])
    assert setup.scheduler.preemptions
    return setup.scheduler.preemptions


if __name__ == "__main__":
    assert soak(10_000)
