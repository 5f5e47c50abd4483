"""A search of as many beams as there are continuations finds them all, in the order of scores."""

from __future__ import annotations

import random
from itertools import product

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

    def next_logprobs(beams: list[list[int]], count: int) -> list[dict[int, Logprob]]:
        assert count == 2 * width
        return [{t: Logprob(logprob(tuple(b), t), 1) for t in range(VOCAB)} for b in beams]

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
