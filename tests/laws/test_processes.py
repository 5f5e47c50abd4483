"""The law of sharding over real processes."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("in_processes.py")
CASES = 4 if os.environ.get("AT_LENGTH") else 2  # of a subject
SUBJECTS = runpy.run_path(str(SCRIPT.with_name("subjects.py")))
SUPPORT = runpy.run_path(str(SCRIPT.parents[1] / "support.py"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold the law on two ranks, on three, and on two with a fault."""

    def run(directory: Path) -> None:
        log = directory / "log"
        assert SUPPORT["run_program"](SCRIPT, directory, CASES, log=log) == 0, log.read_text()

    directory: Path = SUPPORT["fill_once"](tmp_path_factory.getbasetemp(), "law", run)
    return directory


@pytest.mark.parametrize(("run", "size"), [("two", 2), ("three", 3)])
def test_processes_keep_the_law_of_sharding(directory: Path, run: str, size: int) -> None:
    """Layers sharded over gloo processes compute what one rank does; three load together, too."""
    for path in (directory / run).glob("*.failed"):
        pytest.fail(path.read_text())
    expected = {name for name in SUBJECTS["SUBJECTS"] if not SUBJECTS["large"](name)}
    if size == 3:
        expected = {"attention", "experts", "layouts"}
        expected |= {f"{name}, loaded together" for name in expected}
    for rank in range(size):
        tried = json.loads((directory / run / f"rank{rank}.json").read_text())
        assert tried.keys() == expected
        assert min(tried.values()) >= CASES


def test_processes_that_break_the_law_all_say_so(directory: Path) -> None:
    """A fault of the ranks is found, shrunk and reported by all of them in step."""
    for rank in range(2):
        failed = (directory / "faulty" / f"rank{rank}.failed").read_text()
        assert "AssertionError: " in failed
        assert "weight over 2 ranks, put together" in failed
