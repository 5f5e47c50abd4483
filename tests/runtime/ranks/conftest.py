"""The ranks of an engine: those that tests share, and those that a test ends."""

from __future__ import annotations

import multiprocessing
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_module.runtime.ranks import processes
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.testing import write_checkpoint

# Pytest's importlib mode has no imports between test files.
RANKS: Any = runpy.run_path(str(Path(__file__).with_name("running.py")))
CONFIG, weights, close_all = (RANKS[name] for name in ("CONFIG", "weights", "close_all"))
started = RANKS["started"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("executor") / "checkpoint", weights(0), config=CONFIG.to_dict()
    )


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Executor]]:
    """The engine with worker processes, if there is one: a process can have only one."""
    engines: list[Executor] = []
    yield engines
    close_all(engines)


@pytest.fixture
def no_engine(engines: list[Executor]) -> None:
    """Close the engine that another test has left, and with it the process group."""
    close_all(engines)


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks as outside of tests, so that what they print is captured."""
    monkeypatch.setattr(processes, "multiprocessing", multiprocessing)


@pytest.fixture
def shared(engines: list[Executor], folder: Path) -> Executor:
    """Two ranks, for tests that leave them running with the checkpoint's weights."""
    return started(engines, folder, 2)


@pytest.fixture
def ended(
    engines: list[Executor], folder: Path, request: pytest.FixtureRequest
) -> Iterator[Executor]:
    """As many ranks as the test names. The test ends them."""
    yield started(engines, folder, request.param)
    close_all(engines)
