"""Counts of tokens that are kept on the device equal those of a new count, whatever happens."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.runtime.sampling import sampler
from vllm_module.runtime.sampling.row import Row
from vllm_module.runtime.sampling.token_counts import TokenCounts
from vllm_module.runtime.sampling_params import SamplingParams

Token = sampler.SampledToken | None


def sample(logits: torch.Tensor, rows: list[Row], counts: TokenCounts | None = None) -> list[Token]:
    return sampler.sample(logits, rows, counts).read()


WAYS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.7, "repetition_penalty": 0.8},
    {},
]


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([2, 9, 300]))
def test_kept_counts_change_no_token(seed: int, vocab: int) -> None:
    """Sequences arrive, fork, shrink, end, pause, change places and are lost: tokens are equal."""
    draw = random.Random(seed)
    counts = TokenCounts()
    keys = itertools.count()
    running: list[tuple[int, SamplingParams, int, list[int]]] = []
    for _ in range(12):
        for _ in range(draw.randrange(3)):
            prompt = [draw.randrange(vocab) for _ in range(draw.randrange(9))]
            params = SamplingParams(temperature=0, **draw.choice(WAYS))
            running.append((next(keys), params, len(prompt), prompt))
        if running and draw.random() < 0.3:
            _, params, prompt_len, ids = draw.choice(running)
            running.append((next(keys), params, prompt_len, list(ids)))
        if running and draw.random() < 0.2:
            running.remove(draw.choice(running))
        if running and draw.random() < 0.3:
            _, _, prompt_len, ids = draw.choice(running)
            del ids[max(prompt_len, len(ids) - draw.randrange(1, 3)) :]
        chosen = draw.sample(running, draw.randrange(len(running) + 1))
        logits = torch.randn(len(chosen), vocab, generator=torch.Generator().manual_seed(seed))
        rows = [
            Row(params, ids, prompt_len, 0.0, (), key) for key, params, prompt_len, ids in chosen
        ]
        again = [Row(params, ids, prompt_len) for _, params, prompt_len, ids in chosen]
        expected = sample(logits, again)
        assert sample(logits, rows, counts) == expected
        if draw.random() < 0.2:
            assert sample(logits, rows, counts) == expected  # such as after broken logits
        for (*_, ids), token in zip(chosen, expected, strict=True):
            ids.append(token.token_id)
            if draw.random() < 0.2:
                ids += [0, vocab - 1][: draw.randrange(3)]


def test_an_interrupt_loses_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an update is interrupted anywhere, the next step counts from the start."""
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    logits = torch.tensor([[3.0, 2.5, 0.0]])
    operations = ["index_put_", "index_select", "index_add_", "where"]
    for name in operations:
        counts = TokenCounts()
        ids: list[int] = []
        for step in range(6):
            row = Row(params, ids, 0, 0.0, (), "a")
            with monkeypatch.context() as patch:
                owner = torch if name == "where" else torch.Tensor
                real = getattr(owner, name)

                def fail(*arguments: Any, real: Any = real, step: int = step) -> Any:
                    result = real(*arguments)
                    if step in (2, 3):
                        raise KeyboardInterrupt
                    return result

                patch.setattr(owner, name, fail)
                if step in (2, 3):
                    with pytest.raises(KeyboardInterrupt):
                        sample(logits, [row], counts)
            token = sample(logits, [row], counts)
            assert token == sample(logits, [Row(params, ids)])
            ids.append(token[0].token_id)


def test_the_table_is_as_large_as_the_largest_step() -> None:
    """Sequences that ended leave room for others, and the table does not grow with their number."""
    counts = TokenCounts()
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    for key in range(40):
        rows = [Row(params, range(n % 7), 0, 0.0, (), (key, n)) for n in range(5)]
        sample(torch.zeros(5, 20), rows, counts)
    assert counts.nbytes == 8 * 4 * 8  # rows, tokens, bytes


def test_the_table_follows_distinct_tokens() -> None:
    """A sequence that repeats a few tokens takes a few columns, however long it is."""
    counts, ids = TokenCounts(), [1, 2, 3]
    params = SamplingParams(temperature=0, frequency_penalty=0.5)
    for _ in range(400):
        (token,) = sample(torch.zeros(1, 5), [Row(params, ids, 3, 0.0, (), "a")], counts)
        assert [token] == sample(torch.zeros(1, 5), [Row(params, ids, 3)])
        ids.append(token.token_id)
    assert counts.nbytes <= 8 * 256


def test_a_table_that_was_too_large_is_made_anew() -> None:
    """After a long sequence has ended, the table becomes small, and no count is lost."""
    counts = TokenCounts()
    params = SamplingParams(temperature=0, frequency_penalty=0.5)
    sample(torch.zeros(1, 4000), [Row(params, range(3000), 0, 0.0, (), "long")], counts)
    large = counts.nbytes
    ids: list[int] = []
    for _ in range(600):
        (token,) = sample(torch.zeros(1, 4000), [Row(params, ids, 0, 0.0, (), "short")], counts)
        assert token.token_id == len(ids) % 4000
        ids.append(token.token_id)
    assert counts.nbytes < large / 2


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ((4, 1000), (4, 3), (4, 4)), ((64, 3), (1, 3), (1, 4)), ((64, 3), (2, 500), (2, 512)),
        ((8, 64), (4, 32), (4, 32)), ((8, 64), (8, 16), (8, 16)), ((8, 64), (2, 64), (2, 64)),
        ((8, 64), (8, 32), (8, 64)), ((8, 64), (4, 64), (8, 64)), ((1, 1000), (1, 600), (1, 1024)),
        ((64, 1), (33, 1), (64, 1)), ((64, 16), (64, 3), (64, 4)),
    ],
)  # fmt: skip
def test_a_table_shrinks_to_what_is_used(
    before: tuple[int, int], after: tuple[int, int], kept: tuple[int, int]
) -> None:
    """By rows and by columns, if 256 calls have used a quarter of it at most."""
    counts = TokenCounts()
    params = SamplingParams(temperature=0, frequency_penalty=0.5)
    for call in range(520):
        height, distinct = after if call else before
        rows = [Row(params, range(distinct), 0, 0.0, (), key) for key in range(height)]
        update = counts.plan(rows, 1000)
        counts.apply(update, [torch.tensor([*each], dtype=torch.int64) for each in update.arrays])
    assert counts.nbytes == 8 * kept[0] * kept[1]


def test_two_rows_with_one_key_are_refused() -> None:
    """A key names one sequence."""
    row = Row(SamplingParams(repetition_penalty=2.0), [1], 1, 0.0, (), "a")
    with pytest.raises(ValueError, match="two rows have the key 'a'"):
        sample(torch.zeros(2, 8), [row, row], TokenCounts())
