"""Text and tables on terminals of any width."""

from __future__ import annotations

import io
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from vllm_module.cli.output import folded, print_table, size

NAME = "model.layers.{0..79}.self_attn.q_proj.weight"

FOLDED = {
    "a short line": ("as it is", 10, "as it is"),
    "words": ("one two three", 9, "one two\n  three"),
    "lines keep their margin": ("a\n  one two three", 11, "a\n  one two\n    three"),
    "dots": (f"{NAME}: x", 34, "model.layers.{0..79}.self_attn.\n  q_proj.weight: x"),
    "paths": ("/some/where/else", 12, "/some/where/\n  else"),
    "underscores, if nothing else": ("post_attention_norm", 12, "post_\n  attention_\n  norm"),
    "a word of its own width": ("abcdefghij", 6, "abcdef\n  ghij"),
    "lists stay together": ("it is [1, 2, 3]", 12, "it is\n  [1, 2, 3]"),
    "wide characters": ("模型 模型", 6, "模型\n  模型"),
    "nothing": ("", 6, ""),
}  # fmt: skip


@pytest.mark.parametrize(("text", "width", "expected"), FOLDED.values(), ids=FOLDED)
def test_folded(text: str, width: int, expected: str) -> None:
    """Lines are broken where a reader expects it."""
    assert folded(text, width) == expected


CELLS = st.text("ab._/ {}[]19-", max_size=60)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=4), st.integers(40, 200))
def test_tables_fit(rows: list[tuple[str, str, str]], width: int) -> None:
    """No line is wider than the terminal, and no character but space is lost."""
    rows = [(name, f"{len(name)} kB", other + last) for name, other, last in rows]
    file = io.StringIO()
    out = Console(file=file, force_terminal=True, color_system=None, width=width, soft_wrap=True)
    print_table(out, ("name", "bytes", "other"), rows, right=[1])
    screen = file.getvalue()
    assert max(map(len, screen.splitlines())) <= width
    written = "".join(sorted(screen.replace(" ", "").replace("\n", "")))
    cells = ["name", "bytes", "other", *(cell for row in rows for cell in row)]
    assert written == "".join(sorted("".join(cells).replace(" ", "")))


UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@given(st.sampled_from([1, 10**3, 10**6, 10**9, 10**12]), st.floats(1, 999.999))
def test_a_size_has_three_digits(unit: int, number: float) -> None:
    """It is the nearest such number, and below a thousand of its unit."""
    nbytes = round(unit * number)
    for each in (nbytes, unit * 1000 - 1, round(unit * 999.4), round(unit * 999.5)):
        shown, name = size(each).split()
        assert re.fullmatch(r"\d{1,3}|\d\.\d{1,2}|\d\d\.\d", shown) or each >= 999.5e12
        value = Decimal(shown) * UNITS[name]
        assert abs(value - each) <= Decimal(each) / 200, each


def test_numbers_stay_whole() -> None:
    """Where there is no room, names are folded and numbers are not; a pipe gets whole lines."""
    rows = [(f"{NAME}.{NAME}", "1,666,464 kB", NAME)]
    shown = {}
    for width in (40, 60, None):
        file = io.StringIO()
        out = Console(file=file, force_terminal=bool(width), color_system=None, width=width or 80,
                      soft_wrap=True)  # fmt: skip
        print_table(out, ("tensor", "bytes of the tensor", "fills"), rows, right=[1])
        shown[width] = file.getvalue()
        assert "1,666,464 kB" in shown[width]
    assert shown[None].splitlines()[1] == f"{NAME}.{NAME}         1,666,464 kB  {NAME}"
