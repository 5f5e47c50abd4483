"""A process whose results are read line by line, and which is killed when its time is over."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO

Result = dict[str, Any]

OVER = "killed at its limit:"  # what the reason begins with where time was over

_running: set[Process] = set()


class Process(Protocol):
    """What of ``subprocess.Popen`` is needed; its children are in its process group."""

    pid: int
    stdout: TextIO | None

    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def new_process(command: Sequence[str], environment: Mapping[str, str] | None) -> Process:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def run_child(
    command: Sequence[str],
    seconds: float,
    on_result: Callable[[Result], None],
    *,
    silence: float = float("inf"),
    environment: Mapping[str, str] | None = None,
    now: Callable[[], float] = time.monotonic,
    start: Callable[[Sequence[str], Mapping[str, str] | None], Process] = new_process,
) -> str:
    """Run a command, and call ``on_result`` with each line of JSON as soon as it prints it.

    Args:
        command: what to run, in a process group of its own.
        seconds: after which the process and its children are killed.
        on_result: called in this thread.
        silence: seconds between two lines after which they are killed, too.
        environment: of the process.
        now: the clock.
        start: starts the process.

    Returns:
        Why it did not end well, or an empty string.

    """
    end = now() + seconds
    process = start(command, environment)
    _running.add(process)
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    try:
        while True:
            left = max(0.0, end - now())
            try:
                line = lines.get(timeout=min(left, silence))
            except queue.Empty:
                if silence < left:
                    return f"killed: it was silent for {silence:.0f} s"
                return f"{OVER} its {seconds:.0f} s were over"
            if line is None:
                break
            result = _parsed(line)
            if result is None:
                print(line, end="", file=sys.stderr)
            else:
                on_result(result)
        try:
            status = process.wait(max(0.1, end - now()))
        except subprocess.TimeoutExpired:
            return f"{OVER} its {seconds:.0f} s were over"
        return "" if status == 0 else f"it ended with status {status}"
    finally:
        _kill(process)
        reader.join(1)  # a process that left the group may hold the pipe


def kill_all() -> None:
    """Kill every process that is still running, with its children."""
    for process in list(_running):
        _kill(process)


def _read(process: Process, lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _parsed(line: str) -> Result | None:
    """Return the object of a line, or nothing for what a library printed."""
    if line.startswith("{"):
        with contextlib.suppress(json.JSONDecodeError):
            found: Result = json.loads(line)
            return found
    return None


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # one that has no group of its own yet
    process.wait()
    _running.discard(process)
