"""Folding of numbered names loses none of them."""

from __future__ import annotations

import pytest

from vllm_module.report import fold


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], []),
        (["a.b"], ["a.b"]),
        (["l.0.w", "l.1.w", "l.3.w"], ["l.{0..1,3}.w"]),
        (["l.0.w", "l.0.w"], ["l.0.w"]),
        ([f"l.{i}.e.{j}.w" for i in range(3) for j in range(2)], ["l.{0..2}.e.{0..1}.w"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0"], ["l.{0..1}.e.0", "l.0.e.1"]),
        (["a.0.w", "a.#.w"], ["a.0.w", "a.#.w"]),
        (["l.00.w", "l.0.w"], ["l.00.w", "l.0.w"]),
        ([f"l.{'9' * 5000}.w"], [f"l.{'9' * 5000}.w"]),
        (["0", "1"], ["{0..1}"]),
    ],
)
def test_fold(names: list[str], folded: list[str]) -> None:
    """Names that differ in numbers alone are one line, and every other name is itself."""
    assert sorted(fold(names)) == sorted(folded)
