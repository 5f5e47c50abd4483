"""Sampling: equal to a plain implementation, for each row and whatever the batch."""

from __future__ import annotations

import math
import random
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from vllm_module.runtime.sampling.row import Row
from vllm_module.runtime.sampling_params import SamplingParams

# Pytest's importlib mode has no imports between test files.
DRAWN: Any = runpy.run_path(str(Path(__file__).with_name("drawn.py")))
ALMOST_1, GREEDY, sample = (DRAWN[name] for name in ("ALMOST_1", "GREEDY", "sample"))
tokens, shares, order, adjust = (DRAWN[name] for name in ("tokens", "shares", "order", "adjust"))
distribution, mixed_rows = (DRAWN[name] for name in ("distribution", "mixed_rows"))
HIDDEN = DRAWN["HIDDEN"]


@st.composite
def row_and_logits(draw: st.DrawFn) -> tuple[Row, torch.Tensor]:
    """Draw a row with logits on a grid, so that ties occur and adjustments are exact in float32."""
    vocab = draw(st.sampled_from([1, 2, 7, 64, 100, 200]))
    seed = draw(st.integers(0, 2**32))
    spread = draw(st.sampled_from([8, 64]))
    logits = (
        torch.randint(
            -spread, spread + 1, (vocab,), generator=torch.Generator().manual_seed(seed)
        ).float()
        / 8
    )
    token = st.integers(0, vocab - 1)
    quarter = st.sampled_from([0.0, 0.0, -0.5, 0.25, 1.5])
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_p=draw(st.just(1.0) | st.floats(0.01, 1)),
        top_k=draw(st.integers(-1, vocab + 1)),
        min_p=draw(st.just(0.0) | st.floats(0, 1)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 2.0])),
        presence_penalty=draw(quarter),
        frequency_penalty=draw(quarter),
        logit_bias=draw(
            st.none()
            | st.dictionaries(token, st.integers(-32, 32).map(lambda i: i / 4), max_size=3)
        ),
    )
    ids = draw(st.lists(token, max_size=12))
    banned = draw(st.sets(token, max_size=min(3, vocab - 1)))
    return Row(params, ids, draw(st.integers(0, len(ids))), 0.0, banned), logits


@settings(max_examples=120)
@given(row_and_logits())
def test_tokens_are_drawn_by_their_probabilities(case: tuple[Row, torch.Tensor]) -> None:
    """Of evenly spaced uniforms, each token gets its probability's share, give or take one."""
    row, logits = case
    expected, clear = distribution(logits.tolist(), row)
    assume(clear)
    for token, count in enumerate(shares(logits, row, 64).tolist()):
        assert abs(count - 64 * expected[token]) <= 1 + 1e-6
        assert count == 0 or expected[token] > 0


@settings(max_examples=12)
@given(
    st.sampled_from([4095, 4096, 5000, 70_000]),
    st.sampled_from([0.1, 1.0, 4.0]),
    st.sampled_from([0, 1, 50, 64, 65, 2000]),
    st.sampled_from([0.2, 0.9, 1.0]),
    st.integers(0, 2**32),
)
def test_no_token_is_drawn_beyond_the_cut_of_a_large_vocabulary(
    vocab: int, spread: float, top_k: int, top_p: float, seed: int
) -> None:
    """Sorting only some of the tokens draws exactly the tokens of the full top_k and top_p."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(vocab, generator=generator) * spread).bfloat16().float()  # with ties
    row = Row(SamplingParams(top_k=top_k, top_p=top_p))
    probabilities, clear = distribution(logits.tolist(), row)
    assume(clear)
    expected = torch.tensor(probabilities, dtype=torch.float64)
    counts = shares(logits, row, 16)
    assert ((counts - 16 * expected).abs() <= 1 + 1e-6).all()
    assert (expected[counts > 0] > 0).all()


@settings(max_examples=15)
@given(st.floats(0.3, 1), st.sampled_from([2, 40, 10_000]), st.integers(0, 2**32))
def test_a_wide_top_p_ends_at_the_right_token(top_p: float, steps: int, seed: int) -> None:
    """Of many tokens, ties included, exactly the fewest that reach top_p are drawn."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-steps, steps + 1, (300,), generator=generator) / (2 * steps)
    row = Row(SamplingParams(top_p=top_p))
    probabilities, clear = distribution(logits.tolist(), row)
    assume(clear)
    expected = torch.tensor(probabilities, dtype=torch.float64)
    assert ((shares(logits, row, 600) > 0) == (expected > 0)).all()  # each has above 1/600


def draw_exactly(logits: list[float], row: Row) -> int:
    """Choose a row's token in integers of any size, one token after the other."""
    p = row.params
    x = torch.tensor(adjust(logits, row), dtype=torch.float64)
    first = order(x.tolist())
    if p.temperature == 0:
        return first[0]
    part = ((x - x.max()) / p.temperature).exp()
    part[part < p.min_p] = 0
    weights = [int(value * 2.0 ** (62 - len(x).bit_length())) for value in part.tolist()]
    if 0 < p.top_k < len(x):
        weights = [w if token in first[: p.top_k] else 0 for token, w in enumerate(weights)]
    total = sum(weights)
    needed = min(max(math.ceil(total * p.top_p), 1), total)
    nucleus: list[int] = []
    while sum(weights[token] for token in nucleus) < needed:
        nucleus.append(first[len(nucleus)])
    # By probability if few tokens were sorted, and else by id.
    few = 0 < p.top_k < len(x) or (p.top_p < 1 and len(nucleus) <= 64)
    total = sum(weights[token] for token in nucleus)
    target = min(int(total * row.uniform), total - 1)
    for token in nucleus if few else sorted(nucleus):
        target -= weights[token]
        if target < 0:
            return token
    raise AssertionError("the target is beyond the nucleus")


@settings(max_examples=150)
@given(row_and_logits(), st.floats(0, 1, exclude_max=True))
def test_a_token_is_exactly_that_of_its_number(
    case: tuple[Row, torch.Tensor], uniform: float
) -> None:
    """Integers that are summed by blocks give the token that they give one by one."""
    row, logits = case
    row.uniform = uniform
    assert tokens(logits.unsqueeze(0), [row]) == [draw_exactly(logits.tolist(), row)]


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(3, torch.float32), (130, torch.bfloat16), (5003, torch.bfloat16), (33_001, torch.float32)],
)
def test_a_row_does_not_depend_on_the_others(vocab: int, dtype: torch.dtype) -> None:
    """A row gets the same token and the same bits alone, and anywhere in any batch."""
    rows = mixed_rows(vocab, 32)
    logits = torch.randn(32, vocab).mul(3).to(dtype)
    together = sample(logits, rows)
    assert together == sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    for size in (5, 31):
        places = random.Random(size).sample(range(32), size)
        assert sample(logits[places], [rows[i] for i in places]) == [together[i] for i in places]


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([torch.float64, torch.float16]))
def test_logits_of_any_dtype_and_layout_are_left_alone(seed: int, dtype: torch.dtype) -> None:
    """The token is that of the float32 values, and the caller's logits do not change."""
    rows = mixed_rows(130, 12)
    logits = torch.randn(130, 12, generator=torch.Generator().manual_seed(seed)).half().to(dtype).T
    before = logits.clone()
    assert sample(logits, rows) == sample(logits.float().contiguous(), rows)
    assert torch.equal(logits, before)


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the p-value of Pearson's chi-square test."""
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = probabilities[kept] * counts.sum()
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = (kept.sum() - 1).double()
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.7, "top_k": 15, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_the_distribution_is_the_exact_one(values: dict[str, Any]) -> None:
    """Draws pass a chi-square test against the exact distribution, and fail it against another."""
    logits = torch.randn(25, generator=torch.Generator().manual_seed(5))
    params = SamplingParams(**values)
    uniform = random.Random(11)
    drawn = tokens(
        logits.expand(12_000, -1), [Row(params, uniform=uniform.random()) for _ in range(12_000)]
    )
    counts = torch.tensor(drawn).bincount(minlength=25)
    exact = torch.tensor(distribution(logits.tolist(), Row(params))[0], dtype=torch.float64)
    assert chi_square(counts, exact) > 1e-3
    warmer = exact**0.8
    assert chi_square(counts, warmer / warmer.sum()) < 1e-6


@settings(max_examples=40)
@given(
    HIDDEN,
    st.sampled_from(
        [
            ({"temperature": 0.4}, theirs.TemperatureLogitsWarper(0.4)),
            ({"top_k": 9}, theirs.TopKLogitsWarper(9)),
            ({"top_p": 0.7}, theirs.TopPLogitsWarper(0.7)),
            ({"min_p": 0.05}, theirs.MinPLogitsWarper(0.05)),
            ({"repetition_penalty": 1.4}, theirs.RepetitionPenaltyLogitsProcessor(1.4)),
            ({"repetition_penalty": 0.7}, theirs.RepetitionPenaltyLogitsProcessor(0.7)),
        ]
    ),
    st.lists(st.integers(0, 119), min_size=1, max_size=20),
    st.integers(0, 20),
)
def test_each_parameter_means_what_it_does_in_transformers(
    logits: torch.Tensor, pair: tuple[dict[str, Any], Any], ids: list[int], prompt_len: int
) -> None:
    """Tokens are drawn with the probabilities that transformers' processor gives them."""
    values, processor = pair
    expected = processor(torch.tensor([ids]), logits.clone())[0].double().softmax(-1)
    counts = shares(logits[0], Row(SamplingParams(**values), ids, prompt_len), 200)
    assert ((counts - 200 * expected).abs() <= 1 + 1e-4).all()
    assert (expected[counts > 0] > 0).all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("vocab", [1, 32, 65, 4097, 20001])
def test_greedy_takes_the_lowest_of_equal_tokens(vocab: int, dtype: torch.dtype) -> None:
    """Of equal largest logits the lowest id is taken, greedily and with top_k=1."""
    logits = torch.randint(-1, 1, (6, vocab)).to(dtype)
    logits[:, ::2] = -logits[:, ::2].abs()  # 0 is no larger than -0
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert tokens(logits, [Row(GREEDY)] * 6) == expected
    assert tokens(logits, [Row(SamplingParams(temperature=0, top_p=0.1))] * 6) == expected
    assert tokens(logits, [Row(GREEDY)] * 5 + [Row(SamplingParams())])[:5] == expected[:5]
    for uniform in (0.0, 0.6, ALMOST_1):
        assert tokens(logits, [Row(SamplingParams(top_k=1), uniform=uniform)] * 6) == expected
        narrow = SamplingParams(top_p=1e-9, temperature=3)
        assert tokens(logits, [Row(narrow, uniform=uniform)] * 6) == expected


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, 1), (0.5000001, 2), (0.75, 2), (0.7500001, 3), (0.875, 3), (1, 4)]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, kept: int) -> None:
    """A mass that is reached exactly needs no further token, and lower ids win ties."""
    halves = torch.tensor([0.0, 2.0, 1.0, 0.0]) * math.log(2)  # 1/8, 1/2, 1/4, 1/8
    counts = shares(halves, Row(SamplingParams(top_p=top_p)), 64)
    assert (counts > 0).nonzero().flatten().tolist() == sorted([1, 2, 0, 3][:kept])


@pytest.mark.parametrize(
    "values",
    [{}, {"top_k": 3}, {"top_p": 0.9999}, {"min_p": 1e-9}, {"temperature": 1e-300}],
    ids=str,
)
@pytest.mark.parametrize("uniform", [0.0, 5e-324, 0.5, ALMOST_1])
def test_no_uniform_gives_a_token_of_probability_zero(
    values: dict[str, Any], uniform: float
) -> None:
    """From 0 to just below 1, every uniform draws a token with a positive probability."""
    rows = [Row(SamplingParams(**values), uniform=uniform)] * 4
    possible = [{2}, {0, 4}, {1, 2}, {0, 1, 2, 3, 4}]
    logits = torch.full((4, 5), -torch.inf)
    for row, ids in enumerate(possible):
        logits[row, list(ids)] = 1e4 - row
    logits[2, 3] = -1e4  # too improbable to have a weight
    for token, ids in zip(tokens(logits, rows), possible, strict=True):
        assert token in ids


def test_a_seed_gives_the_same_tokens_again() -> None:
    """Uniforms from a seeded generator give the same tokens again."""

    def draw(seed: int) -> list[int]:
        uniform = random.Random(seed)
        return [
            tokens(logits, [Row(SamplingParams(), uniform=uniform.random())])[0] for _ in "x" * 9
        ]

    logits = torch.randn(1, 500)
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_edges() -> None:
    """The vocabulary's last token, a mass reached exactly, equal first tokens, and float64."""
    logits = torch.zeros(4100)
    logits[-1] = 1.0
    counts = shares(logits, Row(SamplingParams(top_k=3)), 64)
    assert counts.nonzero().flatten().tolist() == [0, 1, 4099]
    logits = torch.zeros(8230)  # its last block is not full, and is read with tokens before it
    logits[[-1, -50]] = 1.0
    counts = shares(logits, Row(SamplingParams(top_k=3)), 64)
    assert counts.nonzero().flatten().tolist() == [0, 8180, 8229]
    assert shares(torch.zeros(256), Row(SamplingParams(top_p=0.5)), 1024).count_nonzero() == 128
    assert shares(torch.tensor([1.0, 1.0, 0.0]), Row(SamplingParams(min_p=1)), 8).tolist()[:2] == [
        4,
        4,
    ]
    assert tokens(torch.tensor([[1.0, 1 + 1e-12]], dtype=torch.float64), [Row(GREEDY)]) == [0]
