"""The suite runs where SIGINT is ignored, as in the background of a shell."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
INTERRUPTED = "tests/cli/test_terminal.py::test_a_signal_in_the_middle_of_a_command[interrupt]"


def test_tests_of_interrupts_pass_where_they_are_ignored() -> None:
    """A test that interrupts a program passes where the suite was started with SIGINT ignored."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", INTERRUPTED],
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
