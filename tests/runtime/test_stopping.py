"""Where stop strings end a text, token by token."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.text.stopping import check_stop


def stopped(pieces: tuple[str, ...], stop: str, min_tokens: int) -> tuple[int, str] | None:
    """Return after how many tokens, which add ``pieces``, a request ends, and its text."""
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=16)
    request = SimpleNamespace(params=params, prompt_len=1, streamed=True, max_len=16)
    sequence: Any = SimpleNamespace(request=request, tokens=[0], text="", stop_reason=None)
    sequence.stream = SimpleNamespace(push=lambda token: pieces[token])
    for token in range(len(pieces)):
        sequence.tokens.append(token)
        if check_stop(sequence, (), None) is not None:
            assert sequence.stop_reason == stop
            return token + 1, sequence.text
    return None


def expected(pieces: tuple[str, ...], stop: str, min_tokens: int) -> tuple[int, str] | None:
    """Look at every place of the text: a stop string counts with the token that its end is in."""
    for count in range(max(1, min_tokens), len(pieces) + 1):
        before, text = "".join(pieces[: count - 1]), "".join(pieces[:count])
        for end in range(len(before) + 1, len(text) + 1):
            if text[:end].endswith(stop):
                return count, text[: end - len(stop)]
    return None


@pytest.mark.parametrize("stop", ["a", "ab", "aba"])
def test_a_stop_string_counts_where_it_ends(stop: str) -> None:
    """One that ended before ``min_tokens`` ends nothing later; one that ends now does, wherever."""
    for pieces in product(["a", "b", "", "ba"], repeat=4):
        for least in (0, 2, 3):
            assert stopped(pieces, stop, least) == expected(pieces, stop, least), (pieces, least)
