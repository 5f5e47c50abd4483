"""Options and forms of prompts, beside what transformers and vLLM make of them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from vllm_module.runtime.sampling.row import check_tokens
from vllm_module.runtime.text.prompts import (
    Tokenization,
    as_prompts,
    prompt_text,
    request_options,
    token_ids,
)

LIMIT = 10
# As in transformers, max_length counts where truncation is on, and is the model's length otherwise.
# vLLM's truncate_prompt_tokens cuts alone; -1 is the model's length.
CUTS = {None: None, False: None, "do_not_truncate": None, True: "length", "longest_first": "length"}


@pytest.mark.parametrize(
    ("cuts", "length", "most"), [*product(CUTS, (None, 4, 12), (None, 3, -1, 12))]
)
def test_how_many_tokens_are_kept(cuts: Any, length: int | None, most: int | None) -> None:
    """Every pair of options: truncation goes before truncate_prompt_tokens."""
    options = {"truncation": cuts, "max_length": length, "truncate_prompt_tokens": most}
    if CUTS[cuts] is not None:
        expected = LIMIT if length is None else length
    else:
        expected = LIMIT if most == -1 else most
    assert Tokenization.of(options, LIMIT).most == expected
    given = {name: value for name, value in options.items() if value is not None}
    assert Tokenization.of(given, LIMIT).most == expected


@pytest.mark.parametrize("default", [True, False])
def test_switches_are_taken_or_stay_as_they_are(default: bool) -> None:
    """False counts, and None is the default."""
    for name, attribute in (("add_special_tokens", "special"), ("do_lower_case", "lower")):
        for value, expected in ((True, True), (False, False), (None, default)):
            found = Tokenization.of({name: value}, LIMIT, special=default, lower=default)
            assert getattr(found, attribute) is expected
            assert getattr(found, "lower" if attribute == "special" else "special") is default
    plain = Tokenization.of(None, LIMIT)
    assert (plain.special, plain.lower, plain.most) == (True, False, None)
    assert Tokenization(lower=True).text("ÄB") == "äb"
    assert Tokenization().text("ÄB") == "ÄB"


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 0}, {"max_length": -1}, {"truncate_prompt_tokens": 0}, {"max_length": "4"},
        {"truncate_prompt_tokens": -2}, {"truncate_prompt_tokens": 1.5}, {"truncation": 2},
        {"truncation": "only_first"}, {"add_special_tokens": 1}, {"do_lower_case": "yes"},
        {"max_lenght": 4}, {"max_length": True}, [],
    ],
)  # fmt: skip
def test_options_that_are_none_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="tokenization_kwargs"):
        Tokenization.of(options, LIMIT)


class Words:
    """A tokenizer that records what it gets."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def encode(self, text: str, special: bool, *, most: int | None) -> list[int]:
        self.asked.append((text, special, most))
        return [1]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Text", "text"),
        ({"prompt": "Text"}, "text"),
        ({"prompt": "Text", "prompt_token_ids": None}, "text"),
        ({"prompt": "Text", "cache_salt": "x", "multi_modal_data": None}, "text"),
        ({"prompt": "Text", "mm_processor_kwargs": {}, "prompt_embeds": None}, "text"),
        ({"prompt": "Text", "prompt_token_ids": [4, 5, 6]}, [4, 5]),  # the text is not encoded
        ({"prompt_token_ids": (4,)}, [4]),
        ([4, 5, 6], [4, 5]),
        ((4, 5, 6), [4, 5]),
        ([], []),
        ({"prompt_token_ids": []}, []),
    ],
)
def test_each_form_of_a_prompt(prompt: Any, expected: Any) -> None:
    """Text gets the options; token ids are cut alone, and need no tokenizer."""
    words: Any = Words()
    how = Tokenization(special=False, most=2, lower=True)
    ids = token_ids(prompt, lambda: words, how)
    assert words.asked == ([("text", False, 2)] if expected == "text" else [])
    assert ids == ([1] if expected == "text" else expected)


@pytest.mark.parametrize(
    "prompt",
    [
        None, 3, b"x", {}, {"text": "x"}, {"prompt": 3}, [1, "x"], [True], [1.0], [[1]],
        {"prompt": "x", "prompt_token_ids": ["x"]}, {"prompt": "x", "other": 1},
        {"prompt": "x", "multi_modal_data": {"image": 1}}, {"prompt": "x", "prompt_embeds": [1]},
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"a prompt should be text|is for multimodal models"):
        token_ids(prompt, lambda: None, Tokenization())  # type: ignore[arg-type,return-value]


def test_a_list_of_integers_is_one_prompt() -> None:
    """An empty list is no prompt, and a list of lists is several."""
    assert as_prompts([1, 2]) == [[1, 2]]
    assert as_prompts((1, 2)) == [(1, 2)]
    assert as_prompts([[1], "x"]) == [[1], "x"]
    assert as_prompts([]) == []
    assert as_prompts("x") == ["x"]
    assert as_prompts({"prompt": "x"}) == [{"prompt": "x"}]
    assert as_prompts(iter(["x", "y"])) == ["x", "y"]
    for wrong in (None, 3, b"x"):
        with pytest.raises(ValueError, match="prompts should be one or a sequence of them"):
            as_prompts(wrong)


@pytest.mark.parametrize(
    ("prompt", "text", "salt"),
    [
        ("x", "x", None),
        ({"prompt": "x"}, "x", None),
        ({"prompt": "x", "prompt_token_ids": [1], "cache_salt": "s"}, "x", "s"),
        ({"prompt_token_ids": [1], "cache_salt": None}, None, None),
        ([1], None, None),
        (3, None, None),
        ({"prompt": 3}, None, None),
        ({"prompt": "", "cache_salt": " "}, "", " "),
    ],
)
def test_text_and_salt_of_a_prompt(prompt: Any, text: str | None, salt: str | None) -> None:
    assert prompt_text(prompt) == text
    assert request_options(prompt).get("cache_salt") == salt


@pytest.mark.parametrize("salt", ["", 3, b"x", ["x"], False])
def test_a_salt_is_text_that_is_not_empty(salt: Any) -> None:
    with pytest.raises(ValueError, match="cache_salt should be text that is not empty"):
        request_options({"prompt": "x", "cache_salt": salt})


def test_tokens_are_those_of_the_vocabulary() -> None:
    check_tokens([0, 9], 10)
    check_tokens([], 1)
    for wrong in (-1, 10):
        with pytest.raises(ValueError, match=f"token {wrong} is outside of the vocabulary of 10"):
            check_tokens([3, wrong], 10)
