"""What programs of ``tests/bench`` take from the package exists: nothing else runs most of them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).with_name("bench")


def programs(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a program and those that it has as text, for processes that it starts."""
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and "import" in str(node.value):
            try:
                yield ast.parse(str(node.value))
            except SyntaxError:
                continue


def taken(tree: ast.AST) -> dict[str, Any]:
    """Return what a program imports from the package, by its names; raise for what is missing."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in (each.name for each in node.names):
                if name.partition(".")[0] == "vllm_module":
                    importlib.import_module(name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_module"):
            module = importlib.import_module(str(node.module))
            for each in node.names:
                if not hasattr(module, each.name):
                    importlib.import_module(f"{node.module}.{each.name}")
                found[each.asname or each.name] = getattr(module, each.name)
    return found


def missing(source: str) -> list[str]:
    """Return names that a program uses of what it imports, and that do not exist."""
    lost = []
    for tree in programs(ast.parse(source)):
        names = taken(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                of = names.get(node.value.id)
                of_module = type(of).__name__ == "module" or node.attr.startswith("_")
                if of is not None and of_module and not hasattr(of, node.attr):
                    lost.append(f"{node.value.id}.{node.attr}, line {node.lineno}")
    return lost


@pytest.mark.parametrize(
    "file", sorted(BENCH.rglob("*.py")), ids=lambda file: file.relative_to(BENCH).as_posix()
)
def test_names_exist(file: Path) -> None:
    assert missing(file.read_text()) == []


def test_a_missing_name_is_found() -> None:
    text = "from vllm_module.weights.stores import ranks\nranks._answers, ranks._RANKS\n"
    for source in (text, f"PROGRAM = {text!r}\n"):
        assert missing(source) == ["ranks._answers, line 2"]
    with pytest.raises(ImportError):
        missing("from vllm_module.weights import no_such_name\n")
