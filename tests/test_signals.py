"""The suite runs where SIGINT is ignored, as in the background of a shell."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).with_name("conftest.py")
CHECK = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"


def where_it_is_ignored(program: str) -> str:
    """Run a program that starts with SIGINT ignored, and return how it failed."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert bool(done.returncode) == bool(done.stderr), done
    return done.stderr


def test_tests_can_be_interrupted_where_they_are_ignored() -> None:
    """The tests' conftest.py lets them, and programs that they start, take an interrupt."""
    assert "AssertionError" in where_it_is_ignored(CHECK)
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHECK!r}], check=True)"
    prepared = f"import runpy; runpy.run_path({str(CONFTEST)!r})"
    assert where_it_is_ignored("\n".join([prepared, CHECK, start])) == ""
