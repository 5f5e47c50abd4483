"""Which grammars are compiled again, beside ``functools.lru_cache``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
