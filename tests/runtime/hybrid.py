"""An engine whose model's next token depends on pages and on the states of sequences.

As a script, it serves twenty thousand requests of all kinds.
"""

from __future__ import annotations

import random
import runpy
from contextlib import suppress
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from vllm_module.runtime.cache.page_pool import ROOT, PagePool
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.step_inputs import StepInputs

# Pytest's importlib mode has no imports between test files.
PAGED: Any = runpy.run_path(str(Path(__file__).with_name("engine") / "paged.py"))
VOCAB, Pages, key_of, greedy = (PAGED[name] for name in ("VOCAB", "Pages", "key_of", "greedy"))
GARBAGE = 10**9  # what slots hold at first: another number each


def advance(state: int, token: int) -> int:
    return hash((state, token))


class Hybrid:
    """A model of pages, as those of engine/paged.py, and a state in each row of the block tables.

    Saved states are in as many slots more.

    A token's logits are of the sum of its key and the state after it. Zeroing is the model's: a
    sequence whose tokens of a step are its first starts from 0.
    """

    def __init__(self, size: int, window: int | None, rows: int, host: int) -> None:
        self.pages = Pages(size, window)
        self.states = {slot: GARBAGE + slot for slot in range(2 * rows)}
        self.rows = rows
        self.hits = 0
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
        self.hits += sum(source >= self.rows for source, _ in moves.copied)
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
        prefix_caching: bool = False,
    ) -> None:
        self.pool, self.host = PagePool(num_pages, size), PagePool(host_pages, size)
        self.window, self.rows, self.host_states = window, max_num_seqs, host_states
        self.scheduler = Scheduler(
            self.pool, self.host, max_num_seqs, max_num_batched_tokens, prefix_caching, window,
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
        saved, slots = self.scheduler.saved, range(self.rows, 2 * self.rows)
        if self.scheduler.prefix_caching:
            assert sorted([*saved._slots.values(), *saved._free]) == list(slots)
        else:
            assert not saved._slots
        self.assert_saved_states()

    def assert_saved_states(self) -> None:
        """Check that each saved state is of a prefix in the index, and is the state after it."""
        parts = {prefix: key for key, (_, prefix) in self.pool._cached.items()}
        for prefix, slot in self.scheduler.saved._slots.items():
            assert prefix in parts, "a state is kept of a page that is gone"
            tokens: list[int] = []
            while prefix in parts:
                prefix, before = parts[prefix]
                tokens = [*before, *tokens]
            if prefix == ROOT:  # else an earlier page is gone, and nothing finds it
                assert self.model.states[slot] == reduce(advance, tokens, 0)

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


# Many begin alike, for as long as one to three pages.
prompts = st.builds(
    lambda head, tail: head + tail,
    st.sampled_from([[], [], [0] * 9, [0] * 6 + [1] * 3]),
    st.lists(st.integers(0, 1), min_size=1, max_size=14),
)
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
    prefix_caching=st.booleans(),
)


def served_alone(setup: Setup, prompt: list[int], count: int = 3, **params: Any) -> int:
    """Serve a request, check its tokens, and return how many of its prompt were not computed."""
    first = len(setup.model.steps)
    request = setup.engine.add(f"alone {first}", prompt, greedy(count, **params))
    setup.run()
    assert_right([(request, expected(prompt, count))])
    step = setup.model.steps[first]
    assert request.num_cached_tokens == step.context_lens[0] - len(step.input_ids)
    return request.num_cached_tokens


def soak(requests: int, seed: int = 0, *, caching: bool, errors: float = 0) -> None:
    """Serve so many requests on a hybrid, with so many steps that fail."""
    chance = random.Random(seed)
    setup = Setup(
        num_pages=24, host_pages=8, host_states=2, max_num_seqs=6, async_scheduling=True,
        prefix_caching=caching,
    )  # fmt: skip

    def failing(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        moves = inputs.states
        if chance.random() < errors and not (moves and (moves.swapped_out or moves.swapped_in)):
            raise RuntimeError("before anything was copied")
        logits: torch.Tensor = setup.model(inputs, sampled)
        return logits

    setup.engine.execute = failing
    heads = [[chance.randrange(VOCAB) for _ in range(count)] for count in (13, 8, 30)]
    asked = []
    for index in range(requests):
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 40))]
        if caching and chance.random() < 0.7:
            prompt = chance.choice(heads) + prompt[: chance.randint(1, 10)]
        count, n = chance.randint(1, 20), chance.choice([1, 1, 1, 2, 4])
        asked.append((setup.engine.add(str(index), prompt, greedy(count, n=n)), prompt, count))
        for _ in range(chance.choice([0, 1, 5, 20])):
            with suppress(RuntimeError):
                setup.engine.step()
        if chance.random() < 0.1:
            setup.engine.abort(str(chance.randint(max(0, index - 5), index)))
        setup.assert_saved_states()
    setup.engine.execute = setup.model
    setup.run(10**6)
    assert_right([(request, expected(prompt, count)) for request, prompt, count in asked])
    assert setup.scheduler.preemptions
    assert (setup.model.hits > requests // 10) == caching


if __name__ == "__main__":
    for caching in (False, True):
        soak(10_000, caching=caching)
