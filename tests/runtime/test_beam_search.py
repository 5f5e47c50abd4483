"""A search of as many beams as there are continuations finds them all, in the order of scores."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_module.runtime.beam_search import BeamSearchParams, search
from vllm_module.runtime.sampling.sampler import Logprob

END, VOCAB, LONGEST, PROMPT = 0, 3, 3, [1, 2]


def logprob(tokens: tuple[int, ...], token: int) -> float:
    return -5 * random.Random(repr((tokens, token))).random()


def cumulated(continuation: tuple[int, ...]) -> float:
    pairs = ((continuation[:at], token) for at, token in enumerate(continuation))
    return sum(logprob((*PROMPT, *before), token) for before, token in pairs)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_scores_are_vllms_formula(penalty: float) -> None:
    """The sum of logprobs over a power of the length, which an end token is not counted in."""

    def next_logprobs(beams: list[tuple[int, list[int]]], count: int) -> list[dict[int, Logprob]]:
        assert count == 2 * width
        return [{t: Logprob(logprob(tuple(b), t), 1) for t in range(VOCAB)} for _, b in beams]

    every = {c for n in range(1, LONGEST + 1) for c in product(range(VOCAB), repeat=n)}
    ended = [c for c in every if c[-1] == END and END not in c[:-1]]
    cut = [c for c in every if len(c) == LONGEST and END not in c]
    width = len(ended) + len(cut)

    def score(continuation: tuple[int, ...]) -> float:
        length = len(PROMPT) + len(continuation) - (continuation[-1] == END)
        return cumulated(continuation) / length**penalty

    expected = sorted([*ended, *cut], key=score, reverse=True)
    params = BeamSearchParams(width, LONGEST, length_penalty=penalty)
    (found,) = search(next_logprobs, [PROMPT], params, [END], max_model_len=1000)
    assert [tuple(each.tokens[len(PROMPT) :]) for each in found.sequences] == expected
    for each in found.sequences:
        assert each.stop_reason == (END if each.tokens[-1] == END else None)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(("width", "longest", "context"), [(1, 4, 99), (2, 4, 99), (3, 9, 5)])
def test_few_beams_are_kept_by_their_scores(
    width: int, longest: int, context: int, ignore_eos: bool
) -> None:
    """Each prompt has beams of its own: the best ``width`` of all that grew, after each token."""
    prompts = [[1, 2], [2]]

    def next_logprobs(beams: list[tuple[int, list[int]]], count: int) -> list[dict[int, Logprob]]:
        assert all(tokens[: len(prompts[at])] == prompts[at] for at, tokens in beams)
        assert beams, "all have ended"
        return [{t: Logprob(logprob(tuple(b), t), 1) for t in range(VOCAB)} for _, b in beams]

    params = BeamSearchParams(width, longest, ignore_eos)
    steps: list[int] = []

    @contextmanager
    def bar(**_: Any) -> Iterator[Any]:
        yield SimpleNamespace(update=steps.append)

    found = search(next_logprobs, prompts, params, [END], context, bar)
    assert steps == [1] * min(longest, context - 1)  # of the shorter prompt
    for prompt, output in zip(prompts, found, strict=True):
        beams: list[tuple[float, list[int]]] = [(0.0, prompt)]
        done: list[tuple[float, list[int]]] = []

        def score(beam: tuple[float, list[int]], prompt: list[int] = prompt) -> float:
            ended = beam[1][-1] == END and len(beam[1]) > len(prompt) and not ignore_eos
            return beam[0] / (len(beam[1]) - ended)

        for _ in range(longest):
            grown = [
                (total + logprob(tuple(tokens), token), [*tokens, token])
                for total, tokens in beams
                for token in range(VOCAB)
            ]
            ends = [
                (beam[1][-1] == END and not ignore_eos) or len(beam[1]) == context for beam in grown
            ]
            done += [beam for beam, end in zip(grown, ends, strict=True) if end]
            grown = [beam for beam, end in zip(grown, ends, strict=True) if not end]
            beams = sorted(grown, key=score, reverse=True)[:width]
        best = sorted([*done, *beams], key=score, reverse=True)[:width]
        assert [each.tokens for each in output.sequences] == [tokens for _, tokens in best]
        for each, (total, tokens) in zip(output.sequences, best, strict=True):
            assert each.cum_logprob == pytest.approx(total)
            befores = [tuple(tokens[:at]) for at in range(len(prompt), len(tokens))]
            assert [entry[1].logprob for entry in each.logprobs] == [logprob(b, 1) for b in befores]
            stopped = tokens[-1] == END and not ignore_eos
            assert (each.finish_reason, each.stop_reason) == (
                ("stop", END) if stopped else ("length", None)
            )


@pytest.mark.parametrize(
    "given",
    [
        {"beam_width": 0}, {"beam_width": -1}, {"beam_width": True}, {"beam_width": 2.0},
        {"max_tokens": 0}, {"max_tokens": "3"}, {"length_penalty": float("inf")},
        {"length_penalty": float("nan")}, {"length_penalty": "1"}, {"length_penalty": True},
        {"temperature": 0.5}, {"include_stop_str_in_output": True},
    ],
)  # fmt: skip
def test_settings_that_no_search_has_are_refused(given: dict[str, Any]) -> None:
    """The nearest that are right are taken: one beam, one token, and any finite exponent."""
    BeamSearchParams(1, 1, length_penalty=-2)
    with pytest.raises(ValueError, match=r"integer from 1|finite number|temperature of 0"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **given})
