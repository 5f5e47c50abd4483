"""Sampling parameters: valid values are kept as given, and all others are refused."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.runtime.sampling.row import completing_tokens, encode_bad_words
from vllm_module.runtime.sampling_params import SamplingParams

NATURAL = st.integers(0, 10**6)
TEXT = st.text(min_size=1, max_size=4)

VALID: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 100),
    "temperature": st.floats(0, 1e30),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 10**6),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0, 1e30, exclude_min=True),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
    "stop": st.none() | TEXT | st.lists(TEXT, max_size=3, unique=True),
    "stop_token_ids": st.lists(NATURAL, max_size=3, unique=True),
    "ignore_eos": st.booleans(),
    "max_tokens": st.none() | st.integers(10, 100),
    "min_tokens": st.integers(0, 10),
    "logprobs": st.none() | st.integers(-1, 10**6),
    "prompt_logprobs": st.none() | st.integers(-1, 10**6),
    "logit_bias": st.none() | st.dictionaries(NATURAL, st.floats(-1e30, 1e30), max_size=3),
    "allowed_token_ids": st.none() | st.lists(NATURAL, min_size=1, max_size=3),
    "bad_words": st.lists(TEXT, max_size=3, unique=True),
    "spaces_between_special_tokens": st.booleans(),
    "extra_args": st.none() | st.dictionaries(TEXT, NATURAL, max_size=2),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
}

NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])


def outside(low: float, high: float = math.inf) -> st.SearchStrategy[float]:
    below = st.floats(max_value=low, exclude_max=True, allow_nan=False)
    above = st.floats(min_value=high, exclude_min=True, allow_nan=False)
    return NOT_FINITE | below | (above if high < math.inf else NOT_FINITE)


OTHER_TYPES = st.sampled_from([True, "1", [], {}, 1j, object])
NOT_BOOL = st.sampled_from([0, 1, None, "yes", 1.0])
BELOW_MINUS_1 = st.integers(max_value=-2) | st.sampled_from([0.5, math.nan]) | OTHER_TYPES
BELOW_0 = st.integers(max_value=-1) | st.sampled_from([0.5, math.nan]) | OTHER_TYPES

INVALID: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(max_value=0) | st.none() | OTHER_TYPES,
    "temperature": outside(0) | st.none() | OTHER_TYPES,
    "top_p": outside(0, 1) | st.just(0.0) | OTHER_TYPES,
    "top_k": st.integers(max_value=-2) | st.just(2.0) | OTHER_TYPES,
    "min_p": outside(0, 1) | OTHER_TYPES,
    "repetition_penalty": outside(0) | st.just(0) | OTHER_TYPES,
    "presence_penalty": outside(-2, 2) | OTHER_TYPES,
    "frequency_penalty": outside(-2, 2) | OTHER_TYPES,
    "seed": st.integers(min_value=2**64) | st.integers(max_value=-(2**63) - 1) | OTHER_TYPES,
    "stop": st.sampled_from(["", [""], ["a", ""], 3, [3], b"a", {}]),
    "stop_token_ids": st.sampled_from([[-1], [2**31], [True], [1.0], ["1"], 3, "3"]),
    "ignore_eos": NOT_BOOL,
    "max_tokens": st.integers(max_value=0) | OTHER_TYPES,
    "min_tokens": st.none() | BELOW_0,
    "logprobs": BELOW_MINUS_1,
    "prompt_logprobs": BELOW_MINUS_1,
    "allowed_token_ids": st.sampled_from([[], [-1], ["1"], [True], 3]),
    "bad_words": st.sampled_from([[""], ["a", 3], 3, {}]),
    "spaces_between_special_tokens": NOT_BOOL,
    "extra_args": st.sampled_from([[], 3, {1: 2}]),
    "logit_bias": st.one_of(
        st.dictionaries(NATURAL, NOT_FINITE, min_size=1, max_size=2),
        st.sampled_from([{-1: 0.0}, {2**31: 0.0}, {"1": 0.0}, {True: 0.0}, {1: "1"}, [1]]),
    ),
    "skip_special_tokens": NOT_BOOL,
    "include_stop_str_in_output": NOT_BOOL,
}


@settings(max_examples=50)
@given(st.fixed_dictionaries({}, optional=VALID))
def test_valid_values_are_kept_as_they_were_given(values: dict[str, Any]) -> None:
    """Any combination of valid values is kept, and all other parameters have their defaults."""
    params = SamplingParams(**values)
    expected = SamplingParams().model_dump() | values
    stop = expected["stop"]
    expected["stop"] = [] if stop is None else [stop] if isinstance(stop, str) else stop
    assert params.model_dump() == expected
    assert params.greedy == (params.temperature == 0)


@pytest.mark.parametrize("name", VALID)
@settings(max_examples=40 if "AT_LENGTH" in os.environ else 15)
@given(st.data())
def test_invalid_values_are_refused_by_name(name: str, data: st.DataObject) -> None:
    """An invalid value beside valid ones is refused, and the message names it alone."""
    beside = data.draw(st.lists(st.sampled_from(sorted(VALID)), max_size=2))
    values = {other: data.draw(VALID[other]) for other in beside}
    values[name] = data.draw(INVALID[name])
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**values)
    for line in str(caught.value).splitlines():
        assert re.match(rf"{name}(\[-?\d+\])? should .+, got ", line)


@given(st.integers(1, 50), st.integers(1, 50))
def test_min_tokens_above_max_tokens_is_refused(most: int, more: int) -> None:
    """The message has both numbers; without max_tokens there is no such limit."""
    with pytest.raises(
        ValueError, match=f"at most max_tokens, which is {most}, and is {most + more}"
    ):
        SamplingParams(max_tokens=most, min_tokens=most + more)
    assert SamplingParams(max_tokens=None, min_tokens=most + more).max_tokens is None


def test_unknown_names_are_refused() -> None:
    """The error of a misspelt name has that name, also where it is assigned."""
    with pytest.raises(ValueError, match="best_of"):
        SamplingParams(best_of=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="no argument 'temprature': did you mean 'temperature'"):
        SamplingParams().temprature = 0.5  # type: ignore[attr-defined]


@settings(max_examples=40)
@given(st.data())
def test_what_is_assigned_is_checked_as_what_is_given(data: st.DataObject) -> None:
    """A valid value is kept; an invalid one is refused by name and changes nothing."""
    params = SamplingParams()
    name = data.draw(st.sampled_from(sorted(VALID)))
    value = data.draw(VALID[name])
    setattr(params, name, value)
    assert params == SamplingParams(**{name: value})
    before = params.model_dump()
    with pytest.raises(ValueError, match=rf"^{name}(\[-?\d+\])? should "):
        setattr(params, name, data.draw(INVALID[name]))
    assert params.model_dump() == before


def test_what_fits_alone_and_not_together_is_refused() -> None:
    """A limit below another, and stop strings without text, are refused where they are assigned."""
    params = SamplingParams(max_tokens=5, stop="a")
    with pytest.raises(ValueError, match="min_tokens should be at most max_tokens, which is 5"):
        params.min_tokens = 6
    with pytest.raises(ValueError, match="leave out detokenize=False"):
        params.detokenize = False
    assert (params.min_tokens, params.detokenize) == (0, True)


def test_places_are_those_that_all_versions_of_vllm_have() -> None:
    """The first five arguments may be given by position; more, or one twice, are refused."""
    params = SamplingParams(2, 0.1, 0.2, 1.5, 0.7)  # type: ignore[misc]
    assert (params.n, params.presence_penalty, params.frequency_penalty) == (2, 0.1, 0.2)
    assert (params.repetition_penalty, params.temperature) == (1.5, 0.7)
    with pytest.raises(ValueError, match=r"at most n, .* by position: name the others"):
        SamplingParams(1, 0.0, 0.0, 1.0, 1.0, 0.5)  # type: ignore[misc]
    with pytest.raises(ValueError, match="n by position and by name"):
        SamplingParams(1, n=1)  # type: ignore[misc]


def test_from_optional_reads_what_servers_get() -> None:
    """None is the default but for max_tokens, and a bias is bounded, whatever its token's type."""
    given: dict[str, Any] = dict.fromkeys(VALID) | {"logit_bias": {"3": 500, 4: -1000, 5: 1.5}}
    params = SamplingParams.from_optional(**given)
    assert params.logit_bias == {3: 100.0, 4: -100.0, 5: 1.5}
    assert params.max_tokens is None
    assert params.model_dump(exclude={"logit_bias", "max_tokens"}) == SamplingParams().model_dump(
        exclude={"logit_bias", "max_tokens"}
    )
    assert SamplingParams.from_optional(2, None, 0.5) == SamplingParams(n=2, frequency_penalty=0.5)
    for wrong in ({"x": 1.0}, {"3": float("nan")}, {"3": True}, {"-1": 1.0}):
        with pytest.raises(ValueError, match="logit_bias"):
            SamplingParams.from_optional(logit_bias=wrong)
    with pytest.raises(ValueError, match="no argument 'temprature'"):
        SamplingParams.from_optional(temprature=None)


def test_the_parameters_are_copies() -> None:
    """Lists and dictionaries are copied; integers, tuples and None are accepted where clear."""
    stop, ids, bias = ["a"], [1], {1: 2.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append(""), ids.append(-1), bias.clear()
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (["a"], [1], {1: 2.0})
    lenient: dict[str, Any] = {"temperature": 1, "stop": ("a",), "stop_token_ids": None}
    params = SamplingParams(**lenient)
    assert (params.temperature, params.stop, params.stop_token_ids) == (1.0, ["a"], [])
    clone = params.clone()
    clone.stop.append("b")
    clone.stop_token_ids.append(1)
    assert (params.stop, params.stop_token_ids) == (["a"], [])


def test_a_clone_is_equal_and_shares_no_part() -> None:
    given: dict[str, Any] = {
        "stop": ["a"], "stop_token_ids": [3], "bad_words": ["b"], "logit_bias": {1: 2.0},
        "allowed_token_ids": [1, 2], "seed": 1, "structured_outputs": {"choice": ["a", "b"]},
        "extra_args": None,
    }  # fmt: skip
    params = SamplingParams(**given)
    clone = params.clone()
    assert clone == params == SamplingParams(**given)
    assert clone.model_fields_set == params.model_fields_set

    def parts(value: Any) -> Iterator[int]:
        if isinstance(value, (list, dict)) or hasattr(value, "__dict__"):
            yield id(value)
            held = value if isinstance(value, list) else getattr(value, "__dict__", value).values()
            for each in held:
                yield from parts(each)

    for name in type(params).model_fields:
        assert not {*parts(getattr(params, name))} & {*parts(getattr(clone, name))}, name


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ({"a": [1], " a": [2]}, [[1], [2]]),
        ({"a": [1], " a": [1]}, [[1]]),
        ({"a": [1], " a": [2, 1]}, [[1]]),  # a space that is a token of its own
        ({"a": [1, 3], " a": [2]}, [[1, 3]]),
        ({"a": [1, 3], " a": [2, 3]}, [[1, 3], [2, 3]]),
        ({"a": [1, 3], " a": [1, 4]}, [[1, 3]]),
        ({"a": [1], " a": []}, [[1]]),
    ],
)
def test_a_bad_word_after_a_space_is_banned_as_by_vllm(
    tokens: dict[str, list[int]], found: list[list[int]]
) -> None:
    """Where it has as many tokens and begins otherwise; the word's own spaces do not count."""
    tokenizer: Any = SimpleNamespace(encode=lambda text, special: tokens[text])
    for word in ("a", "  a"):
        assert encode_bad_words([word], tokenizer) == found
    assert encode_bad_words(["a", "a"], tokenizer) == found * 2
    with pytest.raises(ValueError, match="'a' has no tokens"):
        encode_bad_words(["a"], SimpleNamespace(encode=lambda text, special: []))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], {5}), ([1], {3, 5}), ([2, 1], {3, 4, 5}), ([1, 2], {5}), ([2, 1, 7], {5}), ([2], {5})],
)
def test_the_last_token_of_a_bad_word_is_banned_after_the_others(
    output: list[int], banned: set[int]
) -> None:
    """A word of one token always, and one of several where the output ends with the rest of it."""
    assert completing_tokens([[5], [1, 3], [2, 1, 4]], output) == banned


def test_minus_one_is_no_seed() -> None:
    """As in vLLM, whose clients send it for a random one."""
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams.from_optional(seed=-1).seed is None
    with pytest.raises(ValueError, match="seed"):
        SamplingParams(seed=True)


@pytest.mark.parametrize("name", ["top_k", "logprobs", "prompt_logprobs", "min_tokens"])
def test_a_count_that_no_number_of_a_step_holds_is_refused(name: str) -> None:
    """``top_k=10**400`` failed in the middle of a step, and ended all other requests with it."""
    given: Any = {name: 10**400}
    with pytest.raises(ValueError, match=name):
        SamplingParams(max_tokens=None, **given)
