"""The engine, with a model whose next token depends on pages and on the states of sequences."""

from __future__ import annotations

import random
import runpy
from contextlib import suppress
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.errors import WeightLoadError
from vllm_module.runtime.cache.page_pool import ROOT, PagePool
from vllm_module.runtime.cache.saved_states import SavedStates
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.served_adapter import AdapterMemory, ServedAdapter
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


def served_alone(setup: Setup, prompt: list[int], count: int = 3, **params: Any) -> int:
    """Serve a request, check its tokens, and return how many of its prompt were not computed."""
    first = len(setup.model.steps)
    request = setup.engine.add(f"alone {first}", prompt, greedy(count, **params))
    setup.run()
    assert_right([(request, expected(prompt, count))])
    step = setup.model.steps[first]
    assert request.num_cached_tokens == step.context_lens[0] - len(step.input_ids)
    return request.num_cached_tokens


def test_a_prompt_reuses_what_has_pages_and_a_state() -> None:
    """The same prompt, a longer one, and from the third on prompts that only begin alike."""
    setup = Setup(prefix_caching=True)
    conversation = [1, 0] * 6
    assert served_alone(setup, conversation) == 0
    assert served_alone(setup, conversation) == 8  # pages of 4, and one token is computed
    assert served_alone(setup, [*conversation, 1, 1, 1]) == 8
    assert served_alone(setup, [*conversation, 1, 1, 1]) == 12
    assert served_alone(setup, [*conversation, 1, 1, 1], n=3) == 12
    assert served_alone(setup, conversation[:8]) == 0  # its state is not the one after 4 tokens
    system = [2] * 9
    assert [served_alone(setup, [*system, *[end] * 7]) for end in (3, 4, 5, 6)] == [0, 0, 8, 8]
    assert served_alone(setup, [*system, 7], prompt_logprobs=1) == 0


def test_a_prompt_that_is_computed_again_reuses_states() -> None:
    """After it was preempted, a sequence goes on from the longest prefix that has a state."""
    setup = Setup(num_pages=8, prefix_caching=True)
    asked = []
    for index in range(2):
        prompt = [index] * 9
        asked.append((setup.engine.add(str(index), prompt, greedy(12)), expected(prompt, 12)))
    setup.run()
    assert_right(asked)
    assert setup.scheduler.preemptions
    assert setup.model.hits


def test_the_state_used_last_is_kept_longest() -> None:
    """With two slots, the third prompt takes the slot of the one that was used least recently."""
    setup = Setup(max_num_seqs=2, prefix_caching=True)
    assert [served_alone(setup, [index] * 6) for index in (1, 2, 1, 3, 1, 2)] == [0, 0, 4, 0, 4, 0]
    assert len(setup.scheduler.saved) == 2


def test_a_state_goes_with_its_page() -> None:
    """When others have taken the pages of a prefix, its slot is free."""
    setup = Setup(num_pages=4, prefix_caching=True)
    assert [served_alone(setup, [1] * 6), served_alone(setup, [1] * 6)] == [0, 4]
    assert served_alone(setup, [2] * 14, count=1) == 0
    assert len(setup.scheduler.saved) == 1
    assert served_alone(setup, [1] * 6) == 0


def test_a_prompt_that_dies_leaves_a_right_state_or_none() -> None:
    """Aborted between the chunk that ends where its state is saved and the copy of it."""
    setup = Setup(prefix_caching=True)
    setup.engine.add("0", [1] * 10, greedy(4))
    setup.engine.step()
    setup.engine.abort("0")
    assert setup.scheduler.saved.waiting
    assert setup.engine.step() == []  # of nothing: it copies nothing
    setup.assert_saved_states()
    assert served_alone(setup, [2] * 10) == 0  # in the row of the first
    assert served_alone(setup, [1] * 10) == 8
    setup.engine.add("1", [3] * 20, greedy(4))
    setup.engine.step()
    setup.engine.abort("1")
    setup.engine.resume()
    assert [served_alone(setup, [3] * 20), served_alone(setup, [3] * 20)] == [0, 16]


def test_new_weights_forget_states() -> None:
    """So do those that a prompt in progress would have saved."""
    setup = Setup(prefix_caching=True, max_num_batched_tokens=4)
    served_alone(setup, [1] * 6)
    setup.engine.add("0", [2] * 14, greedy(1))
    setup.engine.step()
    setup.engine.resume()
    assert not len(setup.scheduler.saved)
    setup.run()
    assert not len(setup.scheduler.saved)
    assert [served_alone(setup, [token] * 6) for token in (1, 2, 1, 2)] == [0, 0, 4, 4]


def test_an_interrupt_forgets_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool then counts prefixes from the first again, which would be taken for others."""

    def interrupted(self: Engine, launched: Any) -> None:
        raise KeyboardInterrupt

    setup = Setup(prefix_caching=True)
    served_alone(setup, [1] * 10)
    setup.engine.add("0", [2] * 10, greedy(2))
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "_finish_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            setup.engine.step()
    assert [served_alone(setup, [3] * 10), served_alone(setup, [3] * 10)] == [0, 8]
    assert len(setup.scheduler.saved) == 1


@pytest.mark.parametrize("advanced", [False, True])
def test_states_of_a_step_that_failed_are_not_used(advanced: bool) -> None:
    """Whether its copies were made or not; its prompts are computed from their first token."""
    setup = Setup(prefix_caching=True)
    served_alone(setup, [1] * 6)

    def failing(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        setup.engine.execute = setup.model
        if advanced:
            setup.model(inputs, sampled)
        raise RuntimeError("once")

    asked = []
    for index in (1, 2, 3):
        asked.append((setup.engine.add(str(index), [index] * 10, greedy(4)), [index] * 10))
    setup.engine.step()  # up to where states are saved
    hits, setup.engine.execute = setup.model.hits, failing
    setup.engine.step()
    assert setup.model.hits - hits == 0
    assert len(setup.scheduler.saved) <= 3, "those of prompts that were computed alone"
    setup.run()
    assert_right([(request, expected(prompt, 4)) for request, prompt in asked])
    assert {request.sequences[0].finish_reason for request, _ in asked} == {"length"}
    for index in (1, 2, 3):
        served_alone(setup, [index] * 10)


def test_a_prompt_that_fails_with_a_hit_ends_alone() -> None:
    """Copies of saved states can be made again, so others are told apart from it."""
    setup = Setup(prefix_caching=True)
    served_alone(setup, [1] * 10)

    def failing(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        if 6 in inputs.input_ids:
            raise RuntimeError("a bad token")
        logits: torch.Tensor = setup.model(inputs, sampled)
        return logits

    setup.engine.execute = failing
    bad = setup.engine.add("bad", [*[1] * 10, 6], greedy(4))
    good = [setup.engine.add(str(index), [1] * (9 + index), greedy(4)) for index in range(3)]
    setup.run()
    assert bad.sequences[0].finish_reason == "error"
    assert_right([(each, expected(each.prompt_token_ids, 4)) for each in good])
    assert {each.sequences[0].finish_reason for each in good} == {"length"}


COPIES = SavedStates.copies


def late(self: Any) -> list[tuple[int, int]]:
    rows, self.rows = getattr(self, "rows", {}), dict(self._rows)
    self._rows = rows
    return COPIES(self)


def forgetful(self: Any, prefix: int) -> None:
    if prefix in self._slots:
        self._free.append(self._slots[prefix])


def other(self: Any, prefix: int) -> int:
    slot: int = next(iter(self._slots.values()))
    return slot


FAULTS: dict[str, tuple[type, str, Any]] = {
    "a state is copied a step late": (SavedStates, "copies", late),
    "a slot is given away, and its first prefix still has it": (SavedStates, "forget", forgetful),
    "the state of another prefix is used": (SavedStates, "use", other),
    "states are used after an error": (
        Engine,
        "_execute",
        lambda self, step, *inputs: self.execute(*inputs),
    ),
}


def soak_with_errors() -> None:
    for seed in range(3):
        soak(60, seed, caching=True, errors=0.05)


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_designs_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives a wrong token, or leaves a wrong state, in a soak with errors."""
    with monkeypatch.context() as patched:
        patched.setattr(*FAULTS[fault])
        with pytest.raises(AssertionError):
            soak_with_errors()
    soak_with_errors()


@pytest.mark.parametrize("caching", [False, True])
def test_a_soak_returns_every_page_and_state(caching: bool) -> None:
    """A hundred and fifty requests of all kinds leave nothing behind."""
    soak(150, caching=caching)


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


def test_a_step_that_is_not_run_has_saved_nothing() -> None:
    """The only request of the step that copies a state has an adapter that cannot be read."""

    def missing(number: int, path: str) -> Any:
        raise WeightLoadError("it is gone")

    setup = Setup(prefix_caching=True)
    setup.engine.adapters["a"] = ServedAdapter("a", 0, "nowhere")
    setup.engine.adapter_memory = AdapterMemory(missing, *[lambda number: None] * 2, None)
    setup.engine.add("0", [1, 2, 3, 4, 5, 6, 7, 8, 9], greedy(3))
    setup.engine.step()
    assert setup.scheduler.saved.waiting
    setup.engine.abort("0")
    request = setup.engine.add("1", [3], greedy(3), adapter="a")
    setup.engine.step()
    assert request.error is not None
    setup.assert_saved_states()
    assert not len(setup.scheduler.saved)
