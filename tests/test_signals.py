"""The suite runs where signals are ignored, as in the background of a shell and by nohup."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
CONFTEST = HERE / "conftest.py"
OF_SIGNALS = (
    "test_waiting.py::test_an_interrupt_is_raised_after_a_short_block",
    "cli/test_terminal.py::test_a_signal_leaves_no_temporary_folder",
    "weights/stores/test_waits.py::test_an_interrupt_ends_a_request_of_another_thread",
)
IGNORED = signal.SIGINT, signal.SIGHUP
CHECK = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"


def where_it_is_ignored(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python, started as by ``nohup ... &``."""
    return subprocess.run(
        [sys.executable, *arguments],
        preexec_fn=lambda: [signal.signal(each, signal.SIG_IGN) for each in IGNORED],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_tests_can_be_interrupted_where_they_are_ignored(
    run_with_torch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """The tests' conftest.py lets them, and programs that they start, take an interrupt."""
    assert "AssertionError" in where_it_is_ignored("-c", CHECK).stderr
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHECK!r}], check=True)"
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    prepared = f"import runpy; runpy.run_path({str(CONFTEST)!r})"
    done = run_with_torch("\n".join([ignored, prepared, CHECK, start]))
    assert (done.returncode, done.stderr) == (0, "")


def test_tests_of_signals_pass_where_they_are_ignored() -> None:
    """Tests that send real ones, to themselves, to a thread and to a program that they start."""
    tests = [str(HERE / each) for each in OF_SIGNALS]
    done = where_it_is_ignored("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
