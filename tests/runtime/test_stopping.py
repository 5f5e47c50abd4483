"""Where stop strings end a text, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.outputs import request_output
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.text.stopping import check_stop, complete_text


def stopped(
    pieces: Sequence[str], stop: str | list[str], min_tokens: int, keeps: bool = False
) -> tuple[int, str, str] | None:
    """Return after how many tokens, which add ``pieces``, a request ends, its text, and at what."""
    params = SamplingParams(
        stop=stop, min_tokens=min_tokens, max_tokens=64, include_stop_str_in_output=keeps
    )
    request = SimpleNamespace(params=params, prompt_len=1, streamed=True, max_len=64)
    sequence: Any = SimpleNamespace(
        request=request, tokens=[0], text="", stop_reason=None, grammar=None
    )
    sequence.stream = SimpleNamespace(push=lambda token: pieces[token])
    for token in range(len(pieces)):
        sequence.tokens.append(token)
        if check_stop(sequence, (), None) is not None:
            return token + 1, sequence.text, sequence.stop_reason
    return None


def expected(
    pieces: Sequence[str], stops: Sequence[str], min_tokens: int, keeps: bool = False
) -> tuple[int, str, str] | None:
    """Look at every place of the text: a stop string counts with the token that its end is in.

    Where several end, the longest counts.
    """
    for count in range(max(1, min_tokens), len(pieces) + 1):
        before, text = "".join(pieces[: count - 1]), "".join(pieces[:count])
        for end in range(len(before) + 1, len(text) + 1):
            for stop in sorted(stops, key=len, reverse=True):
                if text[:end].endswith(stop):
                    return count, text[:end] if keeps else text[: end - len(stop)], stop
    return None


@pytest.mark.parametrize("stop", ["a", "ab", "aba"])
def test_a_stop_string_counts_where_it_ends(stop: str) -> None:
    """One that ended before ``min_tokens`` ends nothing later; one that ends now does, wherever."""
    for pieces in product(["a", "b", "", "ba"], repeat=4):
        for least in (0, 2, 3):
            assert stopped(pieces, stop, least) == expected(pieces, [stop], least), (pieces, least)


@given(
    pieces=st.lists(st.text("abc", max_size=6), max_size=6),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    least=st.integers(0, 3),
    keeps=st.booleans(),
)
@example(["ick"], ["k", "i"], 0, False)
@example(["ab", "cab"], ["bca", "ca", "c"], 0, True)
@example(["aab"], ["b", "aab", "ab"], 0, False)
def test_of_several_stop_strings_the_first_counts(
    pieces: list[str], stops: list[str], least: int, keeps: bool
) -> None:
    """In any order, within a token or across tokens, as the text has them and not as tokens do."""
    assert stopped(pieces, stops, least, keeps) == expected(pieces, stops, least, keeps)
    text = "".join(pieces)
    at_once, by_character = (stopped(each, stops, 0, keeps) for each in ([text], text))
    assert (at_once and at_once[1:]) == (by_character and by_character[1:])


def ended(tokens: list[int], streamed: bool = True, **given: Any) -> tuple[Any, ...]:
    """Return after how many tokens, at most three, a request ends, the reason and what it names.

    Its prompt is one token, each token adds its number, and tokens 7 and 8 end the model's texts.
    """
    length = given.pop("length", 3)
    params = SamplingParams(**{"max_tokens": 8, **given})
    request = SimpleNamespace(params=params, prompt_len=1, streamed=streamed, max_len=1 + length)
    sequence: Any = SimpleNamespace(
        request=request, tokens=[7], text="", stop_reason=None, grammar=None
    )
    sequence.stream = SimpleNamespace(push=str)
    for count, token in enumerate(tokens, 1):
        sequence.tokens.append(token)
        if (reason := check_stop(sequence, {7, 8}, None, 7)) is not None:
            return count, reason, sequence.stop_reason, sequence.text
    return (None, None, None, sequence.text)


# vLLM's v1/core/sched/utils.py (check_stop) and its detokenizer: the model's own end is looked for
# first and is no reason, then the request's tokens, the length, and the strings of the text.
REASONS: list[tuple[list[int], dict[str, Any], tuple[Any, ...]]] = [
    ([7], {}, (1, "stop", None, "")),
    ([8], {}, (1, "stop", 8, "")),  # a second end token of generation_config.json is named
    ([1, 7], {}, (2, "stop", None, "1")),
    ([7, 1, 1], {"ignore_eos": True}, (3, "length", None, "711")),
    ([8, 1, 1], {"ignore_eos": True}, (3, "length", None, "811")),
    ([8, 1, 1], {"ignore_eos": True, "stop_token_ids": [8]}, (1, "stop", 8, "")),
    ([7, 1, 1], {"ignore_eos": True, "stop_token_ids": [7]}, (1, "stop", 7, "")),
    ([7, 1, 1], {"stop_token_ids": [7]}, (1, "stop", None, "")),
    ([1, 5], {"stop_token_ids": [4, 5]}, (2, "stop", 5, "1")),
    ([1, 5], {"stop": ["5"]}, (2, "stop", "5", "1")),
    ([1, 5], {"stop": ["5"], "include_stop_str_in_output": True}, (2, "stop", "5", "15")),
    ([1, 5], {"stop": ["15"]}, (2, "stop", "15", "")),
    # vLLM takes the first of the list, and its text depends on where tokens end.
    ([1, 5], {"stop": ["5", "15"]}, (2, "stop", "15", "")),
    ([1, 5], {"stop": ["15", "5"]}, (2, "stop", "15", "")),
    ([1, 5, 5], {"stop": ["5"], "stop_token_ids": [5]}, (2, "stop", 5, "1")),
    ([1, 1, 5], {"stop": ["5"]}, (3, "stop", "5", "11")),  # with the last token, too
    ([1, 1, 7], {}, (3, "stop", None, "11")),
    ([1, 1, 1], {}, (3, "length", None, "111")),
    ([1], {"length": 1}, (1, "length", None, "1")),
    ([1, 1], {}, (None, None, None, "11")),
    ([7, 7, 7], {"min_tokens": 2}, (2, "stop", None, "7")),
    ([5, 5, 5], {"min_tokens": 2, "stop_token_ids": [5]}, (2, "stop", 5, "5")),
    ([5, 5, 5], {"min_tokens": 2, "stop": ["5"]}, (2, "stop", "5", "5")),
    ([7, 1, 1], {"min_tokens": 1}, (1, "stop", None, "")),
    ([7, 1, 1], {"min_tokens": 3}, (3, "length", None, "711")),
]


@pytest.mark.parametrize(("tokens", "given", "expected"), REASONS)
def test_what_ends_a_request_and_what_it_names(
    tokens: list[int], given: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """The reason, the text and the token or string are vLLM's, whichever come together."""
    assert ended(tokens, **given) == expected
    if "stop" not in given:
        assert ended(tokens, streamed=False, **given) == (*expected[:3], "")


@pytest.mark.parametrize(
    ("tokens", "given", "expected"),
    [
        ([1, 7], {}, "1"),
        ([1, 7], {"include_stop_str_in_output": True}, "17"),
        ([1, 2], {"detokenize": False}, "so far"),
    ],
)
def test_the_whole_text_leaves_out_the_token_that_ended_it(
    tokens: list[int], given: dict[str, Any], expected: str
) -> None:
    """For each reason: only a token that stopped the text is left out, and only unless asked."""
    asked: list[Any] = []

    def continuation(prompt: list[int], output: list[int], skip: bool) -> str:
        asked.append((prompt, skip))
        return "".join(map(str, output))

    tokenizer: Any = SimpleNamespace(continuation=continuation)
    params = SamplingParams(**given, skip_special_tokens=False)
    request = SimpleNamespace(params=params, prompt_token_ids=[3], error=None)

    def text(reason: str, stopped_by: Any, tokenizer: Any = tokenizer) -> str:
        sequence: Any = SimpleNamespace(
            request=request, output=tokens, text="so far", finish_reason=reason,
            stop_reason=stopped_by, grammar=None,
        )  # fmt: skip
        complete_text(sequence, tokenizer)
        return str(sequence.text)

    whole = expected if not params.detokenize else "".join(map(str, tokens))
    assert text("stop", None) == text("stop", 7) == expected
    assert text("length", None) == text("abort", None) == whole
    assert text("stop", "x") == text("stop", None, None) == "so far"
    assert all(each == ([3], False) for each in asked)
    assert bool(asked) == params.detokenize


@pytest.mark.parametrize("before", [None, "earlier"])
def test_a_tokenizer_that_fails_ends_the_request_with_its_first_error(before: str | None) -> None:
    def continuation(*_: Any) -> str:
        raise CheckpointFormatError("tokenizer.json cannot decode tokens")

    tokenizer: Any = SimpleNamespace(continuation=continuation)
    request = SimpleNamespace(params=SamplingParams(), prompt_token_ids=[3], error=before)
    sequence: Any = SimpleNamespace(
        request=request,
        output=[1],
        text="so far",
        finish_reason="length",
        stop_reason=None,
        grammar=None,
    )
    complete_text(sequence, tokenizer)
    assert (sequence.finish_reason, sequence.text) == ("error", "so far")
    assert request.error == (before or "tokenizer.json cannot decode tokens")


@pytest.mark.parametrize(
    ("stop", "given", "shown"),
    [
        ([], {}, "abcdef"),
        (["x"], {}, "abcdef"),  # a string of one character has no beginning
        (["xyz"], {}, "abcd"),
        (["x", "uvwxyz", "vw"], {}, "a"),
        (["uvwxyzuvwxyz"], {}, ""),
        (["xyz"], {"include_stop_str_in_output": True}, "abcdef"),
    ],
)
def test_text_that_may_begin_a_stop_string_is_not_shown_yet(
    stop: list[str], given: dict[str, Any], shown: str
) -> None:
    """As in vLLM, one character less than the longest is kept back, until the request ends."""
    params = SamplingParams(stop=stop, logprobs=None, **given)
    request = Request("0", [1], params, 0, 9)
    (sequence,) = request.sequences
    sequence.text = "abcdef"
    assert request_output(request).outputs[0].text == shown
    sequence.finish_reason = "length"
    assert request_output(request).outputs[0].text == "abcdef"
