"""Waiting for other processes, with limits, and ended at once by an interrupt.

torch's own waits return to Python only when they are over, and Python runs signal handlers only
there. A limit counts time spent in the wait, and not time in which this process was stopped.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")

SLICE = 0.1  # seconds between two checks for signals during a wait
SILENCE = 10.0  # seconds of a wait after which the log names the processes that are waited for
_SLICE_DELTA = timedelta(seconds=SLICE)
_limit: ContextVar[_Limit | None] = ContextVar("limit", default=None)


@dataclass
class _Limit:
    seconds: float
    notice: Callable[[], object] | None
    lost: Callable[[], str] | None


class WaitLimitError(RuntimeError):
    """A wait for another process lasted longer than :func:`at_most` allows."""


@contextmanager
def at_most(
    seconds: float,
    notice: Callable[[], object] | None = None,
    lost: Callable[[], str] | None = None,
) -> Iterator[None]:
    """Limit each wait in the block: a longer one raises :class:`WaitLimitError`.

    ``notice`` is called once if a wait lasts longer than ``SILENCE``. ``lost`` is called often; a
    wait raises the same error with what it returns, unless that is ``""``.
    """
    token = _limit.set(_Limit(seconds, notice, lost))
    try:
        yield
    finally:
        _limit.reset(token)


def finish(work: Any) -> None:
    """Wait for a collective on CPU tensors that was started with ``async_op=True``.

    Raises the exceptions of the collective.
    """
    waited = 0.0
    while not work.is_completed():
        _check(waited)
        # A slice that times out raises too. An error of the collective is raised below.
        with suppress(RuntimeError):
            work.wait(_SLICE_DELTA)
        waited += SLICE
    work.wait()


def interruptibly(
    call: Callable[[], T],
    ended: threading.Event | None = None,
    lost: Callable[[], str] | None = None,
) -> T:
    """Return ``call()``, run in another thread, because it may wait outside of Python.

    After an interrupt, the limit or the event ``ended``, that thread is left running: end its wait
    yourself. The event raises :class:`WaitLimitError`. ``lost`` is called after each ``SLICE``, and
    what it returns is raised as the same error, unless that is ``""``.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=copy_context().run, args=(run,), name="waiting", daemon=True).start()
    waited = 0.0
    while not done.wait(SLICE):
        waited += SLICE
        _check(waited)
        if ended is not None and ended.is_set():
            raise WaitLimitError("what was waited for was given up")
        if lost is not None and (problem := lost()):
            raise WaitLimitError(problem)
    if errors:
        raise errors.pop()  # else the error would hold itself, by the frames that it has
    return results[0]


def taken(items: queue.SimpleQueue[T]) -> T:
    """Return the next item of a queue, after waiting for it; an exception among them is raised."""
    waited = 0.0
    while True:
        try:
            item = items.get(timeout=SLICE)
        except queue.Empty:
            waited += SLICE
            _check(waited)
            continue
        if isinstance(item, BaseException):
            raise item
        return item


def until(holds: Callable[[], bool]) -> None:
    """Call ``holds`` repeatedly until it is true; use it for waits of a few milliseconds."""
    waited, last = 0.0, time.monotonic()
    while not holds():
        now = time.monotonic()
        waited, last = waited + min(now - last, SLICE), now
        _check(waited)
        time.sleep(0)  # let other threads run


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Finish the block even if Ctrl-C comes, and handle that afterwards. Keep the block short.

    While an interrupt is already being handled, another one changes nothing.
    """
    is_handled = isinstance(sys.exc_info()[1], KeyboardInterrupt)
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler):  # Ctrl-C does not interrupt this thread
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came and not is_handled:
            handler(*came[0])


@contextmanager
def left_to_launcher() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM in the block, where rank 0 is on this host and gets them, too.

    A launcher sends them to all ranks of a host. Rank 0 may finish requests before it ends the
    others, and cannot without them.
    """
    is_main = threading.current_thread() is threading.main_thread()
    beside = os.environ.get("GROUP_RANK") == "0" and os.environ.get("RANK", "0") != "0"
    if not (is_main and beside):
        yield
        return
    numbers = signal.SIGINT, signal.SIGTERM
    handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def _check(waited: float) -> None:
    if (limit := _limit.get()) is None:
        return
    if waited >= limit.seconds:
        raise WaitLimitError(f"no answer for {limit.seconds:g} s")
    if limit.lost is not None and (problem := limit.lost()):
        raise WaitLimitError(problem)
    if limit.notice is not None and waited >= SILENCE:
        notice, limit.notice = limit.notice, None
        notice()
