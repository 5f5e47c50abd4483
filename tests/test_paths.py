"""How many functions of ours a call passes through; a change may lower these, not raise them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = {"load": (11, 6), "build": (109, 30), "generate": (167, 50)}  # functions, files


def test_the_ways_are_no_longer_than_they_were(
    run_with_torch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """``tests/bench/paths.py`` counts them; the notes in ``design/`` quote what it prints."""
    script = str(ROOT / "tests/bench/paths.py")
    done = run_with_torch(f"import runpy; runpy.run_path({script!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^(\w+): (\d+) functions in (\d+) files$", done.stdout, re.MULTILINE)
    counted = {name: (int(functions), int(files)) for name, functions, files in lines}
    assert counted.keys() == MOST.keys()
    for name, (functions, files) in counted.items():
        assert functions <= MOST[name][0], f"{name}: {functions} functions"
        assert files <= MOST[name][1], f"{name}: {files} files"
