"""Triton is imported when a kernel is launched, and kernels of several modules are found then."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")
Run = Callable[..., subprocess.CompletedProcess[str]]  # run_with_torch of conftest.py

START = """
import sys
import vllm_module.cli.app, vllm_module.runtime.llm, vllm_module.models.deepseek_v3
import vllm_module.models.mamba2, vllm_module.models.qwen3_next
print("triton" in sys.modules)
"""
EARLY = """
from vllm_module.kernels.operators import begin_early, launched_early
print(launched_early(begin_early, False), launched_early(begin_early, True))
"""
LEAF = """
from vllm_module.kernels.operators import tl, triton

@triton.jit
def halved(x):
    return x / 2
"""
MIDDLE = """
from leaf import halved
from vllm_module.kernels.operators import tl, triton

@triton.jit
def quartered(x):
    return halved(halved(x))

@triton.jit
def _unused(x):
    return quartered(x)
"""
TOP = """
from __future__ import annotations

import sys, threading
import torch
import middle
from middle import quartered
from vllm_module.kernels.operators import tl, triton

@triton.jit(do_not_specialize=["count"])
def _kernel(x_ptr, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x_ptr + at, quartered(tl.load(x_ptr + at, mask=at < count)), mask=at < count)

def launch(x):
    _kernel[(1,)](x, len(x), 8)

TABLE = {"kernel": _kernel}
assert "triton" not in sys.modules
assert _kernel.__name__ == "_kernel" and not hasattr(_kernel, "__torch_function__")
inputs = [torch.arange(float(size)) for size in (5, 8, 3, 1)]
outputs = [each.clone() for each in inputs]
threads = [threading.Thread(target=TABLE["kernel"].real) for _ in range(4)]
for each in threads:
    each.start()
for each in threads:
    each.join()
for each in outputs[:3]:  # one after the other, because Triton's interpreter is for one thread
    launch(each)
TABLE["kernel"][(1,)](outputs[3], 1, 8)
for before, after in zip(inputs, outputs):
    assert torch.equal(after, before / 4), after
import triton as theirs
import triton.language
assert triton is theirs and tl is middle.tl is triton.language
assert middle.quartered is quartered and type(_kernel) is type(quartered) is type(middle._unused)
print("launched")
"""


def test_no_module_imports_triton_at_a_start(run_with_torch: Run) -> None:
    assert run_with_torch(START).stdout == "False\n"


def test_a_kernel_is_launched_early_from_the_first_time_on(run_with_torch: Run) -> None:
    """Whether Triton has seen it or not: a graph that is captured later has the same kernel."""
    # Triton's interpreter never launches early.
    said = run_with_torch(EARLY, environment={**os.environ, "TRITON_INTERPRET": "0"}).stdout
    assert said == "{'EARLY': False} {'EARLY': True, 'launch_pdl': True}\n"


def test_kernels_of_other_modules_are_called(tmp_path: Path, run_with_torch: Run) -> None:
    """Made by threads at the same time, and launched through a table that was there before, too."""
    for name, text in (("leaf", LEAF), ("middle", MIDDLE), ("top", TOP)):
        (tmp_path / f"{name}.py").write_text(text)
    # Kernels run on a CPU in Triton's interpreter alone.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = run_with_torch("import top", modules=tmp_path, environment=environment)
    assert done.stdout == "launched\n", done.stderr


def test_a_kernel_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads ask for it."""
    import triton

    from vllm_module.kernels.lazy_triton import triton as stand_in

    def kernel(x_ptr: object) -> None: ...

    made = stand_in.jit(kernel)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(made.real())) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len({id(each) for each in found}) == 1
    assert type(found[0]) is type(triton.jit(kernel))
