"""Rows that are broken or refused, and the logprobs of the others."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from vllm_module.runtime.sampling import sampler
from vllm_module.runtime.sampling.adjustments import Adjustments
from vllm_module.runtime.sampling.row import NamedTokens, Row
from vllm_module.runtime.sampling.sampler import LogitsError, prompt_logprobs
from vllm_module.runtime.sampling.token_counts import TokenCounts
from vllm_module.runtime.sampling_params import SamplingParams

# Pytest's importlib mode has no imports between test files.
DRAWN: Any = runpy.run_path(str(Path(__file__).with_name("drawn.py")))
GREEDY, sample, tokens, broken = (DRAWN[name] for name in ("GREEDY", "sample", "tokens", "broken"))
order, adjust, distribution = (DRAWN[name] for name in ("order", "adjust", "distribution"))
mixed_rows, HIDDEN = (DRAWN[name] for name in ("mixed_rows", "HIDDEN"))


@pytest.mark.parametrize("values", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_rows_that_are_broken_are_found(values: dict[str, Any], biased: bool) -> None:
    """NaN of either sign, inf, and rows of only -inf are found; the other rows get their tokens."""
    bias = {0: 1.0} if biased else None
    rows = [Row(SamplingParams(**values, logit_bias=bias), uniform=0.3) for _ in range(6)]
    logits = torch.randn(6, 200)
    good = tokens(logits, rows)
    logits[1, 150] = torch.nan
    logits[2, 199] = -torch.tensor(torch.nan)
    logits[3, 7] = torch.inf
    logits[5] = -torch.inf
    assert broken(logits, rows) == [1, 2, 3, 5]
    assert [token.token_id for token in sample(logits, rows)] == [good[0], good[4]]


def test_a_banned_token_is_not_chosen() -> None:
    """Neither a bias nor the largest logit makes a banned token possible."""
    logits = torch.tensor([[9.0, 1.0, 5.0]])
    params = SamplingParams(temperature=0, logit_bias={0: 100.0})
    assert tokens(logits, [Row(params)]) == [0]
    assert tokens(logits, [Row(params, banned={0})]) == [2]
    assert tokens(logits, [Row(params, banned=(0, 2, 2))]) == [1]
    assert broken(logits, [Row(params, banned={0, 1, 2})]) == [0]


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[list[Row]], torch.Tensor]:
    """Draw requests, each as rows of its samples, and logits of all rows, without ties."""
    vocab = draw(st.sampled_from([3, 40, 300]))
    token = st.integers(0, vocab - 1)
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        bias = st.dictionaries(token, st.integers(-32, 32).map(lambda i: i / 4), max_size=4)
        params = SamplingParams(
            temperature=0,
            logit_bias=draw(st.none() | bias),
            allowed_token_ids=draw(st.none() | st.lists(token, min_size=1, max_size=9)),
            presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        )
        rows, named = [], NamedTokens(params)
        for _ in range(draw(st.integers(1, 4))):
            ids = draw(st.lists(token, max_size=5))
            banned = draw(st.sets(token, max_size=2))
            rows.append(Row(params, ids, 2, banned=banned, named=named))
        requests.append(rows)
    count, random = sum(map(len, requests)), torch.Generator()
    random.manual_seed(draw(st.integers(0, 2**32)))
    values = [torch.randperm(vocab, generator=random).float() / 8 + 1 / 64 for _ in range(count)]
    return requests, torch.stack(values)


@given(samples(), st.randoms())
def test_samples_share_the_biased_and_allowed_tokens_of_their_request(
    case: tuple[list[list[Row]], torch.Tensor], random: Any
) -> None:
    """Each row has the token of plain Python; a request's tokens are sent once for all samples."""
    requests, logits = case
    rows = [row for each in requests for row in each]
    random.shuffle(rows)
    expected = []
    for values, row in zip(logits.tolist(), rows, strict=True):
        adjusted = adjust(values, row)
        first = order(adjusted)[0]
        expected.append(first if adjusted[first] > -math.inf else -1)
    assert sampler.sample(logits, rows).tokens.tolist() == expected
    _, _, biases, named, *_ = Adjustments(
        rows, range(len(rows)), logits.shape[1], TokenCounts()
    ).arrays
    each = [request[0].params for request in requests]
    distinct = sum(len(p.logit_bias or ()) + len({*(p.allowed_token_ids or ())}) for p in each)
    assert len(named) == distinct + sum(len(row.banned) for row in rows)
    assert len(biases) <= len(named)


@settings(max_examples=25)
@given(
    st.sampled_from([1, 5, 130, 4100]),
    st.integers(0, 8),
    st.integers(0, 2**32),
    st.sampled_from([{}, {"temperature": 0}, {"logit_bias": {0: 50.0}}, {"temperature": 0.2}]),
)
def test_logprobs_are_those_of_the_model(
    vocab: int, top: int, seed: int, values: dict[str, Any]
) -> None:
    """Entries are the raw logits' logprobs of the token and of the first tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-9, 9, (3, vocab), generator=generator).bfloat16() / 2
    exact = logits.double().log_softmax(-1).tolist()
    rows = [Row(SamplingParams(logprobs=top, **values), uniform=0.7)] * 2 + [Row(GREEDY)]
    *asked, silent = sample(logits, rows)
    assert (silent.logprob, silent.logprobs) == (None, None)
    chosen = [token.token_id for token in asked]
    assert [token.logprobs for token in asked] == prompt_logprobs(logits[:2], chosen, top)
    for row, token in enumerate(asked):
        first = order(logits[row].tolist())
        assert token.logprobs is not None
        assert list(token.logprobs) == list(dict.fromkeys([token.token_id, *first[:top]]))
        for token_id, entry in token.logprobs.items():
            # Torch adds up 4100 exponentials in float32: 2.8e-6 off in 400 draws of this size.
            assert entry.logprob == pytest.approx(exact[row][token_id], abs=4e-6)
            assert entry.rank == 1 + first.index(token_id)
            assert entry.decoded_token is None
        assert token.logprob == token.logprobs[token.token_id].logprob


@pytest.mark.parametrize("vocab", [2, 63, 64, 65, 66, 300])
@pytest.mark.parametrize("values", [1, 3, 1000])
@pytest.mark.parametrize("count", [0, 70])
def test_each_token_of_a_row_has_a_rank_of_its_own(vocab: int, values: int, count: int) -> None:
    """Ranks are the places in a sorted list, in which equal logits are in the order of ids."""
    logits = torch.randint(values, (vocab,)).float()
    found = prompt_logprobs(logits.expand(vocab, vocab), range(vocab), count)
    ranks = [entries[token].rank for token, entries in enumerate(found)]
    place = {token: rank for rank, token in enumerate(order(logits.tolist()), 1)}
    assert ranks == [place[token] for token in range(vocab)]


@pytest.mark.parametrize("vocab", [5, 130, 4100])
def test_processed_logprobs_are_those_of_the_draw(vocab: int) -> None:
    """Beside raw ones, the tokens are the same; the others have those after bans and cuts."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(24, vocab, generator=generator) * 3
    rows = mixed_rows(vocab, 24)
    for row in rows:
        row.params = row.params.model_copy(update={"logprobs": 4})
    raw = sampler.sample(logits, rows).read()
    found = sampler.sample(logits, rows, processed=True).read()
    compared = 0
    for x, row, token, other in zip(logits.tolist(), rows, found, raw, strict=True):
        assert token is not None
        assert other is not None
        assert token.token_id == other.token_id
        probabilities, certain = distribution(x, row)
        if row.params.temperature == 0:  # of which vLLM's are those of temperature 1
            adjusted = torch.tensor(adjust(x, row), dtype=torch.float64)
            probabilities = adjusted.softmax(-1).tolist()
        if not certain:
            continue
        compared += 1
        assert token.logprobs is not None
        best = sorted(probabilities, reverse=True)
        for token_id, entry in token.logprobs.items():
            expected = probabilities[token_id]
            assert math.exp(entry.logprob) == pytest.approx(expected, abs=1e-9, rel=1e-5)
            assert best[entry.rank - 1] == pytest.approx(expected, abs=1e-9, rel=1e-5)
        assert token.logprob is not None
        assert math.isfinite(token.logprob)
    assert compared >= 12


@settings(max_examples=25)
@given(
    HIDDEN,
    st.sampled_from([
        ({"temperature": 0.4}, theirs.TemperatureLogitsWarper(0.4)),
        ({"top_k": 9}, theirs.TopKLogitsWarper(9)),
        ({"top_p": 0.7}, theirs.TopPLogitsWarper(0.7)),
        ({"min_p": 0.05}, theirs.MinPLogitsWarper(0.05)),
    ]),
)  # fmt: skip
def test_processed_logprobs_are_transformers(
    logits: torch.Tensor, pair: tuple[dict[str, Any], Any]
) -> None:
    values, processor = pair
    expected = processor(torch.zeros(1, 1, dtype=torch.long), logits.clone())[0].log_softmax(-1)
    row = Row(SamplingParams(logprobs=20, **values), uniform=0.3)
    (token,) = sampler.sample(logits, [row], processed=True).read()
    assert token is not None
    assert token.logprobs is not None
    for token_id, entry in token.logprobs.items():
        assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)


@pytest.mark.parametrize(
    "row",
    [
        Row(SamplingParams(logit_bias={8: 1.0})),
        Row(SamplingParams(allowed_token_ids=[1, 8, 1])),
        Row(SamplingParams(repetition_penalty=2), [1, 8]),
        Row(SamplingParams(presence_penalty=1), [1, -1], 1),
        Row(GREEDY, banned={8}),
    ],
)
def test_tokens_outside_of_the_vocabulary_are_refused(row: Row) -> None:
    """No bias, penalty or ban can change another row's logits."""
    with pytest.raises(ValueError, match="outside of the vocabulary of 8"):
        sample(torch.zeros(2, 8), [row, Row(GREEDY)])


def test_arguments_that_do_not_fit_are_refused() -> None:
    """Shapes, dtypes, uniforms and next tokens are checked before any token is chosen."""
    row = Row(GREEDY)
    for logits in (torch.zeros(8), torch.zeros(2, 8), torch.zeros(1, 0), torch.zeros(1, 8).long()):
        with pytest.raises(ValueError, match=r"of shape \[1 rows, vocab\], and are torch"):
            sample(logits, [row])
    for uniform in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"uniform should be in \[0, 1\)"):
            Row(GREEDY, uniform=uniform)
    with pytest.raises(ValueError, match="token 8 is outside"):
        prompt_logprobs(torch.zeros(1, 8), [8], 1)
    with pytest.raises(ValueError, match="2 tokens"):
        prompt_logprobs(torch.zeros(1, 8), [1, 2], 1)
    with pytest.raises(LogitsError, match="row 1 "):
        prompt_logprobs(torch.tensor([[0.0, 1.0], [torch.nan, 1.0]]), [0, 0], 0)
    assert sample(torch.zeros(0, 8), []) == []
    assert prompt_logprobs(torch.zeros(0, 8), [], 3) == []


def test_rows_may_ask_for_different_numbers_of_logprobs() -> None:
    """Each row gets as many as it asked for."""
    rows = [Row(SamplingParams(temperature=0, logprobs=count)) for count in (1, 0, 3)]
    given = sample(torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 3), rows)
    assert [list(token.logprobs or ()) for token in given] == [[1], [1], [1, 2, 3]]


@pytest.mark.parametrize("kept", range(1, 9))
def test_processed_logprobs_end_where_top_p_is_reached(kept: int) -> None:
    """A mass that is reached exactly needs no further token, and lower ids win ties."""
    row = Row(SamplingParams(top_p=kept / 8, logprobs=8))
    (token,) = sampler.sample(torch.zeros(1, 8), [row], processed=True).read()
    assert token is not None
    assert token.logprobs is not None
    found = [each for each, entry in token.logprobs.items() if math.isfinite(entry.logprob)]
    assert sorted(found) == [*range(kept)]


@pytest.mark.parametrize("params", [{"top_k": 20}, {"top_p": 0.9}], ids=str)
def test_a_nan_with_a_sign_ends_its_own_row_alone(params) -> None:
    """A NaN that sorts below everything leaves the other rows their tokens."""
    logits = torch.zeros(2, 50257)
    logits[1, : 63 * 64] = -torch.tensor(torch.nan)
    logits[1, -17:] = 1
    rows = [Row(SamplingParams(seed=1, **params), uniform=0.5) for _ in range(2)]
    assert broken(logits, rows) == [1]


@pytest.mark.parametrize("temperature", [1e-38, 1e-300, 3e38])
def test_processed_logprobs_of_extreme_temperatures(temperature: float) -> None:
    """The quotient of a logit and a small temperature has no float32."""
    params = SamplingParams(logprobs=2, temperature=temperature)
    row = Row(params, uniform=0.3)
    (token,) = sampler.sample(torch.tensor([[5.0, 3.0, -2.0]]), [row], processed=True).read()
    assert token is not None
    assert token.logprobs is not None
    drawn = token.logprobs[token.token_id].logprob
    assert drawn == pytest.approx(math.log(1 / 3) if temperature > 1 else 0.0)
