"""Which grammars are compiled again, beside ``functools.lru_cache``, and numbers of tokens."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from vllm_module.runtime.sampling import grammar as home
from vllm_module.runtime.sampling.grammar import Grammar, Grammars
from vllm_module.runtime.sampling_params import StructuredOutputsParams


def counted(patch: pytest.MonkeyPatch) -> tuple[Grammars, list[str]]:
    """Return grammars, and the descriptions that they have compiled."""
    compiled: list[str] = []

    def compile_one(self: Grammars, kind: str, text: str) -> Grammar:
        compiled.append(text)
        return Grammar(None)

    # Only which ones are compiled matters here, and each takes milliseconds in another process.
    patch.setattr(Grammars, "_compile", compile_one)
    patch.setattr(home, "_MOST_CACHED", 4)  # so that few calls fill it
    return Grammars(None, 10, ()), compiled


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=60),
)
def test_the_grammar_that_was_asked_for_longest_ago_is_compiled_again(
    asked: list[tuple[int, bool]],
) -> None:
    """Whichever of the two ways asks: for the grammar, or for its future."""
    with pytest.MonkeyPatch.context() as patch:
        grammars, compiled = counted(patch)
        expected = lru_cache(maxsize=4)(lambda text: text)
        for number, waits in asked:
            params: Any = StructuredOutputsParams(regex=f"a{{{number}}}")
            (grammars.submit(params).result if waits else lambda p=params: grammars.compile(p))()
            expected(params.regex)
            assert len(compiled) == expected.cache_info().misses
        grammars.close()


@pytest.mark.parametrize("most", [20, 30, 31])
def test_long_descriptions_are_kept_while_they_fit(most: int) -> None:
    """Together they have a limit of characters, which may be reached and not exceeded."""
    with pytest.MonkeyPatch.context() as patch:
        grammars, compiled = counted(patch)
        patch.setattr(home, "_MOST_TEXT", most)
        texts = ["a" * 10, "b" * 10, "c" * 10]
        for text in (*texts, *reversed(texts)):
            grammars.compile(StructuredOutputsParams(regex=text))
        again = [] if most >= 30 else ["a" * 10]
        assert compiled == [*texts, *again]


@pytest.mark.parametrize("beside", [-1, 0, 1, 8])
@pytest.mark.parametrize("ends", [(), (2,)])
def test_every_token_has_a_number_that_a_mask_can_hold(beside: int, ends: tuple[int, ...]) -> None:
    """A model without an end token gets one: with as many numbers as texts it is one more."""
    texts = FastTokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2, "?": 3}, unk_token="?"))
    size = texts.get_vocab_size() + beside
    tokenizer: Any = SimpleNamespace(to_str=texts.to_str)
    grammars = Grammars(tokenizer, size, ends)
    try:
        text, known, chosen = grammars._tokenizer_of_process()
    finally:
        grammars.close()
    numbers = FastTokenizer.from_str(text).get_vocab(with_added_tokens=True)
    assert all(number in numbers.values() for number in chosen)
    if ends:
        assert (known, chosen, numbers) == (size, [*ends], texts.get_vocab())
    else:
        (end,) = numbers.keys() - texts.get_vocab().keys()
        assert chosen == [numbers[end]]
        assert known == max(size, numbers[end] + 1)
