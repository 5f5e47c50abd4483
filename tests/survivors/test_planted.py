"""Faults that the search for survivors plants."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FAULTS: Any = runpy.run_path(str(HERE / "faults.py"))
CASES = {
    "a < b": {"a <= b"},
    "a is not None": {"a is None"},
    "not a": {"(a)"},
    "a and b": {"((a))", "((b))"},
    "a + b * 2": {"a - b * 2", "a + b // 2", "a + b * 3", "a + b * 1"},
    "a if b else 0": {"(a)", "(0)", "a if b else 1"},
    "f(a, b)": {"f(b, a)"},
    "f(a, key=b)": {"f(a)"},
    "f(key=b, a=c)": {"f( a=c)", "f(key=b)"},
    "min(a, b)": {"max(a, b)"},
    "a.startswith(b)": {"a.endswith(b)"},
    "a[-1]": {"a[-2]", "a[-0]"},
    "True": {"False"},
    "0.5": {"1.0"},
    "log(a, b)": set(),
    "f'{a + 1}'": set(),
}


@pytest.mark.parametrize("code", CASES)
def test_each_place_has_its_nearest_faults(code: str) -> None:
    text = f"def f(a, b, c):\n    é = None  # two bytes\n    return {code}\n"
    found = {
        (fault.line, FAULTS["planted"](text, fault).splitlines()[2])
        for fault in FAULTS["faults"](text)
    }
    assert found == {(3, f"    return {each}") for each in CASES[code]}


def test_statements_are_left_out_and_conditions_decided() -> None:
    text = (
        "def f(a):\n    if a:\n        a.clear()\n    if not a:\n        raise ValueError(a + 1)\n"
        "    assert a == 1\n    a += 1\n    for b in a:\n        continue\n"
    )
    found = {(each.line, each.new, each.kind) for each in FAULTS["faults"](text)}
    assert found == {
        (2, "False", "never"), (2, "True", "always"), (3, "None", "no call"),
        (4, "False", "never"), (4, "(a)", "negation"),
        (7, " = ", "assignment"), (7, "2", "number"), (7, "0", "number"), (9, "break", "loop"),
    }  # fmt: skip


@pytest.mark.parametrize("file", ["vllm_module/core/run.py", "kernels/rows/rms_norm.py"])
def test_a_planted_fault_is_python_and_another_program(file: str) -> None:
    text = (ROOT / file).read_text()
    before, seen = ast.dump(ast.parse(text)), 0
    for fault in FAULTS["faults"](text)[::7]:
        if (changed := FAULTS["planted"](text, fault)) is not None:
            assert ast.dump(ast.parse(changed)) != before, fault
            seen += 1
    assert seen > 10
