"""A process that runs a script on what strangers send, with limits of time and memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_MOST_TEXT = 1 << 20  # bytes of an answer beyond those of its request

# The scripts' folders are not on the path, where their files would hide modules of other packages.
_RUN = """
import sys
loop, sys.path[:] = sys.argv[1], sys.argv[5:]
sys.argv[1:] = sys.argv[2:5]
exec(compile(open(loop, encoding="utf-8").read(), loop, "exec"))
"""


class LimitError(Exception):
    """A request reached a limit; the message is a verb with what it did."""


class LimitedProcess:
    """Answers requests in another process, which starts with the first one.

    It ends with :meth:`close`, with this object, or with this process. A request that reaches a
    limit, or crashes, ends it too, and the next one starts another. Threads may share it.

    Args:
        script: a file with a function ``answer(request)``, which returns a mapping, and perhaps
            ``prepare(first)``, which is called once. It imports nothing of this package.
        seconds: limit for one answer.
        nbytes: bytes of address space for answers, beyond what the process has once it is prepared.
        first: returns the line of text for ``prepare``, which has no limits.

    """

    def __init__(
        self, script: Path, seconds: float, nbytes: int, first: Callable[[], bytes] = bytes
    ) -> None:
        self._script, self._seconds, self._nbytes, self._first = script, seconds, nbytes, first
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # id of the process that started it, which a fork differs from
        self._end: Callable[[], object] = lambda: None

    def ask(self, request: str) -> dict[str, Any]:
        """Return the answer to a request, which is JSON. Raises :class:`LimitError`."""
        data = request.encode() + b"\n"
        most = _MOST_TEXT + len(data)
        with self._lock:
            if self._owner != os.getpid() or self._process is None:
                data = self._first() + b"\n" + data
                self._start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                # The process has ended, and its exit code is read below.
                with suppress(BrokenPipeError):
                    process.stdin.write(data)
                    process.stdin.flush()
                line = process.stdout.readline(most)
                if not line.endswith(b"\n"):
                    reason = self._why_it_ended(process, len(line) >= most)
                    self._close()
                    raise LimitError(reason)
            except BaseException:  # an interrupt: the next request would read this one's answer
                self._close()
                raise
        answer: dict[str, Any] = json.loads(line)
        if "memory" in answer:
            raise LimitError(self._needs_memory)
        return answer

    def close(self) -> None:
        """End the process, and the request that it answers; a later request starts another."""
        process = self._process
        if process is not None and self._owner == os.getpid():
            process.kill()  # the thread that waits for its answer holds the lock
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._end()
        self._process = None

    def _start(self) -> None:
        self._close()
        loop = Path(__file__).with_name("limited_script.py")
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-X", "utf8", "-c", _RUN, str(loop)),
                *(str(self._script), str(self._seconds), str(self._nbytes)),
                *filter(None, sys.path),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C does not reach a new session
            env={"LANG": "C.UTF-8"}
            | {name: os.environ[name] for name in _KEPT if name in os.environ},
        )
        self._process, self._owner = process, os.getpid()
        self._end = weakref.finalize(self, _end, process, os.getpid())

    def _why_it_ended(self, process: subprocess.Popen[bytes], full: bool) -> str:
        if full:
            return f"writes more than {_MOST_TEXT >> 20} MiB of text besides what it is given"
        try:
            code = process.wait(self._seconds)
        except subprocess.TimeoutExpired:
            code = 0
        if code == -signal.SIGALRM:
            return f"runs longer than {self._seconds:g} s"
        if code == -signal.SIGSEGV:
            return "needs more than the stack: it leads too deep"
        if code == -signal.SIGABRT:  # what compiled code does that gets no memory
            return self._needs_memory
        return f"ended the process that runs it, with exit code {code}"

    @property
    def _needs_memory(self) -> str:
        return f"needs more than {self._nbytes >> 20} MiB of memory"


_KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")


def _end(process: subprocess.Popen[bytes], pid: int) -> None:
    if os.getpid() != pid:
        return  # the process belongs to the parent of a fork
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with suppress(OSError):
            stream.close()
