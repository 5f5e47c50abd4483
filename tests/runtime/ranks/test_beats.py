"""Ranks of a launcher that say in a store that they are there: who falls silent is noticed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from vllm_module.base.waiting import WaitLimitError, at_most, until
from vllm_module.runtime.ranks import beats
from vllm_module.runtime.ranks.beats import Beats

LIMIT = 1.0


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Beats]]:
    """Return what starts one of three ranks; their store is that of the test."""
    monkeypatch.setattr(beats, "BEAT", 0.1)
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started: list[Beats] = []

    def one(rank: int) -> Beats:
        started.append(Beats(store, rank, 3, LIMIT))
        return started[-1]

    yield one
    for each in started:
        each.end()


def lost_within(follower: Beats, seconds: float) -> str:
    end = time.monotonic() + seconds
    while not (found := follower.lost()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def test_rank_0_falls_silent(start: Callable[[int], Beats]) -> None:
    """It is given up after the limit, which ends a wait for its next message."""
    first, follower = start(0), start(1)
    assert lost_within(follower, 2.5 * LIMIT) == ""
    first.end()
    begin = time.monotonic()
    with (
        pytest.raises(WaitLimitError, match="nothing was heard of it for 1 s"),
        at_most(60, lost=follower.lost),
    ):
        until(lambda: False)
    assert time.monotonic() - begin > LIMIT / 2


def test_time_in_which_this_process_was_stopped_does_not_count(
    start: Callable[[int], Beats],
) -> None:
    first, follower = start(0), start(1)
    assert lost_within(follower, 0.5) == ""
    first.end()
    time.sleep(0.3)
    follower.lost()
    time.sleep(1.5 * LIMIT)  # as if it was stopped: nothing asks meanwhile
    assert follower.lost() == ""
    assert lost_within(follower, 10) != ""


def test_ranks_that_are_silent_are_told_from_those_that_wait(start: Callable[[int], Beats]) -> None:
    first, second, _ = start(0), start(1), start(2)
    time.sleep(0.3)
    second.end()
    time.sleep(0.3)
    assert first.suspects() == [1]


def test_a_store_that_ends_says_nothing_of_rank_0(start: Callable[[int], Beats]) -> None:
    """Then connections tell what has happened, and a rank that has an orderly end is not blamed."""
    follower = start(1)
    time.sleep(0.3)  # it has connected to the store

    class Ended:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("the connection is closed")

    follower._store = Ended()
    time.sleep(0.3)
    assert lost_within(follower, 2 * LIMIT) == ""
    assert follower.suspects() == [0]  # where connections do not tell: it was on that host
