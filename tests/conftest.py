"""What every test runs with: poisoned memory, seeded generators, one thread for each worker."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import threading

# A shell has its background jobs ignore SIGINT (nohup too), and what they start inherits that. The
# tests interrupt themselves and programs that they start.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU, kernels run in Triton's interpreter; Triton reads this when it is imported.
os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, register_random, settings

from vllm_module.testing import poisoned_memory

INTERPRETER = runpy.run_path(str(Path(__file__).with_name("interpreter.py")))

# The same examples every time, and no clock: a failure is the change's and not the machine's.
# "make laws" tries 200 new ones.
_phases = [phase for phase in settings().phases if phase is not Phase.explain]  # traces each line
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=12, phases=_phases)
settings.load_profile("ci")


# Without a GPU, it also keeps requests to seed one later, each with the stack that it came from:
# more than a millisecond and 10 KB for each test and each example.
if not torch.cuda.is_available():
    torch.manual_seed = torch.default_generator.manual_seed


class _TorchRandom:
    """PyTorch's generator, in the shape in which Hypothesis seeds it before each example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_torch_random = _TorchRandom()  # has a name because Hypothesis keeps only a weak reference
register_random(_torch_random)


def pytest_configure(config: pytest.Config) -> None:
    # Poisoning switches deterministic algorithms on; not every operation has one.
    config.addinivalue_line("filterwarnings", "ignore:.*deterministic:UserWarning")
    config.addinivalue_line("markers", "at_length: runs only where AT_LENGTH is set")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores
        os.environ["OMP_NUM_THREADS"] = "1"  # also with the programs that they start


# Collecting imports much and frees little: the garbage collector would look at all of it again and
# again, for a quarter of the time, and again while tests run.
gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long and rarely finds what the rest does not; ``make laws`` runs it."""
    if "AT_LENGTH" not in os.environ:
        left_out = [item for item in items if item.get_closest_marker("at_length")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("at_length")]


def pytest_collection_finish() -> None:
    gc.freeze()  # also what is garbage by now: to look for it takes each worker a second
    gc.enable()
    # PyTorch's modules and traces make many objects that are no garbage: look less often.
    gc.set_threshold(20_000, 20, 20)
    # pytest adds its handlers to each logger that does not propagate, six times for each test, and
    # PyTorch has 45 of them. Records that propagate reach the same handlers, at the root.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True, scope="session")
def _poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN, which shows where a test reads what nobody wrote."""
    with poisoned_memory():
        assert torch.empty(1).isnan(), "PyTorch no longer fills uninitialized memory: poison it"
        yield


@pytest.fixture(autouse=True, scope="session")
def _fast_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        INTERPRETER["hasten"](patch.setattr)
        yield


@pytest.fixture(autouse=True, scope="session")
def _ranks_are_forked() -> Iterator[None]:
    """Fork the ranks of engines from a process that has imported what they need.

    Each would import PyTorch and the package in 3 s, as it does in programs that tests start.
    """
    from vllm_module.runtime.ranks import processes

    def context(_: str) -> BaseContext:
        return multiprocessing.get_context("forkserver")

    multiprocessing.set_forkserver_preload(["vllm_module.runtime.ranks.worker"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "multiprocessing", SimpleNamespace(get_context=context))
        yield
    forkserver._forkserver._stop()


# Programs that tests start import PyTorch for most of their time: they are forks of one that has.
TORCH = """
import json, os, sys, traceback
import torch

for line in sys.stdin:
    program = json.loads(line)
    if not (pid := os.fork()):
        code = 1
        try:
            for number, name in (1, "out"), (2, "err"):
                os.dup2(os.open(program[name], os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
            os.environ.clear()
            os.environ.update(program["environment"])
            sys.path.insert(0, program["folder"])
            sys.argv = ["program", *program["arguments"]]
            exec(compile(program["code"], "<program>", "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as error:
            code = error.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def run_with_torch(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Return the function that runs code in a process that has imported PyTorch, and nothing else.

    Its arguments are the code and the program's arguments, a folder of modules, and the environment
    instead of this one's. It is the fork of a process, and ends as a fork does.
    """
    folder = tmp_path_factory.mktemp("programs")
    command = [sys.executable, "-c", TORCH]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as parent:

        def run(
            code: str,
            *arguments: str,
            modules: Path = folder,
            environment: Mapping[str, str] | None = None,
        ) -> subprocess.CompletedProcess[str]:
            assert parent.stdin is not None
            assert parent.stdout is not None
            program = {
                "code": code,
                "arguments": arguments,
                "out": str(folder / "out"),
                "err": str(folder / "err"),
                "folder": str(modules),
                "environment": dict(os.environ if environment is None else environment),
            }
            print(json.dumps(program), file=parent.stdin, flush=True)
            ended, _, _ = select.select([parent.stdout], [], [], 600.0)  # no test depends on it
            assert ended, "the program does not end"
            status = int(parent.stdout.readline())
            out, err = ((folder / name).read_text() for name in ("out", "err"))
            return subprocess.CompletedProcess(code, status, out, err)

        try:
            yield run
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


@pytest.fixture(autouse=True, scope="module")
def _few_objects_to_look_at() -> Iterator[None]:
    """Leave out of later garbage collections what the tests of a file have imported and cached.

    A test that collects would look at it for a quarter of a second.
    """
    yield
    if len(gc.get_objects(generation=2)) > 100_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _no_process_group() -> Iterator[None]:
    """Fail where the tests of a file leave a process group to those of the next."""
    yield
    assert not dist.is_initialized(), "destroy the process group, or close the engine that has it"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # for fixtures that several tests share


@pytest.fixture(autouse=True)
def _seeded_torch() -> None:
    torch.manual_seed(0)  # again: this test may have built them or not
