"""Loops that are kept on disk: what is loaded, and when they are compiled again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_module.kernels.matmul import kept_loops
from vllm_module.kernels.matmul.kept_loops import Loop, compiled
from vllm_module.kernels.matmul.torch_threads import in_threads, numbers

pytest.importorskip("numba")
Run = Callable[..., subprocess.CompletedProcess[str]]  # run_with_torch of conftest.py


def doubling(times: int) -> Any:
    """Return a loop that multiplies a number by a power of two."""

    def double(argument: Any) -> None:
        at = numbers(argument, np.int64, (2,))
        value = numbers(at[0], np.int64, (1,))
        for _ in range(times):
            value[0] = value[0] * 2

    return double


def applied(loop: Loop, value: int) -> int:
    """Return what a loop of :func:`doubling` makes of a number."""
    held = np.array([value], np.int64)
    in_threads(loop, 1)((held.ctypes.data, 0))
    return int(held[0])


@pytest.fixture
def times_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Keep loops in an empty folder; return a list that grows with each one that is compiled."""
    # Loops that other tests compile are somewhere else.
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    seen: list[Any] = []
    original = kept_loops._compile

    def compile_it(function: Any) -> Any:
        seen.append(function)
        return original(function)

    # Nothing else says whether a loop was loaded or compiled.
    monkeypatch.setattr(kept_loops, "_compile", compile_it)
    return seen


def loop(times: int = 3) -> Loop:
    """Return a loop as a new process has it."""
    return compiled(doubling)(times)


def kept(folder: Path) -> Path:
    (path,) = (folder / "kept").iterdir()
    return path


def test_a_loop_is_compiled_once_for_each_argument(
    times_compiled: list[Any], tmp_path: Path
) -> None:
    for _ in range(3):
        assert applied(loop(3), 5) == 40
    assert len(times_compiled) == 1
    assert applied(loop(4), 5) == 80
    assert len(times_compiled) == len([*(tmp_path / "kept").iterdir()]) == 2


def test_threads_compile_a_loop_once(times_compiled: list[Any]) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(compiled(doubling), [3] * 8))
    assert {applied(each, 1) for each in found} == {8}
    assert len({each.address for each in found}) == 1  # it is freed with the last that has it
    assert len(times_compiled) == 1


TOGETHER = """
import os
import torch
from vllm_module.kernels.matmul import kept_loops
from vllm_module.kernels.experts.compiled_routing import compiled_order

original = kept_loops._compile
def compile_it(function):
    os.write(1, b"compiled ")
    return original(function)
kept_loops._compile = compile_it
begun, begin = os.pipe()
pids = []
for _ in range(3):
    if not (pid := os.fork()):
        os.close(begin)
        os.read(begun, 1)  # nothing comes before the pipe is closed
        assert compiled_order().address
        os._exit(0)
    pids.append(pid)
os.close(begin)
print(*[os.waitpid(pid, 0)[1] for pid in pids])
"""


def test_processes_that_start_together_compile_a_loop_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_with_torch: Run
) -> None:
    # An empty folder.
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    done = run_with_torch(TOGETHER)
    assert done.stdout == "compiled 0 0 0\n", done.stderr
    assert kept(tmp_path).suffix == ".loop"  # and no lock is left


def test_a_process_that_is_stopped_while_it_compiles_is_not_waited_for_long(
    times_compiled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loop()
    path = kept(tmp_path)
    path.rename(tmp_path / "old")
    # The limit is a minute.
    monkeypatch.setattr(kept_loops, "_PATIENCE", 0.1)
    with kept_loops._one_process(path.with_name(f"{path.name}.lock")):  # as the stopped one does
        assert applied(loop(), 5) == 40
    assert len(times_compiled) == 2


def test_damaged_loops_are_compiled_again(times_compiled: list[Any], tmp_path: Path) -> None:
    """A bit anywhere, each length, and another loop's file: LLVM would run what is in it."""
    loop()
    whole, mode = kept(tmp_path).read_bytes(), kept(tmp_path).stat().st_mode
    cut = [0, 1, 31, 32, 33, len(whole) // 2, len(whole) - 1]
    damaged = [whole[:length] for length in cut]
    for place in (0, 31, 32, 33, whole.index(b"\n"), len(whole) // 2, len(whole) - 1):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        damaged.append(bytes(flipped))
    damaged.append(whole + b"\0")
    for data in damaged:
        assert kept_loops._read(kept(tmp_path), b"another") is None
        kept(tmp_path).write_bytes(data)
        before = len(times_compiled)
        assert applied(loop(), 5) == 40
        assert len(times_compiled) == before + 1
        assert kept(tmp_path).stat().st_mode == mode
    assert mode & 0o777 == 0o600


def test_a_changed_text_is_compiled_again_and_the_old_loop_is_gone(
    times_compiled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = tmp_path / "compiled_text.py"
    text.write_text("a")
    # One of the files is edited, and a process that starts then reads them.
    monkeypatch.setattr(kept_loops, "TEXTS", (*kept_loops.TEXTS, text))
    monkeypatch.setattr(kept_loops, "_WRITTEN", kept_loops._written())
    loop()
    name = kept(tmp_path).name
    text.write_text("b")
    loop()  # of what this process has imported
    assert len(times_compiled) == 1
    # A new process.
    monkeypatch.setattr(kept_loops, "_WRITTEN", kept_loops._written())
    assert applied(loop(), 5) == 40
    assert len(times_compiled) == 2
    assert kept(tmp_path).name == name
    loop()
    assert len(times_compiled) == 2


def test_each_processor_has_its_own_loops(
    times_compiled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two hosts may share a folder."""
    first = kept_loops.processor()
    for given in (first, (first[0], ""), ("generic", ""), first):
        # A host with another processor.
        monkeypatch.setattr(kept_loops, "processor", lambda given=given: given)
        assert applied(loop(), 5) == 40
    assert len(times_compiled) == len([*(tmp_path / "kept").iterdir()]) == 3


AS_NUMBA = """
from numba.core.registry import cpu_target
from vllm_module.kernels.matmul.kept_loops import processor
_, *expected = cpu_target.target_context.codegen().magic_tuple()
assert [*processor()] == expected, processor()
"""


@pytest.mark.parametrize("name", [pytest.param("haswell", marks=pytest.mark.at_length), "Generic"])
def test_the_processor_is_as_numba_takes_it(name: str, run_with_torch: Run) -> None:
    """A generic one has no features: what is compiled for it runs on any host."""
    set_by_user = {**os.environ, "NUMBA_CPU_NAME": name}
    done = run_with_torch(AS_NUMBA, environment=set_by_user)
    assert done.returncode == 0, done.stderr


def test_without_compiling_there_are_no_loops(
    times_compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations of torch take their place, as where numba is not installed."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # as a user sets it
    with pytest.raises(ImportError, match="NUMBA_DISABLE_JIT is set"):
        loop()
    assert not times_compiled


def test_what_others_may_write_is_not_run(times_compiled: list[Any], tmp_path: Path) -> None:
    loop()
    for mode in (0o620, 0o602, 0o666):
        before = len(times_compiled)
        kept(tmp_path).chmod(mode)
        loop()
        assert len(times_compiled) == before + 1
        assert kept(tmp_path).stat().st_mode & 0o777 == 0o600


def test_a_pipe_in_place_of_a_loop_is_not_waited_for(
    times_compiled: list[Any], tmp_path: Path
) -> None:
    loop()
    path = kept(tmp_path)
    path.unlink()
    os.mkfifo(path, 0o600)
    assert applied(loop(), 5) == 40
    assert len(times_compiled) == 2
    assert path.is_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_run(times_compiled: list[Any], tmp_path: Path) -> None:
    loop()
    os.chown(kept(tmp_path), 12345, -1)
    loop()
    assert len(times_compiled) == 2


def test_a_folder_that_can_only_be_read_is_used(
    times_compiled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in an image that was built with its loops; what is not there needs another folder."""
    loop()
    (tmp_path / "file").touch()
    nowhere = tmp_path / "file" / "folder"
    # A machine where no other folder can be written.
    monkeypatch.setattr(kept_loops, "_folders", lambda: [nowhere, tmp_path / "kept"])
    assert applied(loop(), 5) == 40
    assert len(times_compiled) == 1
    # Not even the one with the loop.
    monkeypatch.setattr(kept_loops, "_can_be_written", lambda folder: False)
    assert applied(loop(), 5) == 40
    with pytest.raises(ImportError, match=f"{nowhere}, .*NUMBA_CACHE_DIR"):
        loop(5)
    assert len(times_compiled) == 1


def test_a_folder_at_home_is_the_last_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the package was installed by someone else."""
    # Variables of a user.
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package, home = kept_loops._folders()
    assert package == Path(kept_loops.__file__).parent / "__pycache__"
    assert home == tmp_path / "vllm_module" / "loops"
    assert kept_loops._can_be_written(home)
    assert home.stat().st_mode & 0o777 == 0o700
    # A home that the system says.
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kept_loops._folders()[1] == tmp_path / "home" / ".cache" / "vllm_module" / "loops"


PROCESS = """
import sys
import torch
from vllm_module.kernels.matmul import kept_loops
from vllm_module.kernels.matmul.linear import linear
from vllm_module.kernels.matmul.products import Products, products

kept_loops._LIBRARIES = LIBRARIES or kept_loops._LIBRARIES
kept_loops._compile = None  # nothing is compiled
x, weight = torch.randn(3, 1000), torch.randn(200, 1000)

def check():
    with torch.inference_mode(), products(Products(floats=range(1, 64))):
        y = linear(x, weight)
    torch.testing.assert_close(y, x @ weight.T, rtol=1e-4, atol=1e-4)

check()
print("numba" in sys.modules)
if "numba" in sys.modules:
    sys.exit()
import numba, numpy
@numba.njit("float64[:](int64)")
def made(size):
    return numpy.full(size, 2.0)
made(100)
check()
assert made(100).sum() == 200
"""


@pytest.mark.parametrize(
    ("libraries", "imports"), [("{}", "False"), ("{'numba.gone': ''}", "True")]
)
def test_a_new_process_loads_loops_without_numba(
    libraries: str, imports: str, run_with_torch: Run
) -> None:
    """Unless a version of numba has its libraries elsewhere. It is imported beside them later."""
    from vllm_module.kernels.matmul.code_rows_matmul import compiled_loops
    from vllm_module.kernels.matmul.compiled_floats import FLOAT32

    compiled_loops(FLOAT32, False)  # on disk from now on
    program = PROCESS.replace("LIBRARIES or", f"{libraries} or")
    done = run_with_torch(program)
    assert (done.stdout.strip(), done.returncode) == (imports, 0), done.stderr
