"""Requests that are refused, and steps that fail or are interrupted."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.runtime.engine import Engine
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.step_inputs import StepInputs

# Pytest's importlib mode has no imports between test files.
PAGED: Any = runpy.run_path(str(Path(__file__).with_name("paged.py")))
VOCAB, expected, Setup, greedy = (PAGED[name] for name in ("VOCAB", "expected", "Setup", "greedy"))


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


def test_samples_share_what_their_parameters_name() -> None:
    """A long list of a request is read once, and not again for each of its samples and steps."""
    setup = Setup(num_pages=20)
    allowed = SamplingParams(n=3, allowed_token_ids=[4, 2, 4], ignore_eos=True, max_tokens=4)
    request = setup.engine.add("one", [1, 2], allowed)
    named = request.named
    for _ in range(3):
        setup.engine.step()
        assert {sequence.sampling_row.named for sequence in request.sequences} == {named}
    assert len(request.sequences) == 3
    assert {token for each in request.sequences for token in each.output} <= {2, 4}
