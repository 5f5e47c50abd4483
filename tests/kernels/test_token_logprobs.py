"""Logprobs, ranks and first tokens of a kernel are those of torch and of a sorted list."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.kernels.rows import token_logprobs as kernel
from vllm_module.kernels.rows.token_logprobs import token_logprobs


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small vocabularies have several chunks and tiles, and few rows several batches."""
    monkeypatch.setattr(kernel, "_CHUNK", 32)
    monkeypatch.setattr(kernel, "_TILE", 8)
    monkeypatch.setattr(kernel, "_BATCH", 100)


@given(
    st.sampled_from([1, 8, 31, 32, 33, 90]),
    st.sampled_from([torch.float32, torch.float16]),
    st.booleans(),
    st.integers(0, 90),
    st.integers(0, 2**31),
)
@settings(max_examples=15)
def test_logprobs_and_ranks(
    vocab: int, dtype: torch.dtype, ties: bool, width: int, seed: int
) -> None:
    """Equal logits are in the order of ids, and broken rows are said to be."""
    torch.manual_seed(seed)
    logits = (torch.randn(4, vocab) * 8).to(dtype)
    logits = logits.round().div(4) if ties else logits
    logits[1, vocab // 2] = -0.0
    logits[2, vocab // 3] = [math.nan, math.inf, -math.inf][seed % 3]
    logits[3] = -math.inf
    rows = torch.tensor([3, 1, 0, 2, 1])
    tokens = torch.tensor([-1, 0, vocab - 1, vocab // 2, vocab // 2])
    width = min(width, vocab)
    arguments = logits, rows, tokens, width
    for found in (kernel.token_logprobs_triton(*arguments), token_logprobs(*arguments)):
        assert found.shape == (5, 3 + 2 * width)
        for numbers, row, token in zip(found.tolist(), rows.tolist(), tokens.tolist(), strict=True):
            x = logits[row].double()
            assert numbers[0] == float(x.max().isfinite())
            if not numbers[0]:
                continue
            order = sorted(range(vocab), key=lambda token, x=x: (-x[token].item(), token))
            exact = x.log_softmax(-1)
            assert numbers[1] == 1 + order.index(token)
            assert numbers[3 + width :] == order[:width]
            expected = exact[[token, *order[:width]]].tolist()
            assert numbers[2 : 3 + width] == pytest.approx(expected, abs=1e-5)


def test_arguments_that_do_not_fit_are_refused() -> None:
    """A width beyond the vocabulary and logits in another order are named."""
    rows = torch.zeros(1, dtype=torch.int64)
    for logits, width in ((torch.zeros(2, 3), 4), (torch.zeros(2, 6)[:, ::2], 1)):
        with pytest.raises(ValueError, match="width from 0 to 3"):
            token_logprobs(logits, rows, rows, width)
