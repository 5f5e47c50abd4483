"""Words that may not be generated, matched by their tokens as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_module.runtime.text.tokenizer import Tokenizer


def encode_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of each word, at the start of a text and after a space.

    As in vLLM, the tokens after a space are used only if they are as many and the first one
    differs. Raises ``ValueError`` for a word without tokens.
    """
    found: list[list[int]] = []
    for word in words:
        alone, spaced = (tokenizer.encode(space + word.lstrip(), False) for space in ("", " "))
        if not alone:
            raise ValueError(f"the bad word {word!r} has no tokens")
        found.append(alone)
        if spaced and spaced[0] != alone[0] and len(spaced) == len(alone):
            found.append(spaced)
    return found


def completing_tokens(bad_words: Sequence[Sequence[int]], output: Sequence[int]) -> set[int]:
    """Return the tokens that would complete a word at the end of ``output``."""
    banned = set()
    for *before, last in bad_words:
        if not before or list(output[-len(before) :]) == before:
            banned.add(last)
    return banned
