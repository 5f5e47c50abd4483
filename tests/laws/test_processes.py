"""The law of sharding over real processes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("under_torchrun.py")
SUBJECTS = runpy.run_path(str(SCRIPT.with_name("subjects.py")))
torchrun = runpy.run_path(str(SCRIPT.parents[1] / "support.py"))["torchrun"]


@pytest.mark.parametrize("size", [2, 3])
def test_processes_keep_the_law_of_sharding(tmp_path: Path, size: int) -> None:
    """Layers sharded over gloo processes compute what one rank does; three load together, too."""
    torchrun(size, SCRIPT, tmp_path)
    expected = {name for name in SUBJECTS["SUBJECTS"] if not SUBJECTS["large"](name)}
    if size == 3:
        expected = {"attention", "experts", "layouts"}
        expected |= {f"{name}, loaded together" for name in expected}
    for rank in range(size):
        tried = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert tried.keys() == expected
        assert min(tried.values()) >= 4  # as many as are asked for
        assert sum(tried.values()) > (80 if size == 2 else 20)


def test_processes_that_break_the_law_all_say_so(tmp_path: Path) -> None:
    """A fault of the ranks is found, shrunk and reported by all of them in step."""
    (tmp_path / "fault").write_text("the rank is always 0")
    with pytest.raises(AssertionError, match="weight over 2 ranks, put together") as failed:
        torchrun(2, SCRIPT, tmp_path)
    for rank in range(2):
        assert f"[rank{rank}]: AssertionError" in str(failed.value)
