"""Rounds of engines that share experts, here each of a thread, without their models."""

from __future__ import annotations

import runpy
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from vllm_module.config import EngineConfig
from vllm_module.errors import RankError
from vllm_module.runtime.ranks import rounds
from vllm_module.runtime.ranks.rounds import Rounds

SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))


@contextmanager
def three() -> Iterator[tuple[list[Rounds], ThreadPoolExecutor]]:
    """Connect three engines."""
    port = SUPPORT["free_port"]()

    def meet(rank: int) -> Rounds:
        sizes: dict[str, Any] = {"data_parallel_size": 3, "data_parallel_rank": rank}
        return Rounds(EngineConfig(**sizes, data_parallel_rpc_port=port), 60.0)

    with ThreadPoolExecutor(3) as pool:
        each = list(pool.map(meet, range(3)))
        try:
            yield each, pool
        finally:
            for one in each:
                one.close()


def test_engines_that_close_miss_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the first one ends before another hears that the last one has left."""
    send: Any = dist.isend

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return send(*arguments, **options)

    steps = []

    def step(number: int) -> bool:
        steps.append(number)
        return False

    with three() as (each, pool):
        for one in each:
            one.attend(step, lambda: True, lambda: False)
        left = [pool.submit(one.leave) for one in each[:2]]
        SUPPORT["wait_until"](lambda: each[2]._left == {0, 1}, "two have left")
        monkeypatch.setattr(rounds.dist, "isend", slow)
        last = pool.submit(each[2].leave)
        left[0].result()
        each[0].close()
        last.result()
        left[1].result()
    assert not steps


def test_an_engine_with_requests_begins_the_round_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others have begun it; its thread would compute a step without tokens."""
    monkeypatch.setattr(rounds, "_GRACE", 60.0)
    steps = []

    def step(number: int) -> bool:
        steps.append(number)
        return True

    with three() as (each, pool):
        waits = threading.Event()

        def has_requests() -> bool:
            waits.set()
            return True

        each[2].attend(step, lambda: True, has_requests)
        first = pool.submit(each[0].agree, 1, False)
        waits.wait()
        second = pool.submit(each[1].agree, 5, True)
        SUPPORT["wait_until"](lambda: not each[2]._came[1].empty(), "another one begins it")
        time.sleep(0.1)
        assert each[2].agree(3, True) == first.result() == second.result() == (5, False)
    assert not steps


def test_an_engine_that_is_paused_is_waited_for_once() -> None:
    """It has requests and begins no round; the others would wait in each step."""
    waits: list[object] = []
    with three() as (each, pool):
        paused: Any = each[2]
        paused._changed.wait_for = lambda *arguments: waits.append(arguments)

        def step(_: int) -> bool:
            with suppress(RankError):  # at the end
                return bool(paused.agree(0, True) == (2, False))
            return False

        paused.attend(step, lambda: True, lambda: True)
        for _ in range(3):
            found = [pool.submit(one.agree, 2, False) for one in each[:2]]
            assert [one.result() for one in found] == [(2, False)] * 2
        assert len(waits) == 1
