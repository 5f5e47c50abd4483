"""The engine, with a model whose next token depends on what is really stored on the pages."""

from __future__ import annotations

import random
import re
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.step_inputs import Moves, Step, StepInputs

VOCAB = 50


def key_of(token: int, before: list[int | None], window: int | None) -> int:
    """Return what is cached for a token: like a real key, it depends on all earlier tokens."""
    seen = before if window is None else before[max(0, len(before) - window + 1) :]
    assert None not in seen
    return hash((token, *seen))


def keys_of(tokens: list[int], window: int | None = None) -> list[int]:
    keys: list[int] = []
    for token in tokens:
        keys.append(key_of(token, keys, window))
    return keys


@dataclass
class Pages:
    """A model with its cache, which holds one number per token in place of key and value.

    Like a rank, it keeps the block tables and is told their changes. Rows of ``choices`` are its
    logits.
    """

    size: int
    window: int | None = None
    device: dict[int, list[int | None]] = field(default_factory=dict)
    host: dict[int, list[int | None]] = field(default_factory=dict)
    steps: list[StepInputs] = field(default_factory=list)
    tables: dict[int, dict[int, int]] = field(default_factory=dict)
    choices: torch.Tensor = field(default_factory=lambda: torch.eye(VOCAB))

    def __call__(self, inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        self.steps.append(inputs)
        assert inputs.num_sampled == (0 if sampled is None else len(sampled))
        tokens = inputs.input_ids
        if sampled is not None:
            tokens = sampled[tokens].tolist()
        assert inputs.max_query_len == max(b - a for a, b in pairwise(inputs.query_start_loc))
        moves = inputs.pages or Moves()
        for source, target in moves.swapped_out:
            self.host[target] = list(self.device[source])
        for source, target in moves.copied:
            self.device[target] = list(self.device[source])
        for source, target in moves.swapped_in:
            self.device[target] = list(self.host[source])
        assert len(set(inputs.slot_mapping)) == len(inputs.slot_mapping), (
            "two tokens share a cache slot"
        )
        for row, first, pages in inputs.new_pages:
            self.tables.setdefault(row, {}).update(enumerate(pages, start=first))
        assert len(set(inputs.table_rows)) == len(inputs.table_rows), "two sequences share a row"
        logits = torch.zeros(len(inputs.input_ids), VOCAB)
        for table, context, begin, end in zip(
            map(self.tables.__getitem__, inputs.table_rows),
            inputs.context_lens,
            inputs.query_start_loc,
            inputs.query_start_loc[1:],
            strict=False,
        ):
            for row in range(begin, end):
                position, slot = inputs.positions[row], inputs.slot_mapping[row]
                assert position == context - (end - row)
                first = 0 if self.window is None else max(0, position - self.window + 1)
                seen = range(first, position)
                before = [self.device[table[p // self.size]][p % self.size] for p in seen]
                key = key_of(tokens[row], before, None)
                page = self.device.setdefault(slot // self.size, [None] * self.size)
                page[slot % self.size] = key
                assert table[position // self.size] == slot // self.size
                logits[row] = self.choices[key % len(self.choices)]
        return logits[inputs.rows]


def expected(prompt: list[int], count: int, window: int | None = None) -> list[int]:
    tokens, keys = list(prompt), keys_of(prompt, window)
    while len(tokens) < len(prompt) + count:
        tokens.append(keys[-1] % VOCAB)
        keys.append(key_of(tokens[-1], keys, window))
    return tokens[len(prompt) :]


@dataclass
class Setup:
    """An engine with a cache so small that pages run out."""

    num_pages: int
    size: int = 4
    host_pages: int = 0
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    prefix_caching: bool = True
    window: int | None = None
    async_scheduling: bool = False
    batches: int = 1

    def __post_init__(self) -> None:
        self.pool = PagePool(self.num_pages, self.size)
        self.host = PagePool(self.host_pages, self.size)
        self.scheduler = Scheduler(
            self.pool,
            self.host,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.prefix_caching,
            self.window,
            batches=self.batches,
        )
        self.pages = Pages(self.size, self.window)
        overlapped = self.async_scheduling and self.batches == 1  # never both
        self.engine = Engine(
            self.pages, self.scheduler, VOCAB, max_model_len=1000, async_scheduling=overlapped
        )

    def run(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.engine.requests:
                break
            self.engine.step()
        assert not self.engine.requests, "requests never end"
        self.assert_all_free()

    def assert_all_free(self) -> None:
        """Check that no page has references and no sequence is scheduled."""
        assert self.pool.free_pages == self.num_pages
        assert self.host.free_pages == self.host_pages
        assert not any(self.pool.reference_count(page) for page in range(self.num_pages))
        assert not self.scheduler.running
        assert not self.scheduler.waiting


def greedy(count: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, **params)


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


def test_samples_beyond_max_num_seqs_take_turns_with_the_rows_of_the_tables() -> None:
    """A sample that loses its row has its pages listed again, and gets the same tokens."""
    setup = Setup(num_pages=60, max_num_seqs=3, max_num_batched_tokens=100)
    requests = [setup.engine.add(str(index), [index] * 9, greedy(12, n=3)) for index in range(3)]
    listed = []
    while setup.engine.requests:
        setup.engine.step()
        listed += [(row, first) for row, first, _ in setup.pages.steps[-1].new_pages]
        assert len(setup.scheduler.running) <= 9
    assert {row for row, _ in listed} == {0, 1, 2}
    assert sum(first == 0 for _, first in listed) > 9  # more often than there are samples
    for index, request in enumerate(requests):
        assert [s.output for s in request.sequences] == [expected([index] * 9, 12)] * 3
    setup.run()


def test_a_step_sends_each_page_once() -> None:
    """A step that decodes sends a page when it allocates it, and else no entry of the tables."""
    setup = Setup(num_pages=60, max_num_batched_tokens=100)
    requests = [setup.engine.add(str(index), [index] * 9, greedy(20)) for index in range(4)]
    while setup.engine.requests:
        setup.engine.step()
        (*_, step) = setup.pages.steps
        if step.max_query_len == 1:
            grown = [context for context in step.context_lens if context % setup.size == 1]
            assert [len(pages) for _, _, pages in step.new_pages] == [1] * len(grown)
    sent = sum(len(pages) for step in setup.pages.steps for _, _, pages in step.new_pages)
    held = [-(-(len(r.sequences[0].tokens) - 1) // setup.size) for r in requests]
    assert sent == sum(held)


def test_the_first_sequence_is_never_preempted() -> None:
    """When pages run out, the last sequences start over, and the first one goes on."""
    setup = Setup(num_pages=8, prefix_caching=False)
    for index in range(4):
        setup.engine.add(str(index), [index] * 7, greedy(16))
    first = setup.engine.requests["0"].sequences[0]
    computed = 0
    while first.finish_reason is None:
        setup.engine.step()
        assert first.finish_reason or first.num_computed > computed
        computed = first.num_computed
    assert setup.scheduler.preemptions > 0
    setup.run()


def test_swapped_sequences_do_not_start_over() -> None:
    """With enough host memory, no token is computed twice."""
    setup = Setup(num_pages=8, host_pages=20, prefix_caching=False, max_num_batched_tokens=100)
    for index in range(4):
        setup.engine.add(str(index), [index] * 7, greedy(16))
    setup.run()
    assert setup.scheduler.preemptions > 0
    assert sum(len(step.input_ids) for step in setup.pages.steps) == 4 * (7 + 16 - 1)


def test_a_common_prefix_is_computed_once() -> None:
    """Full pages of an earlier prompt are shared, even after its request has ended."""
    setup = Setup(num_pages=40, max_num_batched_tokens=100)
    long = [1, 2] * 10
    setup.engine.add("first", long, greedy(4))
    setup.run()
    before = sum(len(step.input_ids) for step in setup.pages.steps)
    request = setup.engine.add("second", [*long, 0, 1], greedy(4))
    setup.run()
    assert sum(len(step.input_ids) for step in setup.pages.steps) - before == 2 + 3
    assert request.sequences[0].output == expected([*long, 0, 1], 4)


def test_samples_share_the_pages_of_their_prompt() -> None:
    """n samples compute and store the prompt once; each copies the last page when it writes."""
    setup = Setup(num_pages=40, max_num_batched_tokens=100)
    setup.engine.add("one", [1] * 10, greedy(5, n=4))
    setup.engine.step()
    setup.engine.step()
    assert sum(len(step.input_ids) for step in setup.pages.steps) == 10 + 4
    assert setup.num_pages - setup.pool.free_pages == 2 + 4
    assert len(setup.pages.steps[1].pages.copied) == 3
    setup.run()


def test_samples_fork_without_a_free_page() -> None:
    """When samples have no page to write to, the last is preempted, and all of them finish."""
    setup = Setup(num_pages=4, max_num_batched_tokens=100)
    request = setup.engine.add("full", [1] * 14, greedy(2, n=3))
    setup.run()
    assert [s.output for s in request.sequences] == [expected([1] * 14, 2)] * 3
    assert setup.scheduler.preemptions > 0


def test_cached_free_pages_are_not_counted_twice() -> None:
    """A prompt is admitted if there are free pages besides the free ones that it reuses."""
    setup = Setup(num_pages=6, max_num_batched_tokens=100)
    setup.engine.add("first", [1] * 8, greedy(1))
    setup.run()
    setup.engine.add("holds", [2] * 9, greedy(3))
    setup.engine.step()
    later = setup.engine.add("later", [1] * 16, greedy(1))
    while setup.engine.requests:
        setup.engine.step()
    assert later.sequences[0].output == expected([1] * 16, 1)


def test_the_order_is_that_of_arrival_after_a_preemption_too() -> None:
    """Earlier requests are served first, whichever were preempted."""
    setup = Setup(num_pages=9, prefix_caching=False)
    requests = [setup.engine.add(str(index), [index] * 9, greedy(8)) for index in range(4)]
    order: list[str] = []
    while setup.engine.requests:
        setup.engine.step()
        for queue in (setup.scheduler.running, setup.scheduler.waiting):
            arrivals = [sequence.request.arrival for sequence in queue]
            assert arrivals == sorted(arrivals)
        order += [r.request_id for r in requests if r.finished and r.request_id not in order]
    assert order == ["0", "1", "2", "3"]


def test_pages_before_the_window_are_freed() -> None:
    """With a sliding window in every layer, a sequence has only the pages its window needs."""
    setup = Setup(num_pages=60, window=8, max_num_batched_tokens=100)
    request = setup.engine.add("long", [1] * 5, greedy(150))
    while setup.engine.requests:
        setup.engine.step()
        held = setup.num_pages - setup.pool.free_pages
        assert held <= 8 // 4 + 2
    assert request.sequences[0].output == expected([1] * 5, 150, window=8)


def test_sequences_decode_while_a_long_prompt_is_computed() -> None:
    """While a long prompt is computed in chunks, a running sequence gets a token every step."""
    setup = Setup(num_pages=60, max_num_batched_tokens=8)
    short = setup.engine.add("short", [1], greedy(20))
    setup.engine.step()
    setup.engine.add("long", [2] * 40, greedy(1))
    for step in range(5):
        setup.engine.step()
        assert len(short.sequences[0].output) == step + 2
        assert len(setup.pages.steps[-1].input_ids) == 8
    setup.run()


def test_a_sequence_that_fills_the_cache_ends_there() -> None:
    """A sequence can use the whole cache, and then ends with the reason "length"."""
    setup = Setup(num_pages=4)
    request = setup.engine.add("big", [1] * 6, greedy(100))
    setup.run()
    (sequence,) = request.sequences
    assert (len(sequence.tokens), sequence.finish_reason) == (16, "length")


def test_a_step_that_fails_ends_all_requests() -> None:
    """Every request's error is what the step raised; later requests are served."""
    setup = Setup(num_pages=20)
    requests = [setup.engine.add(str(index), [1, 2], greedy(5)) for index in range(3)]

    def broken(inputs: StepInputs) -> torch.Tensor:
        raise RuntimeError("out of luck")

    setup.engine.step()
    execute, setup.engine.execute = setup.engine.execute, broken
    with pytest.raises(RuntimeError, match="out of luck"):
        setup.engine.step()
    for request in requests:
        assert request.error == "a step of requests 0, 1, 2 failed: RuntimeError: out of luck"
        assert request.sequences[0].finish_reason == "error"
        assert len(request.sequences[0].output) == 1
    setup.assert_all_free()
    setup.engine.execute = execute
    late = setup.engine.add("late", [1, 2], greedy(5))
    setup.run()
    assert late.sequences[0].output == expected([1, 2], 5)


def past_the_positions(setup: Setup, most: int, fails: list[int]) -> None:
    """Make the model raise as a table of learned positions does beyond its end."""

    def limited(inputs: StepInputs) -> torch.Tensor:
        if max(inputs.positions) >= most:
            fails.append(len(inputs.context_lens))
            raise IndexError("index out of range in self")
        return setup.pages(inputs)

    setup.engine.execute = limited


def test_a_request_that_makes_a_step_fail_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The others of its step and those that wait get their tokens; the log names the step's."""
    setup = Setup(num_pages=30, max_num_seqs=3)
    fails: list[int] = []
    past_the_positions(setup, 9, fails)
    good = [setup.engine.add(f"good {n}", [1, 2, n], greedy(6)) for n in range(4)]
    setup.engine.step()
    bad = setup.engine.add("bad", [1] * 8, greedy(6, n=2))
    alone = setup.engine.add("alone", [0] * 12, greedy(2))
    setup.run()
    for n, request in enumerate(good):
        assert request.error is None
        assert request.sequences[0].output == expected([1, 2, n], 6)
    for request in (bad, alone):
        assert request.finished
    error = "a step with this request alone failed: IndexError: index out of range in self"
    assert bad.error == error
    assert alone.error == error
    assert "failed and was repeated for each of its sequences alone: IndexError" in caplog.text
    assert f"request bad ends with an error: {error}" in caplog.text


def test_the_last_request_raises_what_its_step_raised() -> None:
    """With no other request, and after moves of pages, nothing is repeated."""
    setup = Setup(num_pages=30)
    fails: list[int] = []
    past_the_positions(setup, 5, fails)
    only = setup.engine.add("only", [1] * 6, greedy(2))
    with pytest.raises(IndexError):
        setup.engine.step()
    assert only.error == "a step of request only failed: IndexError: index out of range in self"
    assert fails == [1]
    setup.engine.repeatable = False
    both = [setup.engine.add(str(n), [n] * (1 + 5 * n), greedy(2)) for n in range(2)]
    with pytest.raises(IndexError):
        setup.engine.step()
    assert [request.error for request in both] == [
        "a step of requests 0, 1 failed: IndexError: index out of range in self"
    ] * 2
    setup.assert_all_free()


@pytest.mark.parametrize("failing", ["schedule", "mark_computed", "fork", "finish"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_engine_serves_later_requests(failing, error) -> None:
    """Whatever part of a step raises, requests end with that error, and later ones are right."""
    setup = Setup(num_pages=20)
    requests = [setup.engine.add(str(n), [1, 2, n], greedy(5, n=n + 1)) for n in range(3)]
    setup.engine.step()
    late = setup.engine.add("late", [2] * 9, greedy(1, n=2))
    inner = getattr(setup.scheduler, failing)

    def broken(*arguments: Any) -> Any:
        inner(*arguments)
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup.scheduler, failing, broken)
        with pytest.raises(error):
            setup.run()
    for request in (*requests, late):
        assert request.finished
        assert re.fullmatch(rf"a step( of requests .*)? failed: {error.__name__}", request.error)
    setup.assert_all_free()
    again = setup.engine.add("again", [1, 2, 1], greedy(5, n=3))
    setup.run()
    assert [sequence.output for sequence in again.sequences] == [expected([1, 2, 1], 5)] * 3


def test_an_abort_during_a_step_is_done_after_it() -> None:
    """The garbage collector may finalize a stream at any time, with or without samples."""
    setup = Setup(num_pages=20)
    engine = setup.engine
    for name, n in (("gone", 1), ("samples", 3)):
        engine.add(name, [1, 2], greedy(5, n=n))
    kept = engine.add("kept", [1, 2, 1], greedy(5))
    execute = engine.execute

    def aborting(inputs: StepInputs) -> torch.Tensor:
        for name in ("gone", "samples"):
            engine.abort(name)
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            engine.step()
        return execute(inputs)

    engine.execute = aborting
    engine.step()
    assert list(engine.requests) == ["kept"]
    engine.execute = execute
    setup.run()
    assert kept.sequences[0].output == expected([1, 2, 1], 5)


def test_an_abort_waits_for_nothing() -> None:
    """A finalizer may run in a thread that a step in another thread waits for."""
    setup = Setup(num_pages=20)
    setup.engine.add("gone", [1, 2], greedy(5))
    kept = setup.engine.add("kept", [1, 2, 1], greedy(5))
    stepping, aborted = threading.Event(), threading.Event()
    execute = setup.engine.execute

    def waiting(inputs: StepInputs) -> torch.Tensor:
        stepping.set()
        assert aborted.wait(10)
        return execute(inputs)

    setup.engine.execute = waiting
    thread = threading.Thread(target=setup.engine.step)
    thread.start()
    assert stepping.wait(10)
    setup.engine.abort("gone")
    assert "gone" in setup.engine.requests
    aborted.set()
    thread.join()
    assert list(setup.engine.requests) == ["kept"]
    setup.run()
    assert kept.sequences[0].output == expected([1, 2, 1], 5)


@pytest.mark.parametrize("held", ["read", "add"])
def test_an_abort_is_done_whatever_the_lock_is_held_for(held: str) -> None:
    """Another thread takes an output, or adds a request that is refused, and calls nothing more."""
    setup = Setup(num_pages=20)
    engine = setup.engine
    engine.add("gone", [1, 2], greedy(5))
    holding, aborted = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        holding.set()
        assert aborted.wait(10)
        raise ValueError("refused")

    def hold() -> None:
        with suppress(ValueError):
            if held == "add":
                engine.add("refused", [1, 2], greedy(5))
            else:
                with engine.reading():
                    wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_check", wait)
        thread = threading.Thread(target=hold)
        thread.start()
        assert holding.wait(10)
        engine.abort("gone")
        assert "gone" in engine.requests
        aborted.set()
        thread.join()
    assert not engine.requests
    setup.assert_all_free()


def test_an_interrupted_add_adds_nothing() -> None:
    setup = Setup(num_pages=20)
    add = setup.scheduler.add

    def interrupted(sequence: Any) -> None:
        add(sequence)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup.scheduler, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            setup.engine.add("any", [1], greedy(1))
    setup.run()


def test_broken_prompt_logits_end_only_their_request() -> None:
    """NaN in logits for prompt logprobs is that request's error, and changes no other's tokens."""
    setup = Setup(num_pages=40)
    good = setup.engine.add("good", [1, 2], greedy(8))
    setup.engine.step()
    execute = setup.engine.execute

    def broken(inputs: StepInputs) -> torch.Tensor:
        logits = execute(inputs)
        broken = [row for row, at in enumerate(inputs.rows) if inputs.input_ids[at] == odd]
        logits[broken] = torch.nan
        return logits

    elsewhere = [1, 2, *expected([1, 2], 8), *expected([2, 2], 3)]
    odd = next(token for token in range(VOCAB) if token not in elsewhere)
    setup.engine.execute = broken
    bad = setup.engine.add("bad", [1, odd, 2], greedy(3, prompt_logprobs=0))
    other = setup.engine.add("other", [2, 2], greedy(3, prompt_logprobs=1, n=2))
    setup.run()
    assert bad.error is not None
    assert bad.error.startswith("its logits contain NaN")
    assert good.error is other.error is None
    assert good.sequences[0].output == expected([1, 2], 8)
    assert [each.output for each in other.sequences] == [expected([2, 2], 3)] * 2


def test_stop_tokens_outside_of_the_vocabulary_are_ignored() -> None:
    """A configuration may name such a token."""
    setup = Setup(num_pages=20)
    engine = Engine(setup.pages, setup.scheduler, VOCAB, 1000, stop_token_ids=[VOCAB, -1, 3])
    assert engine.stop_token_ids == {3}
    request = engine.add("long", [1, 2], greedy(2, min_tokens=2))
    while engine.requests:
        engine.step()
    assert request.error is None


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


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(1), "the prompt has no tokens"),
        ([1] * 80, greedy(1), "80 tokens, and with one more the cache has room for at most 80"),
        ([VOCAB], greedy(1), "token 50 is outside of the vocabulary of 50"),
        ([-1], greedy(1), "token -1 is outside"),
        ([1], greedy(1, logit_bias={VOCAB: 1.0}), "token 50 is outside"),
        ([1], greedy(1, stop_token_ids=[99]), "token 99 is outside"),
        ([1], greedy(1, n=9), "n=9 samples are more than the 8"),
        ([1], greedy(1, stop="x"), "stop strings need a tokenizer"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(prompt, params, message) -> None:
    """A refused request allocates nothing, and changes no other request."""
    setup = Setup(num_pages=20)
    good = setup.engine.add("good", [1, 2], greedy(3))
    with pytest.raises(ValueError, match=message):
        setup.engine.add("bad", prompt, params)
    with pytest.raises(ValueError, match="'good' exists already"):
        setup.engine.add("good", [1], greedy(1))
    setup.run()
    assert good.sequences[0].output == expected([1, 2], 3)


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


def computed_by(setup: Setup, prompt: list[int]) -> int:
    """Return how many tokens of ``prompt`` are computed, because no cached page has them."""
    steps = len(setup.pages.steps)
    setup.engine.add("probe", prompt, greedy(1))
    setup.run()
    return sum(len(step.input_ids) for step in setup.pages.steps[steps:])


def test_samples_have_the_place_of_their_request() -> None:
    """Samples run before requests that arrived later."""
    setup = Setup(num_pages=40, max_num_batched_tokens=100)
    setup.engine.add("first", [1] * 5, greedy(5, n=3))
    setup.engine.add("second", [2] * 5, greedy(5))
    setup.engine.step()
    assert [(s.request.arrival, s.index) for s in setup.scheduler.running] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
    ]
    setup.run()


@pytest.mark.parametrize("length", range(1, 10))
def test_pages_of_every_sample_are_found_with_the_salt_of_the_prompt(length: int) -> None:
    """And with no other, whether the prompt, or only a sample's output, fills the first page."""
    setup = Setup(num_pages=40)
    params = SamplingParams(temperature=1, seed=0, max_tokens=9, n=3)
    request = setup.engine.add("x", [1] * length, params, cache_salt="mine")
    setup.run()
    assert len({tuple(each.tokens) for each in request.sequences}) == 3
    for each in request.sequences:
        full = (len(each.tokens) - 1) // setup.size  # the last token was not computed
        for salt in ("mine", None, "other"):
            found = setup.pool.find_cached(each.tokens, full, salt)
            assert len(found) == (full if salt == "mine" else 0)


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


@pytest.mark.parametrize("swapped", [False, True])
def test_pages_in_use_during_an_update_are_not_reused(swapped: bool) -> None:
    """Neither full pages nor pages that were half computed, swapped out or not."""
    setup = Setup(num_pages=4, host_pages=1, max_num_batched_tokens=100)
    setup.engine.add("long", [1] * 12, greedy(2))
    (half,) = setup.engine.add("short", [2] * 2, greedy(6)).sequences
    setup.engine.step()
    if swapped:
        setup.engine.step()
        assert len(half.host_pages) == 1
    assert half.num_computed == 2
    setup.engine.resume()
    setup.run()
    assert half.output == expected([2] * 2, 6)
    assert computed_by(setup, half.tokens[:7]) == 7
    assert computed_by(setup, [1] * 12) == 12


def test_no_step_has_more_than_max_num_seqs() -> None:
    """Neither waiting requests nor forked samples make a step larger than allowed."""
    for n in (1, 3):
        setup = Setup(num_pages=60, max_num_seqs=3, max_num_batched_tokens=100)
        for index in range(5):
            setup.engine.add(str(index), [index] * 5, greedy(5, n=n))
        setup.run()
        assert max(len(step.table_rows) for step in setup.pages.steps) == 3


def test_exactly_the_pages_before_the_window_are_freed() -> None:
    """A sequence has exactly the pages in its window, after starting over too."""
    setup = Setup(
        num_pages=13, window=8, prefix_caching=False, max_num_seqs=5, max_num_batched_tokens=6
    )
    for index in range(5):
        setup.engine.add(str(index), [index] * 5, greedy(30))
    while setup.engine.requests:
        setup.engine.step()
        for sequence in setup.scheduler.running:
            held = [page >= 0 for page in sequence.pages]
            left = max(0, sequence.num_computed - 8 + 1) // 4
            assert held == [index >= left for index in range(-(-sequence.num_computed // 4))]
    assert setup.scheduler.preemptions > 0


def test_the_first_pages_of_a_prompt_are_evicted_last() -> None:
    """Pages freed first are allocated first, and a sequence's last page is freed first."""
    setup = Setup(num_pages=6, max_num_batched_tokens=100)
    first = [1, 2] * 8
    assert computed_by(setup, first) == 16
    assert computed_by(setup, [*first, 0]) == 1
    assert computed_by(setup, [3] * 13) == 13  # on the pages that were freed first
    assert computed_by(setup, first) == 16 - 8


def test_the_pool_refuses_impossible_calls() -> None:
    """Allocating more pages than are free, and freeing a page without references."""
    pool = PagePool(2, 4)
    (page,) = pool.allocate(1)
    with pytest.raises(RuntimeError, match="2 pages are needed and 1 are free"):
        pool.allocate(2)
    assert pool.free_pages == 1
    pool.free([page])
    with pytest.raises(RuntimeError, match=f"page {page} is freed, and has no references"):
        pool.free([page])
    assert pool.free_pages == 2


def test_pages_of_output_are_reused_by_the_next_turn() -> None:
    """A prompt that continues an earlier output reuses its full pages."""
    setup = Setup(num_pages=40, max_num_batched_tokens=100)
    first = setup.engine.add("first", [1] * 3, greedy(10))
    setup.run()
    assert computed_by(setup, [*first.sequences[0].tokens, 0]) == 14 - 12


def test_a_request_with_broken_logits_ends_alone() -> None:
    """NaN for one sample ends its request with an error, and changes no other's tokens."""
    setup = Setup(num_pages=20)
    bad = setup.engine.add("bad", [1, 2], greedy(9, n=2))
    good = setup.engine.add("good", [2, 1], greedy(9))
    setup.engine.step()

    def broken(inputs: StepInputs) -> torch.Tensor:
        logits = setup.pages(inputs)
        logits[0] = torch.nan
        return logits

    setup.engine.execute = broken
    setup.engine.step()
    setup.engine.execute = setup.pages
    setup.run()
    assert "NaN" in str(bad.error)
    assert [(s.finish_reason, len(s.output)) for s in bad.sequences] == [("error", 1)] * 2
    assert good.error is None
    assert good.sequences[0].output == expected([2, 1], 9)


def test_no_step_has_more_than_max_num_batched_tokens_or_an_empty_sequence() -> None:
    setup = Setup(num_pages=60, max_num_batched_tokens=7)
    for index in range(5):
        setup.engine.add(str(index), [index] * 5, greedy(5))
    setup.run()
    for step in setup.pages.steps:
        assert len(step.input_ids) <= 7
        assert all(begin < end for begin, end in pairwise(step.query_start_loc))


def test_full_pages_from_before_an_update_are_not_reused() -> None:
    setup = Setup(num_pages=20, max_num_batched_tokens=100)
    assert [computed_by(setup, [1] * 9) for _ in range(2)] == [9, 1]
    setup.engine.resume()
    assert computed_by(setup, [1] * 9) == 9


def test_pages_before_the_window_are_freed_after_starting_over() -> None:
    """A preempted sequence frees pages before its window as it did the first time."""
    setup = Setup(num_pages=20, window=4, prefix_caching=False)
    (sequence,) = setup.engine.add("again", [1] * 5, greedy(30)).sequences
    while setup.engine.requests:
        setup.engine.step()
        if len(sequence.output) == 12 and not setup.scheduler.preemptions:
            setup.scheduler._preempt(sequence, Step())
        held = [page >= 0 for page in sequence.pages]
        left = max(0, sequence.num_computed - 4 + 1) // 4
        assert (
            held == [index >= left for index in range(-(-sequence.num_computed // 4))] or not held
        )
    assert setup.scheduler.preemptions


def test_an_abort_keeps_samples_that_have_ended() -> None:
    setup = Setup(num_pages=20)
    request = setup.engine.add("two", [1], greedy(9, n=2))
    setup.engine.step()
    setup.engine._finish(request.sequences[0], "stop")
    setup.engine.abort("two")
    assert [sequence.finish_reason for sequence in request.sequences] == ["stop", "abort"]
    setup.assert_all_free()


def swapped_out(setup: Setup, count: int, output: int) -> list[Request]:
    """Return requests of which one at least is in host memory."""
    requests = [setup.engine.add(str(index), [index] * 7, greedy(output)) for index in range(count)]
    for _ in range(200):
        if any(request.sequences[0].host_pages for request in requests):
            return requests
        setup.engine.step()
    raise AssertionError("no sequence was swapped out")


def test_a_failed_step_frees_pages_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that are in host memory when all requests end leave nothing there."""
    setup = Setup(num_pages=8, host_pages=20, prefix_caching=False, max_num_batched_tokens=100)
    swapped_out(setup, 4, 16)

    def broken(inputs: StepInputs) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(setup.engine, "execute", broken)
    with pytest.raises(KeyboardInterrupt):
        setup.engine.step()
    setup.assert_all_free()


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("length", [18, 19, 20, 21])
def test_a_swapped_sequence_is_admitted_once_its_pages_fit(window: int | None, length: int) -> None:
    """It needs the pages that it holds and those of its next tokens, not those that it passed."""
    setup = Setup(num_pages=16, size=2, host_pages=16, prefix_caching=False, window=window)
    (sequence,) = setup.engine.add("one", [1] * 7, greedy(25)).sequences
    while len(sequence.tokens) < length:
        setup.engine.step()
    setup.scheduler._preempt(sequence, Step())
    passed = sequence.pages.count(-1)
    assert (passed > 3) == (window is not None)
    needed = -(-length // 2) - passed
    taken = setup.pool.allocate(setup.pool.free_pages - needed + 1)
    assert not setup.scheduler.schedule().scheduled
    setup.pool.free(taken[:1])
    assert setup.scheduler.schedule().scheduled == [(sequence, 1)]


def test_a_prompt_counts_once_however_many_samples_it_has() -> None:
    """Of tokens that were computed or cached, too; each sample's own tokens count."""
    setup = Setup(num_pages=40, max_num_batched_tokens=100)
    for index, n in enumerate((1, 3, 2)):
        setup.engine.add(str(index), [1] * 10, greedy(5, n=n))
        setup.run()
    totals = setup.engine.totals
    assert (totals.prompt_tokens, totals.cached_tokens) == (3 * 10, 2 * 8)
    assert totals.generation_tokens == (1 + 3 + 2) * 5


def test_parameters_are_those_of_the_arrival() -> None:
    """Whatever a caller does to its lists and mappings afterwards."""
    given = SamplingParams(
        stop_token_ids=[3], allowed_token_ids=[1, 2, 3], logit_bias={1: 1.0}, max_tokens=4
    )
    before = given.model_dump()
    request = Setup(num_pages=20).engine.add("one", [1, 2], given)
    for name in SamplingParams.model_fields:
        value = getattr(given, name)
        if isinstance(value, list | dict | set):
            value.clear()
    assert given.model_dump() != before, "nothing was changed"
    assert request.params.model_dump() == before


def test_a_preemption_leaves_the_time_of_the_first_admission() -> None:
    """A request waited until then, and not until it was admitted again."""
    setup = Setup(num_pages=8, prefix_caching=False, max_num_batched_tokens=100)
    requests = [setup.engine.add(str(index), [index] * 7, greedy(16)) for index in range(4)]
    first: dict[str, float] = {}
    while setup.engine.requests:
        setup.engine.step()
        for each in requests:
            if each.metrics.scheduled_ts:
                first.setdefault(each.request_id, each.metrics.scheduled_ts)
    assert max(each.metrics.num_preemptions for each in requests) > 0
    assert {each.request_id: each.metrics.scheduled_ts for each in requests} == first


def test_nothing_is_admitted_before_a_sequence_that_waits_for_pages() -> None:
    """While another step is in flight, a prompt's next pages are too few: later ones wait, too."""
    scheduler = Scheduler(PagePool(5, 4), PagePool(0, 4), 8, 8, batches=2)
    long, other, short = (
        Request(str(at), [1] * count, greedy(1), at, 100).sequences[0]
        for at, count in enumerate((16, 8, 1))
    )
    scheduler.add(long)
    first = scheduler.schedule()
    scheduler.add(other)
    second = scheduler.schedule()
    assert (first.scheduled, second.scheduled) == ([(long, 8)], [(other, 8)])
    scheduler.mark_computed(first)
    scheduler.add(short)
    assert scheduler.schedule().scheduled == []
    assert scheduler.waiting == [short]
    scheduler.mark_computed(second)
    assert scheduler.schedule().scheduled[0] == (long, 8)
    assert scheduler.in_flight == {long}
    scheduler.reset()
    assert not scheduler.in_flight, "or nothing is ever preempted"


def test_no_sequence_of_a_step_loses_its_row_to_another_one() -> None:
    """All rows are those of a step in flight and of this one, which needs one more."""
    scheduler = Scheduler(PagePool(20, 4), PagePool(0, 4), 3, 100, batches=2)
    requests = [Request(str(at), [1, 2], greedy(5, n=2), at, 100) for at in range(2)]
    for request in requests:
        scheduler.add(request.sequences[0])
    for step in [scheduler.schedule() for _ in requests]:
        scheduler.mark_computed(step)
    for request in requests:
        scheduler.fork(request)
        for sequence in request.sequences:
            sequence.tokens.append(3)
    for request in requests:
        scheduled = [sequence for sequence, _ in scheduler.schedule().scheduled]
        assert scheduled == request.sequences
        assert len({sequence.row for sequence in scheduled} - {-1}) == 2


def test_pages_of_its_own_are_no_cached_tokens() -> None:
    """A request that is preempted in its prompt finds its own pages, which it has computed."""
    setup = Setup(num_pages=5, max_num_batched_tokens=5)
    setup.engine.add("a", [1, 2, 3, 4], greedy(10))
    request = setup.engine.add("b", [9, 8] * 7, greedy(2))
    setup.run()
    assert setup.scheduler.preemptions > 0
    assert request.num_cached_tokens == 0
    assert setup.engine.totals.cached_tokens == 0
