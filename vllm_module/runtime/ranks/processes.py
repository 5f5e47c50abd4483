"""Child processes that all end when one of them or this process ends, and share its cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from vllm_module.errors import RankError
from vllm_module.runtime.ranks.guard import Guard

_ANSWER = 1.0  # seconds in which a process that is not stopped answers
_GRACE = 0.1  # seconds in which other processes end for the same reason
_TIMEOUT = 30.0  # seconds in which a busy machine removes killed processes

# The sizes of engines that started ranks, and torch's number of threads before the first of them.
_sharing: list[int] = []
_cores = [0]


class Processes:
    """Ranks 1 to ``count``, which call ``work(rank, *arguments)``.

    They end when this process does, however it ends, and ignore Ctrl-C.

    Args:
        count, work, arguments: as above; ``arguments`` are pickled.
        release: function called in another thread when all have ended, unless :meth:`end` ended
            them.

    Attributes:
        ended: event that is set when all processes have ended.
        codes: exit codes, by rank, of those that ended by themselves; ``-n`` for signal ``n``.

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
        self._guard: Guard | None = None
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

    def name(self, rank: int) -> str:
        """Return a rank's number with its process id."""
        return f"rank {rank} (pid {self._processes[rank].pid})"

    def hanging(self) -> dict[int, str]:
        """Return the ranks that others wait for, with a description of their state.

        Those are the ranks that do not answer; if all answer, those that wait for no other rank.
        """
        answers: dict[int, tuple[bool, str]] = {}
        end = time.monotonic() + _ANSWER
        for rank, working in self._connections.items():
            with suppress(OSError, EOFError):
                working.send(None)
                if working.poll(max(0.0, end - time.monotonic())):
                    answers[rank] = working.recv()
        return waited_for(self._connections, answers)

    def describe(self, rank: int) -> str:
        """Return a description of how ``rank``, one of ``codes``, ended."""
        code, name = self.codes[rank], self.name(rank)
        if code >= 0:
            return f"{name} ended with exit code {code}"
        hint = ", as happens where memory runs out" if code == -signal.SIGKILL else ""
        return f"{name} was killed by signal {-code}{hint}"

    def end(self) -> None:
        """Kill all processes."""
        if not self.ended.is_set():
            with suppress(OSError):  # closed by an earlier call
                self._ask.send(None)
            self.ended.wait(_TIMEOUT)
        for each in (*self._connections.values(), self._ask, self._asked):
            each.close()

    def _wait(self, rank: int, working: connection.Connection[Any, Any]) -> None:
        """Wait until ``rank`` has imported its modules."""
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
        """Start and watch the processes, in a thread, because Ctrl-C does not interrupt threads."""
        # Before Python 3.12, this unblocks the signals blocked below.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the processes
        try:
            self._guard = Guard()
            for rank in range(1, count + 1):
                self._connections[rank], theirs = context.Pipe()
                process = context.Process(
                    target=_main, args=(theirs, work, (rank, *arguments)), daemon=True
                )
                with theirs:
                    process.start()
                self._processes[rank] = process
                assert process.pid is not None
                self._guard.add(process.pid)
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
        if self._guard is not None:
            self._guard.end()
        if not asked:
            self._release()
        self.ended.set()


def position(thread: int) -> tuple[bool, str]:
    """Return whether a thread of this process waits for other ranks, and its line."""
    stack = traceback.extract_stack(sys._current_frames()[thread])
    waits = any("distributed" in os.path.dirname(frame.filename) for frame in stack)
    place = stack[-1]
    return waits, f"it is at {place.filename}:{place.lineno} in {place.name}"


def waited_for(ranks: Iterable[int], answers: dict[int, tuple[bool, str]]) -> dict[int, str]:
    """Return the ranks that others wait for and their state, by what :func:`position` answered."""
    if silent := set(ranks) - answers.keys():
        return dict.fromkeys(sorted(silent), "the process is stopped, or busy outside Python")
    busy = {rank: place for rank, (waits, place) in answers.items() if not waits}
    return busy or {rank: place for rank, (_, place) in answers.items()}


def share_cores(size: int) -> int:
    """Count an engine that starts ``size`` ranks, and return the number of threads of each.

    The ranks of a host share its cores. This process has the threads of the largest engine, and
    after the last one as many as before.
    """
    if not _sharing:
        _cores[0] = torch.get_num_threads()
    _sharing.append(size)
    torch.set_num_threads(max(1, _cores[0] // max(_sharing)))
    return max(1, _cores[0] // size)


def end_sharing(size: int) -> None:
    """Undo :func:`share_cores`."""
    _sharing.remove(size)
    torch.set_num_threads(max(1, _cores[0] // max(_sharing, default=1)))


def _main(
    here: connection.Connection[Any, Any], work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Call ``work`` in a started process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        here.send(None)
    except OSError:
        os._exit(0)  # the parent has ended
    threading.Thread(target=_answer, args=(here,), daemon=True).start()
    code = 0
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # exit at once: other ranks wait until this one's connections close


def _answer(here: connection.Connection[Any, Any]) -> None:
    """Send the parent the main thread's position when it asks; exit when it has ended."""
    main = threading.main_thread().ident
    assert main is not None
    with suppress(OSError, EOFError):
        while True:
            here.recv()
            here.send(position(main))
    os._exit(0)
