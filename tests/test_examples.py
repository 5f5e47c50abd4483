"""Each example runs from a clean checkout and prints what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PRINTS = {
    "own_model": r"generated \[(\d+, ){7}\d+\]",
    "online_fp8": r"layers\.0\.mlp\.gate_up_proj\.weight +torch\.float8_e4m3fn",
    "from_trainer": r"before (\[.*\])\nafter  (?!\1)\[",
    "fsdp_to_engine": "\n".join(
        rf"step {step} {kind} \[.*\] equals a load: True"
        for step in range(2)
        for kind in ("bfloat16", "fp8")
    ),
    "policy_and_reference": r"0 is 0\.000 away\n.*-0 is (?!0\.000).*\n.*\nthe reference is 0: True",
    "from_engine": r"^([0-9a-f]{32} \[.*\])\n\1$",
    "own_source": r"one rank read 1\.00 .*\ntwo ranks read 1\.01 ",
}


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_runs(name: str) -> None:
    """The example ends without an error or warning, and shows what its text promises."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTS[name], done.stdout), done.stdout


def test_every_example_is_listed_and_run() -> None:
    """The folder's README has a line for each example, and so has the table above."""
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"small_checkpoint"}
    listed = re.findall(r"`python examples/(\w+)\.py`", (EXAMPLES / "README.md").read_text())
    assert names == set(listed) == set(PRINTS)
