"""Steps that are launched before the tokens of the step before are read change no token."""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module import vLLMModule
from vllm_module.runtime.cache.kv_cache import KVCache
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.step_inputs import StepInputs

# runpy, because pytest's importlib mode has no imports between test files.
_engine = runpy.run_path(str(Path(__file__).with_name("engine") / "paged.py"))
Setup, VOCAB = _engine["Setup"], _engine["VOCAB"]
greedy: Callable[..., SamplingParams] = _engine["greedy"]
_simulated = runpy.run_path(str(Path(__file__).with_name("simulated_device.py")))
DEVICE, SimulatedDevice = _simulated["DEVICE"], _simulated["SimulatedDevice"]

# What follows a token is drawn from one of these rows, and no token of a row is sure.
CHOICES = 3 * torch.randn(97, VOCAB, generator=torch.Generator().manual_seed(0))
STOP = 7


@dataclass
class Asked:
    """A request, and how many steps are taken between it and the next one."""

    prompt: list[int]
    params: SamplingParams
    steps: int


@dataclass
class Run:
    """An engine that has served requests.

    Attributes:
        changes: for each call of ``step``, the requests that it returned, and their lengths.

    """

    setup: Any
    requests: list[Request] = field(default_factory=list)
    changes: list[list[tuple[str, list[int]]]] = field(default_factory=list)

    @property
    def early(self) -> int:
        """The number of steps that were launched before the tokens before them were read."""
        return sum(bool(step.num_sampled) for step in self.setup.pages.steps)

    def step(self) -> None:
        changed = self.setup.engine.step()
        lengths = [(each.request_id, [len(s.output) for s in each.sequences]) for each in changed]
        self.changes.append(lengths)

    def finish(self) -> Run:
        while self.setup.engine.requests:
            self.step()
        self.setup.assert_all_free()
        return self

    def results(self) -> list[Any]:
        """Return all that callers get."""
        return [
            (
                request.error,
                request.prompt_logprobs,
                [
                    (s.output, s.finish_reason, s.stop_reason, s.logprobs, s.cumulative_logprob)
                    for s in request.sequences
                ],
            )
            for request in self.requests
        ]


def started(options: dict[str, Any], overlapped: bool, **others: Any) -> Run:
    setup = Setup(**options, **others, async_scheduling=overlapped)
    setup.pages.choices = CHOICES
    return Run(setup)


def served(options: dict[str, Any], asked: list[Asked], overlapped: bool) -> Run:
    run = started(options, overlapped)
    for index, each in enumerate(asked):
        run.requests.append(run.setup.engine.add(str(index), each.prompt, each.params))
        for _ in range(each.steps):
            run.step()
    return run.finish()


def params(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        seed=st.integers(0, 9),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        max_tokens=st.sampled_from([1, 2, 9, 30]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
        logprobs=st.sampled_from([None, None, 2]),
        min_tokens=st.sampled_from([0, 0, 1]),
        n=st.sampled_from([1, 1, 3]),
        **values,
    )


def requests(
    of: st.SearchStrategy[SamplingParams], steps: st.SearchStrategy[int]
) -> st.SearchStrategy[list[Asked]]:
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
    return st.lists(st.builds(Asked, prompts, of, steps), min_size=1, max_size=8)


options = st.fixed_dictionaries(
    {
        "num_pages": st.integers(13, 60),  # a request of 43 tokens fits
        "size": st.sampled_from([4, 5]),
        "host_pages": st.sampled_from([0, 0, 20]),
        "max_num_seqs": st.integers(3, 8),
        "max_num_batched_tokens": st.sampled_from([1, 5, 16, 100]),
        "window": st.sampled_from([None, None, 6]),
    }
)


@given(
    options,
    st.booleans(),
    requests(
        params(
            prompt_logprobs=st.sampled_from([None, None, 1]),
            stop_token_ids=st.sampled_from([[], [STOP], list(range(0, VOCAB, 4))]),
        ),
        st.sampled_from([0, 0, 1, 5]),
    ),
)
@settings(max_examples=30)
def test_all_that_callers_get_is_the_same(options: Any, cached: bool, asked: list[Asked]) -> None:
    """Whatever is asked for, and wherever sequences end: tokens, logprobs and reasons are equal."""
    options["prefix_caching"] = cached
    plain, overlapped = (served(options, asked, each) for each in (False, True))
    assert overlapped.results() == plain.results()
    assert plain.early == 0


@given(options, requests(params(), st.just(0)))
@settings(max_examples=20)
def test_every_step_gives_what_it_gave(options: Any, asked: list[Asked]) -> None:
    """Where only lengths end sequences, each call of ``step`` returns the same, in order."""
    options["prefix_caching"] = False
    plain, overlapped = (served(options, asked, each) for each in (False, True))
    assert overlapped.changes == plain.changes
    computed = [
        Counter(map(len, (s.input_ids for s in run.setup.pages.steps)))
        for run in (plain, overlapped)
    ]
    assert computed[0] == computed[1]  # no row was computed in vain


PLENTY = {"num_pages": 200, "max_num_batched_tokens": 200}


def test_a_batch_that_decodes_is_always_launched_early() -> None:
    """Also while others wait for a place or for pages; a prompt's step is not."""
    for few in ({"max_num_seqs": 3}, {"num_pages": 13}):
        run = started({**PLENTY, "prefix_caching": False, **few}, True)
        for index in range(5):
            run.setup.engine.add(str(index), [1] * 13, greedy(3))  # on four pages each
        run.finish()
        steps = run.setup.pages.steps
        assert [len(step.table_rows) for step in steps] == [3, 3, 3, 2, 2, 2]
        assert [bool(step.num_sampled) for step in steps] == [False, True, True] * 2


def test_a_request_that_arrives_meanwhile_is_computed_one_step_later() -> None:
    """The step that is launched already is finished first, and the tokens are the same."""
    run = started(PLENTY, True)
    first = run.setup.engine.add("first", [1, 2], greedy(20))
    for _ in range(3):
        run.step()
    assert len(run.setup.pages.steps) == 4
    late = run.setup.engine.add("late", [2, 1], greedy(20))
    run.step()
    run.step()
    assert [[name for name, _ in changes] for changes in run.changes[-2:]] == [
        ["first"],
        ["first", "late"],
    ]
    run.finish()
    alone = started(PLENTY, False)
    for request in (first, late):
        again = alone.setup.engine.add(request.request_id, request.prompt_token_ids, request.params)
        alone.finish()
        assert request.sequences[0].output == again.sequences[0].output


@given(st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=20), st.integers(1, 6))
@settings(max_examples=20)
def test_a_sequence_that_stops_costs_one_row(stops: set[int], count: int) -> None:
    """What is computed for it in the next step is dropped, and no step computes more."""
    rows = []
    for overlapped in (False, True):
        run = started(PLENTY, overlapped, prefix_caching=False)
        for index in range(count):
            asked = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=sorted(stops))
            run.requests.append(run.setup.engine.add(str(index), [index + 1, 2], asked))
        run.finish()
        rows.append(sum(len(step.input_ids) for step in run.setup.pages.steps))
    stopped = [r for r in run.requests if r.sequences[0].finish_reason == "stop"]
    # One that stops at the token before its last has no next step to be in.
    most = sum(len(r.sequences[0].output) < 20 for r in stopped)
    assert rows[1] - rows[0] == most


@given(st.data())
@settings(max_examples=20)
def test_new_weights_compute_the_very_next_token(data: st.DataObject) -> None:
    """A step that was launched with the weights before an update is computed again."""
    asked = data.draw(requests(params(), st.just(0)))
    updates = data.draw(st.sets(st.integers(1, 30), max_size=4))
    runs = [started({**PLENTY, "max_num_seqs": 30}, overlapped) for overlapped in (False, True)]
    for run in runs:
        for index, each in enumerate(asked):
            run.requests.append(run.setup.engine.add(str(index), each.prompt, each.params))
        while run.setup.engine.requests:
            run.step()
            if len(run.changes) in updates:
                run.setup.pages.choices = run.setup.pages.choices.roll(1, 0)
                run.setup.engine.resume()
    assert runs[1].results() == runs[0].results()
    assert runs[1].changes == runs[0].changes


@given(options, requests(params(), st.sampled_from([0, 1, 4])), st.data())
@settings(max_examples=20)
def test_aborts_change_no_other_request(
    options: Any, asked: list[Asked], data: st.DataObject
) -> None:
    """A request that is aborted between or within steps frees its pages; the others go on."""
    plain = served(options, asked, False)
    run = started(options, True)
    pages, engine = run.setup.pages, run.setup.engine
    within: list[str] = []

    def execute(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        while within:
            engine.abort(within.pop())
        return pages(inputs, sampled)

    engine.execute = execute
    for index, each in enumerate(asked):
        run.requests.append(engine.add(str(index), each.prompt, each.params))
        for _ in range(each.steps):
            run.step()
        gone = data.draw(st.sets(st.sampled_from(range(index + 1)), max_size=2))
        if data.draw(st.booleans()):
            within += map(str, gone)
        else:
            for number in gone:
                engine.abort(str(number))
    run.finish()
    for request, whole in zip(run.requests, plain.requests, strict=True):
        for ours, theirs in zip(request.sequences, whole.sequences, strict=False):
            aborted = ours.finish_reason == "abort"
            assert ours.output == theirs.output[: len(ours.output) if aborted else None]


def test_nothing_stays_launched_without_requests() -> None:
    """A step whose sequences have all ended is dropped, with the memory of its logits."""
    (plain,) = served(PLENTY, [Asked([1, 2], greedy(4), 0)], False).requests
    for end in ("stop", "abort", "fail"):
        run = started(PLENTY, True)
        stop = plain.sequences[0].output[3:] if end == "stop" else []
        run.setup.engine.add("only", [1, 2], greedy(20, stop_token_ids=stop))
        for _ in range(4):
            run.step()
        if end == "abort":
            run.setup.engine.abort("only")
        elif end == "fail":
            run.setup.engine.fail("it is over")
        assert len(run.setup.pages.steps) == 5
        assert not run.setup.engine._launched
        run.finish()


def test_a_new_request_does_not_wait_for_ended_ones() -> None:
    """If all sequences of the launched step have ended, the next step is another."""
    run = started({**PLENTY, "max_num_seqs": 1}, True)
    for name in ("gone", "next"):
        run.setup.engine.add(name, [1, 2], greedy(9))
    run.step()
    run.setup.engine.abort("gone")
    run.step()
    assert run.changes[-1] == [("next", [1])]
    run.finish()


def test_an_early_step_that_fails_is_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    """Before or after its pages were listed; the log says so, and tokens are the same."""
    asked = [Asked([1, index], greedy(20, n=1 + index % 2), 0) for index in range(4)]
    plain = served(PLENTY, asked, False)
    run = started(PLENTY, True)
    pages, fails = run.setup.pages, 0

    def execute(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal fails
        fails += bool(inputs.num_sampled)
        if inputs.num_sampled and fails % 3 == 1:
            raise RuntimeError("before")
        logits = pages(inputs, sampled)
        if inputs.num_sampled and fails % 3 == 2:
            raise RuntimeError("after")
        return logits

    run.setup.engine.execute = execute
    for index, each in enumerate(asked):
        run.requests.append(run.setup.engine.add(str(index), each.prompt, each.params))
    run.finish()
    assert run.results() == plain.results()
    assert run.changes == plain.changes
    assert fails > 5
    assert "failed, and is computed again after the tokens before it are read: " in caplog.text


def test_a_request_that_makes_an_early_step_fail_ends_alone() -> None:
    """The step is repeated for each of its sequences, as any step that fails."""
    ends = []
    for overlapped in (False, True):
        run = started(PLENTY, overlapped)
        pages = run.setup.pages

        def execute(
            inputs: StepInputs, sampled: torch.Tensor | None = None, pages: Any = pages
        ) -> torch.Tensor:
            if max(inputs.positions) >= 9:
                raise IndexError("index out of range in self")
            return pages(inputs, sampled)  # type: ignore[no-any-return]

        run.setup.engine.execute = execute
        for name, prompt in (("good", [1, 2]), ("bad", [1] * 5)):
            run.requests.append(run.setup.engine.add(name, prompt, greedy(7)))
        run.finish()
        ends.append((run.results(), run.changes))
    assert ends[0] == ends[1]
    assert "a step with this request alone failed: IndexError" in str(run.requests[1].error)
    assert run.requests[0].error is None


def test_an_early_step_that_cannot_be_repeated_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Above one rank, the engine has ended: the error comes at once, and no log says it goes on."""
    run = started(PLENTY, True)
    engine, pages = run.setup.engine, run.setup.pages
    engine.repeatable = False
    calls = []

    def execute(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(inputs.num_sampled)
        if inputs.num_sampled:
            raise RuntimeError("rank 1 has ended")
        return pages(inputs, sampled)  # type: ignore[no-any-return]

    engine.execute = execute
    requests = [engine.add(name, [1, 2], greedy(9)) for name in ("a", "b")]
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        run.step()
    assert calls == [0, 2]
    assert "computed again" not in caplog.text
    for request in requests:
        assert request.error == "a step of requests a, b failed: RuntimeError: rank 1 has ended"
    run.setup.assert_all_free()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_an_early_step_ends_all_requests(error: type[BaseException]) -> None:
    """The error is raised, no page is lost, and later requests get their tokens."""
    run = started(PLENTY, True)
    pages = run.setup.pages

    def execute(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        if inputs.num_sampled:
            raise error
        return pages(inputs, sampled)  # type: ignore[no-any-return]

    run.setup.engine.execute = execute
    request = run.setup.engine.add("only", [1, 2], greedy(9))
    with pytest.raises(error):
        run.step()
    assert request.error == f"a step of request only failed: {error.__name__}"
    run.setup.assert_all_free()
    run.setup.engine.execute = pages
    again = run.setup.engine.add("again", [1, 2], greedy(9))
    run.finish()
    assert again.error is None
    assert len(again.sequences[0].output) == 9


@pytest.mark.parametrize("place", [0, 1])
def test_broken_logits_end_their_request_alone(place: int) -> None:
    """No token is chosen, so the early step computes another in its place, and it is dropped."""
    ends = []
    for overlapped in (False, True):
        run = started(PLENTY, overlapped)
        pages = run.setup.pages

        def execute(
            inputs: StepInputs, sampled: torch.Tensor | None = None, pages: Any = pages
        ) -> torch.Tensor:
            chosen = None if sampled is None else sampled.clamp(min=0)
            logits: torch.Tensor = pages(inputs, chosen)
            if inputs.positions[0] == 5 and len(logits) == 3:
                logits[place] = torch.nan
            return logits

        run.setup.engine.execute = execute
        for index in range(3):
            asked = SamplingParams(seed=1, max_tokens=9, logprobs=1, presence_penalty=0.5)
            run.requests.append(run.setup.engine.add(str(index), [index, 2], asked))
        run.finish()
        ends.append((run.results(), run.changes))
    assert ends[0] == ends[1]
    broken = [request.error is not None for request in run.requests]
    assert broken == [index == place for index in range(3)]


TOKENS = 6
MIXED = [
    {"temperature": 0, "logprobs": 2},
    {"seed": 1, "top_k": 5, "frequency_penalty": 0.5},
    {"seed": 2, "logit_bias": {3: 2.0}, "max_tokens": 4},
    {"seed": 3, "top_p": 0.9, "max_tokens": 3},
]


class Real:
    """An engine with a model on a simulated device, which replays graphs.

    Attributes:
        noted: "launch" where a step is launched, "early" if the tokens before it were not read, and
            "read" where the host waits for tokens.

    """

    def __init__(self, model: vLLMModule, overlapped: bool) -> None:
        self.device, self.noted = SimulatedDevice(), list[str]()
        model = deepcopy(model)
        with self.device.present():
            self.device.take(model)
            KVCache(model, 40, 16, DEVICE, torch.float32)
            self.runner = ModelRunner(model, DEVICE, 8, 4)
            self.runner.capture(0)
        scheduler = Scheduler(PagePool(40, 16), PagePool(0, 16), 8, 100)
        self.engine = Engine(
            self.execute, scheduler, 130, 64, wait=self.wait, async_scheduling=overlapped
        )

    def execute(self, inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        self.noted.append("early" if inputs.num_sampled else "launch")
        return self.runner.run(inputs, sampled)

    def wait(self, event: torch.cuda.Event) -> None:
        self.noted.append("read")
        event.synchronize()

    def serve(self, asked: list[dict[str, Any]]) -> list[Any]:
        """Return the tokens and logprobs of requests."""
        self.device.copies.clear()
        with self.device.present():
            requests = [
                self.engine.add(
                    str(index), [index + 3, 5, 8], SamplingParams(**{"max_tokens": TOKENS, **each})
                )
                for index, each in enumerate(asked)
            ]
            while self.engine.requests:
                self.engine.step()
        return [(each.output, each.logprobs) for each in [r.sequences[0] for r in requests]]


@pytest.mark.parametrize("asked", [[{"temperature": 0}] * 3, MIXED], ids=["greedy", "mixed"])
def test_no_token_is_read_before_the_next_step_is_launched(
    model: vLLMModule, asked: list[dict[str, Any]]
) -> None:
    """On a device whose copies come late, and with one wait, one download and one upload a step."""
    plain, real = (Real(model, overlapped) for overlapped in (False, True))
    assert real.serve(asked) == plain.serve(asked)
    assert plain.noted == ["launch", "read"] * TOKENS
    assert real.noted == ["launch", *["early", "read"] * (TOKENS - 1), "read"]
    for each in (plain, real):
        assert each.device.waits == each.device.copied_back == TOKENS
        assert all(is_pinned for _, is_pinned in each.device.copies)
        # Sampling sends nothing if all take the most probable token.
        assert len(each.device.copies) == TOKENS * (1 if asked is not MIXED else 2)
        assert sum(graph.replays for graph in each.runner._graphs.values()) == TOKENS - 1


def test_steps_of_one_sequence_keep_their_logits(model: vLLMModule) -> None:
    """After a step that failed, each sequence's graph writes where that of the one before wrote."""
    plain, real = (Real(model, False) for _ in range(2))
    asked = [{"temperature": 0}, {"temperature": 0}, {"seed": 1}]
    execute, calls = real.execute, []

    def failing(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(len(inputs.context_lens))
        if len(calls) == 4:
            raise RuntimeError("no memory")
        return execute(inputs, sampled)

    real.engine.execute = failing
    assert real.serve(asked) == plain.serve(asked)
    assert calls[:8] == [3, 3, 3, 3, 1, 1, 1, 3]
