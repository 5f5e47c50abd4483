"""Child processes that all end when one of them or this process ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from vllm_module.errors import RankError

_GRACE = 0.1  # seconds in which other processes end for the same reason
_TIMEOUT = 30.0  # seconds in which a busy machine removes processes that were killed


class Processes:
    """Ranks 1 to ``count``, which call ``work(rank, *arguments)``.

    They end within a second of this process, however it ends, and ignore Ctrl-C.

    Args:
        count, work, arguments: as above; ``arguments`` are pickled.
        release: called from another thread when all have ended, unless :meth:`end` ended them.

    Attributes:
        ended: set when all processes have ended.
        codes: exit codes by rank, of those that ended by themselves; ``-n`` for signal ``n``.

    Raises ``RankError`` if one of them ends before it calls ``work``.

    """

    def __init__(
        self,
        count: int,
        work: Callable[..., None],
        arguments: tuple[Any, ...],
        release: Callable[[], None],
    ) -> None:
        self.ended = threading.Event()
        self.codes: dict[int, int] = {}
        self._release = release
        self._processes: dict[int, BaseProcess] = {}
        self._connections: dict[int, connection.Connection[Any, Any]] = {}
        self._started = threading.Event()
        self._failure: BaseException | None = None
        context = multiprocessing.get_context("spawn")
        self._asked, self._ask = context.Pipe(duplex=False)
        start = threading.Thread(
            target=self._run, args=(context, count, work, arguments), name="ranks", daemon=True
        )
        try:
            start.start()
            self._started.wait()
            if self._failure is not None:
                raise self._failure
            for rank, working in self._connections.items():
                self._wait(rank, working)
        except BaseException:
            self.end()
            raise

    def describe(self, rank: int) -> str:
        """Return how ``rank``, one of ``codes``, ended."""
        code, name = self.codes[rank], f"rank {rank} (pid {self._processes[rank].pid})"
        if code >= 0:
            return f"{name} ended with exit code {code}"
        hint = ", as happens where memory runs out" if code == -signal.SIGKILL else ""
        return f"{name} was killed by signal {-code}{hint}"

    def end(self) -> None:
        """Kill all of them."""
        if not self.ended.is_set():
            with suppress(OSError):  # closed by an earlier call
                self._ask.send(None)
            self.ended.wait(_TIMEOUT)
        for each in (*self._connections.values(), self._ask, self._asked):
            each.close()

    def _wait(self, rank: int, working: connection.Connection[Any, Any]) -> None:
        """Wait until ``rank`` has imported what it needs."""
        try:
            working.recv()
        except (EOFError, OSError):
            self.ended.wait(_TIMEOUT)
            how = "; ".join(map(self.describe, self.codes)) or f"rank {rank} ended"
            raise RankError(
                f"{how} before it began: see what it printed. A script must start processes "
                "under if __name__ == '__main__':, because they import the script.",
                self.codes,
            ) from None

    def _run(
        self, context: SpawnContext, count: int, work: Callable[..., None], arguments: Any
    ) -> None:
        """Start the processes and watch them, in a thread, which Ctrl-C does not interrupt."""
        resource_tracker.ensure_running()  # before Python 3.12, it unblocks what is blocked here
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the processes
        try:
            for rank in range(1, count + 1):
                self._connections[rank], theirs = context.Pipe()
                process = context.Process(
                    target=_main, args=(theirs, work, (rank, *arguments)), daemon=True
                )
                with theirs:
                    process.start()
                self._processes[rank] = process
        except BaseException as error:
            self._failure = error
        self._started.set()
        self._watch()

    def _watch(self) -> None:
        """Wait for the first process that ends, then end the others."""
        sentinels = [process.sentinel for process in self._processes.values()]
        connection.wait([*sentinels, self._asked])
        asked = self._asked.poll()
        if not asked:
            time.sleep(_GRACE)
            codes = {rank: process.exitcode for rank, process in self._processes.items()}
            self.codes = {rank: code for rank, code in codes.items() if code is not None}
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        if not asked:
            self._release()
        self.ended.set()


def _main(
    here: connection.Connection[Any, Any], work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Call ``work`` in a process that was started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        here.send(None)
    except OSError:
        os._exit(0)  # the parent has ended
    threading.Thread(target=_end_with_parent, args=(here,), daemon=True).start()
    code = 0
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: other ranks wait until the connections of this one close


def _end_with_parent(here: connection.Connection[Any, Any]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    # A fork of the parent may keep the connection open.
    while not here.poll(0.5) and os.getppid() == parent.pid:
        pass
    os._exit(0)
