"""How many functions of ours a call passes through; a change may lower these, not raise them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = {"load": (11, 6), "build": (109, 30), "generate": (167, 50)}  # functions, files


def test_the_ways_are_no_longer_than_they_were() -> None:
    """``tests/bench/paths.py`` counts them; the notes in ``design/`` quote what it prints."""
    command = [sys.executable, "-P", str(ROOT / "tests/bench/paths.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    lines = re.findall(r"^(\w+): (\d+) functions in (\d+) files$", done.stdout, re.MULTILINE)
    counted = {name: (int(functions), int(files)) for name, functions, files in lines}
    assert counted.keys() == MOST.keys()
    for name, (functions, files) in counted.items():
        assert functions <= MOST[name][0], f"{name}: {functions} functions"
        assert files <= MOST[name][1], f"{name}: {files} files"
