"""Waits for other processes end at an interrupt or a limit."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_module.base import waiting
from vllm_module.base.waiting import (
    WaitLimitError,
    at_most,
    finish,
    interruptibly,
    left_to_launcher,
    uninterrupted,
    until,
)


class Collective:
    """Work that is over after some slices, with an error or without."""

    def __init__(self, slices: int, error: Exception | None = None) -> None:
        self.slices, self.error = slices, error

    def is_completed(self) -> bool:
        return self.slices == 0

    def wait(self, _slice: Any = None) -> None:
        if self.slices:
            self.slices -= 1
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise self.error


def test_a_wait_returns_raises_or_reaches_its_limit() -> None:
    """The end of a slice is not an error, the collective's error is raised, and so is the limit."""
    finish(Collective(0))
    with at_most(1):
        finish(Collective(5))
        with pytest.raises(RuntimeError, match="closed by peer"):
            finish(Collective(3, RuntimeError("closed by peer")))
        with pytest.raises(WaitLimitError, match="no answer for 1 s"):
            finish(Collective(50))


def test_a_call_that_waits_elsewhere_is_limited() -> None:
    """Its result and its errors are those of the call; beyond the limit, it is left behind."""
    assert interruptibly(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        interruptibly(lambda: 1 // 0)
    over = threading.Event()
    for wait in (lambda: interruptibly(over.wait), lambda: until(over.is_set)):
        with at_most(0.05), pytest.raises(WaitLimitError, match=r"no answer for 0\.05 s"):
            wait()
    looks = iter(["", "", "lost"])  # of others that fail, for example
    with pytest.raises(WaitLimitError, match="lost"):
        interruptibly(over.wait, lost=lambda: next(looks))
    over.set()
    with at_most(0.05):
        until(over.is_set)


@given(
    times=st.lists(st.sampled_from([0, 1, 5, 31, 32, 33, 64, 9999]), max_size=30),
    limit=st.sampled_from([1, 2, 5, 6, 32, 33, 37, 64, 65, 96, 200]),
)
def test_time_in_which_this_process_was_stopped_is_no_wait(times: list[int], limit: int) -> None:
    """Between two looks at most a slice counts, in parts of 1/256 s, however long they are apart.

    A limit that is reached raises, and so does one that is exceeded.
    """
    now, sliced = [0.0], [min(each, 32) / 256 for each in times]  # exact in binary
    most = limit / 256

    def holds() -> bool:
        if not times[len(seen) :]:
            return True
        now[0] += times[len(seen)] / 256
        seen.append(0)
        return False

    seen: list[int] = []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    reached = [at for at in range(len(times)) if sum(sliced[: at + 1]) >= most]
    with pytest.MonkeyPatch.context() as patch, at_most(most):
        patch.setattr(waiting, "time", clock)  # a test cannot stop its own process, and go on
        patch.setattr(waiting, "SLICE", 32 / 256)
        if reached:
            with pytest.raises(WaitLimitError, match="no answer for"):
                until(holds)
            assert len(seen) == reached[0] + 1
        else:
            until(holds)
            assert len(seen) == len(times)


def test_an_interrupt_is_raised_after_a_short_block() -> None:
    """The block is finished first; other threads need no protection."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    finished = []

    def interrupted() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            finished.append(1)

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            interrupted()  # raises nothing
    finally:
        signal.signal(signal.SIGINT, before)

    def elsewhere() -> None:
        with uninterrupted():
            finished.append(2)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert finished == [1, 1, 2]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_launcher_s_signal_is_left_to_the_first_rank(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank beside it goes on; on another host, and after the block, a rank gets the signal."""
    number, came = signal.Signals[name], []
    before = signal.signal(number, lambda *_: came.append(name))
    try:
        for host, rank, expected in (("0", "1", 0), ("0", "0", 1), ("1", "2", 2)):
            monkeypatch.setenv("GROUP_RANK", host)
            monkeypatch.setenv("RANK", rank)
            with left_to_launcher():
                os.kill(os.getpid(), number)
            assert len(came) == expected
        os.kill(os.getpid(), number)
        assert len(came) == 3
    finally:
        signal.signal(number, before)


def test_a_rank_in_a_thread_follows_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the first rank as well, where Python lets only the main thread handle signals."""
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setenv("RANK", "1")
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]

    def handlers() -> list[Any]:
        with left_to_launcher():
            return [signal.getsignal(number) for number in numbers]

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(handlers).result() == before
