"""Tokens that a kernel draws are those of a rule written out in Python, for any settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from vllm_module.kernels.rows import draw_tokens as kernel
from vllm_module.kernels.rows.draw_tokens import draw_tokens

CHUNK, TILE = 64, 16


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small vocabularies have several chunks, and these several tiles."""
    monkeypatch.setattr(kernel, "_CHUNK", CHUNK)
    monkeypatch.setattr(kernel, "_TILE", TILE)


def launched(logits: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor) -> list[int]:
    """Draw by the kernels."""
    vocab, wide = logits.shape[1], chosen[:, 0] != 0
    top_k = bool(((chosen[:, 2] > 0) & (chosen[:, 2] < vocab) & wide).any())
    top_p = bool(((chosen[:, 3] < 1) & wide).any())
    return kernel.draw_tokens_triton(logits, rows, chosen, top_k, top_p).view(-1).tolist()


def by_rule(x: list[float], chosen: list[float]) -> int:
    """Draw from a list of logits, in Python's integers."""
    temperature, min_p, top_k, top_p, uniform = chosen
    if any(math.isnan(value) or value == math.inf for value in x) or max(x) == -math.inf:
        return -1
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if temperature == 0:
        return order[0]
    unit = 2 ** (62 - len(x).bit_length())
    ratios = [math.exp((value - max(x)) / temperature) for value in x]
    mass = [int(ratio * unit) if ratio >= min_p else 0 for ratio in ratios]
    few = 0 < top_k < len(x)
    kept = order[: int(top_k)] if few else order
    if top_p < 1:
        total = sum(mass[token] for token in kept)
        needed = min(max(1, math.ceil(float(total) * top_p)), total)
        nucleus, reached = [], 0
        while reached < needed:
            nucleus.append(kept[len(nucleus)])
            reached += mass[nucleus[-1]]
        kept = nucleus
    if not few and (top_p >= 1 or len(kept) > kernel.SORTED):
        kept = sorted(kept)
    total = sum(mass[token] for token in kept)
    left = min(int(float(total) * uniform), total - 1)
    for token in kept:
        if left < mass[token]:
            return token
        left -= mass[token]
    raise AssertionError("the masses have their own sum")


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw logits with ties, broken and hopeless ones, rows of them, and settings of each row."""
    vocab = draw(st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 200]))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(4, vocab) * draw(st.sampled_from([0.0, 0.1, 1.0, 8.0]))
    if draw(st.booleans()):
        logits = logits.mul(2).round().div(2)
    logits = logits.to(draw(st.sampled_from([torch.float32, torch.float16])))
    logits[1, : vocab // 2] = -torch.inf
    logits[2, draw(st.integers(0, vocab - 1))] = draw(
        st.sampled_from([math.nan, math.inf, -math.inf, -0.0])
    )
    logits[3] = -torch.inf
    top_k = st.sampled_from([-1, 0, 1, 2, 63, 64, 65, vocab - 1, vocab, vocab + 1])
    row = st.tuples(
        st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        st.sampled_from([0.0, 0.0, 0.05, 1.0]),
        top_k,
        st.sampled_from([1.0, 1e-9, 0.3, 0.9, 0.999, 1 - 1e-9]),
        st.sampled_from([0.0, 0.25, 0.5, 0.999, 1 - 2**-53]),
    )
    rows = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    chosen = draw(st.lists(row, min_size=len(rows), max_size=len(rows)))
    return logits, torch.tensor(rows), torch.tensor(chosen, dtype=torch.float64)


@given(cases())
@settings(max_examples=6)
def test_tokens_are_those_of_the_rule(case: Any) -> None:
    """The kernels and the reference draw what the rule does, for rows of different settings."""
    logits, rows, chosen = case
    expected = [
        by_rule(logits[row].double().tolist(), each.tolist())
        for row, each in zip(rows, chosen, strict=True)
    ]
    assert launched(logits, rows, chosen) == expected
    assert draw_tokens(logits, rows, chosen, True, True).view(-1).tolist() == expected


@pytest.mark.parametrize("count", [64, 65])
def test_the_largest_nucleus_that_is_drawn_from_in_the_order_of_logits(count: int) -> None:
    """Of 64 tokens the order is that of logits; of one more it is that of ids."""
    logits = torch.full((1, 130), -100.0)
    logits[0, 1 : count + 1] = 0.01 * torch.arange(count)  # the last id is the most probable
    uniform = (0.0, 0.9)
    chosen = torch.tensor([[1.0, 0.0, 0, 1 - 1e-9, each] for each in uniform], dtype=torch.float64)
    x = logits[0].double().tolist()
    expected = [by_rule(x, each) for each in chosen.tolist()]
    assert expected[0] == (count if count <= kernel.SORTED else 1)
    rows = torch.zeros(len(uniform), dtype=torch.int64)
    assert launched(logits, rows, chosen) == expected
    assert draw_tokens(logits, rows, chosen, False, True).view(-1).tolist() == expected


def test_a_nucleus_is_not_rounded_to_float32() -> None:
    """A little more than half of the mass of two equal tokens is that of both."""
    logits, rows = torch.zeros(1, 2), torch.tensor([0])
    chosen = torch.tensor([[1.0, 0.0, 0, 0.5 + 1e-9, 0.75]], dtype=torch.float64)
    assert by_rule([0.0, 0.0], chosen[0].tolist()) == 1
    assert launched(logits, rows, chosen) == [1]
    assert draw_tokens(logits, rows, chosen, False, True).view(-1).tolist() == [1]


def test_production_sizes_and_the_edges_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks of 8192 tokens, the largest logit is found on both sides of an edge."""
    monkeypatch.undo()
    for token in (0, 8191, 8192, 8299):
        logits = torch.zeros(1, 8300)
        logits[0, token] = 20
        for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.5)):
            chosen = torch.tensor([[1.0, 0.0, top_k, top_p, 0.5]], dtype=torch.float64)
            assert launched(logits, torch.tensor([0]), chosen) == [token]


def test_rows_beyond_the_memory_of_searches_are_drawn_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of seven rows the memory takes three; they have the tokens that all have at once."""
    torch.manual_seed(0)
    logits, rows = torch.randn(9, 40), torch.tensor([8, 0, 3, 3, 5, 1, 7])
    each = torch.rand(7, 5, dtype=torch.float64) * torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0])
    each[:, 2] = torch.tensor([0, 3, 40, 7, 1, 0, 20])
    together = launched(logits, rows, each)
    assert len({*together}) > 2
    # Rows that fill the real memory would take minutes in the interpreter.
    monkeypatch.setattr(kernel, "_SCRATCH", 3 * 4 * 8 * kernel._BINS + 1)
    assert launched(logits, rows, each) == together


@pytest.mark.parametrize(
    ("top_k", "top_p", "most"), [(0, 1.0, 2), (5, 1.0, 7), (0, 0.5, 7), (5, 0.5, 9)]
)
def test_launches_are_few(monkeypatch: pytest.MonkeyPatch, top_k, top_p, most: int) -> None:
    """A draw takes at most 9 launches of kernels, whatever is asked and however many rows ask."""
    launches: list[str] = []
    run = InterpretedFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    chosen = torch.tensor([[1.0, 0.1, top_k, top_p, 0.5]] * 3, dtype=torch.float64)
    launched(torch.randn(3, 200), torch.arange(3), chosen)
    assert len(launches) <= most
    assert "_find_token" in launches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 6)[:, ::2]}, "contiguous"),
        ({"logits": torch.zeros(2, 3, dtype=torch.float64)}, "logits must be"),
        ({"rows": torch.zeros(1, dtype=torch.int32)}, "rows must be"),
        (
            {"chosen": torch.zeros(2, 5, dtype=torch.float64)},
            r"settings must have the shape \[1, 5",
        ),
        ({"chosen": torch.zeros(1, 5)}, "settings must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    """Each is named, with what was expected."""
    given = {"logits": torch.zeros(2, 3), "rows": torch.zeros(1, dtype=torch.int64),
             "chosen": torch.zeros(1, 5, dtype=torch.float64)} | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        draw_tokens(*given.values(), False, False)
