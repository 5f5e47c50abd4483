"""numba's cache drops a loop when a file changes from which a function is compiled into it."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from vllm_module.kernels.attention import compiled_attention
from vllm_module.kernels.experts import compiled_routing
from vllm_module.kernels.matmul import code_rows_by_expert, compiled_rows, torch_threads
from vllm_module.kernels.matmul.compiled_codes import CODES
from vllm_module.kernels.matmul.compiled_floats import BFLOAT16
from vllm_module.kernels.recurrent import compiled_states
from vllm_module.kernels.rows import compiled_few_rows, compiled_numbers, compiled_vectors

pytest.importorskip("numba")
# The file of each loop, and what makes the loop.
LOOPS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "choice": (compiled_routing, compiled_routing.compiled_choice),
    "order": (compiled_routing, compiled_routing.compiled_order),
    "combination": (compiled_routing, compiled_routing.compiled_combination),
    "scan": (compiled_states, compiled_states.compiled_scan),
    "delta rule": (compiled_states, compiled_states.compiled_delta_rule),
    "convolution": (compiled_states, compiled_states.compiled_convolution),
    "attention": (compiled_attention, lambda: compiled_attention.compiled_attention(True)),
    "rotation": (compiled_attention, compiled_attention.compiled_rotation),
    "norm": (compiled_few_rows, compiled_few_rows.compiled_norm),
    "GELU": (compiled_few_rows, lambda: compiled_few_rows.compiled_activation(True)),
    "SiLU": (compiled_few_rows, lambda: compiled_few_rows.compiled_activation(False)),
    "codes": (compiled_rows, lambda: compiled_rows.compiled_multiply(CODES[4], False)),
    "floats": (compiled_rows, lambda: compiled_rows.compiled_multiply(BFLOAT16, False)),
    "experts": (code_rows_by_expert, code_rows_by_expert._compiled.__wrapped__),
}
NUMBERS = {compiled_numbers, torch_threads}
KINDS = {*compiled_rows._KINDS, compiled_vectors}


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


def text_of(*modules: Any) -> bytes:
    return b"".join(Path(inspect.getfile(each)).read_bytes() for each in modules)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_knows_the_texts_of_all_files_it_is_made_of(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba looks at the loop's own file, and at numbers that the loop has as closures."""
    own, make = LOOPS[name]
    monkeypatch.setattr(own, "compiled", lambda function: function)  # its Python code is looked at
    loop = make()
    files = {inspect.getfile(each) for each in reached(loop, set())}
    assert inspect.getfile(torch_threads) in files
    known = NUMBERS | (KINDS if own is compiled_rows else set())
    assert files <= {inspect.getfile(each) for each in known | {own}}
    numbers = {each.cell_contents for each in loop.__closure__ if type(each.cell_contents) is int}
    written = zlib.crc32(text_of(compiled_numbers, torch_threads))
    if own is compiled_rows:
        written ^= zlib.crc32(text_of(compiled_vectors))
        written = zlib.crc32(text_of(*compiled_rows._KINDS), written)
    assert written in numbers
