"""A kept loop is compiled again when a file changes from which a function or a number is in it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from vllm_module.kernels.attention import compiled_attention
from vllm_module.kernels.experts import compiled_routing
from vllm_module.kernels.matmul import compiled_by_expert, compiled_rows, torch_threads
from vllm_module.kernels.matmul.compiled_codes import CODES
from vllm_module.kernels.matmul.compiled_floats import BFLOAT16
from vllm_module.kernels.matmul.kept_loops import TEXTS
from vllm_module.kernels.recurrent import compiled_states
from vllm_module.kernels.rows import compiled_few_rows

pytest.importorskip("numba")
# The module of each loop, and the arguments of each function there that returns one.
LOOPS: dict[Any, dict[str, list[tuple[Any, ...]]]] = {
    compiled_routing: {"choice": [()], "order": [()], "combination": [()]},
    compiled_states: {"scan": [()], "delta_rule": [()], "convolution": [()]},
    compiled_attention: {"attention": [(True,), (False,)], "rotation": [()]},
    compiled_few_rows: {"norm": [()], "activation": [(True,), (False,)]},
    compiled_rows: {"multiply": [(CODES[4], False), (CODES[4], True), (BFLOAT16, False)]},
    compiled_by_expert: {"experts": [()]},
}
CASES = [
    pytest.param(getattr(module, f"compiled_{name}"), arguments, id=f"{name}-{arguments}")
    for module, loops in LOOPS.items()
    for name, cases in loops.items()
    for arguments in cases
]


def names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def reached(function: FunctionType, found: set[FunctionType]) -> set[FunctionType]:
    """Return our functions that a function calls, and those that these call."""
    cells = [each.cell_contents for each in function.__closure__ or ()]
    called = [*cells, *(function.__globals__.get(name) for name in names_in(function.__code__))]
    for each in called:
        ours = isinstance(each, FunctionType) and each.__module__.startswith("vllm_module")
        if ours and each not in found:
            found.add(each)
            reached(each, found)
    return found


def imported(function: FunctionType) -> Iterator[str]:
    """Yield the files of ours from which a function's module imports what the function names."""
    tree = ast.parse(Path(inspect.getfile(function)).read_text())
    used = {*names_in(function.__code__)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm_module"):
            for each in node.names:
                if (each.asname or each.name) in used:
                    yield inspect.getfile(import_module(str(node.module)))


@pytest.mark.parametrize(("loop", "arguments"), CASES)
def test_a_loop_is_made_of_the_texts_alone(loop: Any, arguments: tuple[Any, ...]) -> None:
    made: FunctionType = loop.__wrapped__(*arguments)
    functions = reached(made, {made})
    files = {Path(inspect.getfile(each)).resolve() for each in functions}
    assert Path(inspect.getfile(torch_threads)).resolve() in files
    files |= {Path(file).resolve() for each in functions for file in imported(each)}
    assert files <= {text.resolve() for text in TEXTS}


def test_all_loops_are_tried() -> None:
    makers = set[tuple[str, str]]()
    for text in TEXTS:
        for node in ast.parse(text.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(each, ast.Name) and each.id == "compiled" for each in node.decorator_list
            ):
                makers.add((text.stem, node.name))
    tried = {
        (module.__name__.rpartition(".")[2], f"compiled_{name}")
        for module, loops in LOOPS.items()
        for name in loops
    }
    assert tried == makers
