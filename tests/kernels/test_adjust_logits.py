"""Logits that a kernel adjusts, and tokens that it counts, are those of rules written out."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.kernels.rows import adjust_logits as kernel
from vllm_module.kernels.rows.adjust_logits import EMPTY, NONE, adjust_logits, count_tokens

INFINITE = -float("inf")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small vocabularies have several chunks, and these several tiles."""
    monkeypatch.setattr(kernel, "_CHUNK", 32)
    monkeypatch.setattr(kernel, "_TILE", 8)


def by_rule(x: list[float], asked: dict[str, Any]) -> list[float]:
    """Adjust one row, one token after the other, in float32 numbers of numpy."""
    y = np.array(x, dtype=np.float32)
    for token, bias in asked["biases"].items():
        y[token] += np.float32(bias)
    repetition, presence, frequency = (np.float32(each) for each in asked["penalties"])
    for token, times in (asked["counts"] or {}).items():
        y[token] = y[token] / repetition if y[token] > 0 else y[token] * repetition
        if times:
            y[token] -= frequency * np.float32(times) + presence
    for token in asked["banned"]:
        y[token] = INFINITE
    if asked["allowed"] is not None:
        y = np.array([v if t in asked["allowed"] else INFINITE for t, v in enumerate(y)])
    return y.tolist()


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Draw logits, and what is asked of each of some rows of them."""
    vocab = draw(st.sampled_from([1, 7, 8, 31, 32, 33, 70]))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(3, vocab).mul(4).to(draw(st.sampled_from([torch.float32, torch.float16])))
    logits[2, draw(st.integers(0, vocab - 1))] = INFINITE
    tokens = st.integers(0, vocab - 1)
    asked = st.fixed_dictionaries({
        "row": st.integers(0, 2),
        "biases": st.dictionaries(tokens, st.sampled_from([-100.0, 0.5, 3.0]), max_size=12),
        "counts": st.none() | st.dictionaries(tokens, st.integers(0, 3), max_size=20),
        "penalties": st.sampled_from([(1.0, 0.0, 0.0), (1.3, 0.4, 0.25), (0.7, -0.5, 1.0)]),
        "banned": st.sets(tokens, max_size=10),
        "allowed": st.none() | st.sets(tokens, max_size=12),
    })  # fmt: skip
    return logits, draw(st.lists(asked, min_size=1, max_size=4))


def arguments(asked: list[dict[str, Any]]) -> tuple[torch.Tensor, ...]:
    """Return what the operation takes after logits: a table with gaps, rows in another order."""
    plan, penalties, biases = array("q"), array("d"), array("d")
    tokens = array("q")
    table = torch.full((2, len(asked), 48), EMPTY, dtype=torch.int32)
    for index, each in enumerate(asked):
        place = len(asked) - 1 - index
        for column, (token, times) in enumerate((each["counts"] or {}).items()):
            table[:, place, 2 * column + 1] = torch.tensor([token, times])
        plan.extend((each["row"], -1 if each["counts"] is None else place))
        penalties.extend(each["penalties"])
        biases.extend([0.0] * (len(tokens) - len(biases)) + list(each["biases"].values()))
        for some in (each["biases"], each["banned"], each["allowed"] or ()):
            plan.append(len(tokens))
            tokens.extend(some)
            plan.append(len(tokens))
        if each["allowed"] is None:
            plan[-2:] = array("q", (-1, -1))
    return (
        torch.tensor(plan).view(-1, 8),
        torch.tensor(penalties, dtype=torch.float64).view(-1, 3),
        torch.tensor(biases, dtype=torch.float64),
        torch.tensor(tokens, dtype=torch.int64),
        table,
    )


@given(cases())
@settings(max_examples=12)
def test_logits_are_those_of_the_rule(case: Any) -> None:
    """The kernel and the reference adjust as the rule does, rows of different kinds together."""
    logits, asked = case
    given = arguments(asked)
    expected = [by_rule(logits[each["row"]].tolist(), each) for each in asked]
    for found in (kernel.adjust_logits_triton(logits, *given), adjust_logits(logits, *given)):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [kernel.count_tokens_triton, count_tokens])
def test_tokens_are_counted(count: Any) -> None:
    """Rows are written, get new and known tokens or none, and other rows keep theirs."""
    width, columns = 20, 19  # several tiles
    table = torch.full((2, 4, width), 99, dtype=torch.int32)
    first, second = dict.fromkeys(range(30, 30 + 17), 2), {5: 0}
    tokens = torch.tensor([*first, *second])
    counts = torch.tensor([*first.values(), *second.values()])
    plan = [[3, NONE, 0, 0, 17], [1, NONE, 0, 17, 18], [2, NONE, 0, 18, 18]]
    expected = {3: Counter(first), 1: Counter(second), 2: Counter()}
    count(table, torch.tensor(plan), tokens, counts)
    nothing = torch.empty(0, dtype=torch.int64)
    for new, column in ((40, 17), (7, columns - 1), (40, columns), (46, width)):
        plan = [[3, new, column, -1, -1], [1, NONE, 1, -1, -1], [2, 5, 0, -1, -1]]
        count(table, torch.tensor(plan), nothing, nothing)
        expected[3][new] += 1
        expected[2][5] += 1
    for place, wanted in expected.items():
        ids, times = table[:, place].tolist()
        found = [(token, n) for token, n in zip(ids, times, strict=True) if token != EMPTY]
        assert sorted(found) == sorted(wanted.items())
    assert table[:, 0].eq(99).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 6)[:, ::2]}, "contiguous"),
        ({"plan": torch.zeros(1, 7, dtype=torch.int64)}, r"plan must have the shape \[any, 8"),
        ({"penalties": torch.zeros(2, 3, dtype=torch.float64)}, r"penalties must have the shape"),
        ({"tokens": torch.zeros(1, dtype=torch.int32)}, "tokens must be"),
        ({"table": torch.zeros(2, 1, 1)}, "table must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    """Each is named, with what was expected."""
    given = {"logits": torch.zeros(2, 3), "plan": torch.zeros(1, 8, dtype=torch.int64),
             "penalties": torch.zeros(1, 3, dtype=torch.float64),
             "biases": torch.zeros(0, dtype=torch.float64),
             "tokens": torch.zeros(0, dtype=torch.int64),
             "table": torch.zeros(2, 1, 1, dtype=torch.int32)} | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        adjust_logits(*given.values())
