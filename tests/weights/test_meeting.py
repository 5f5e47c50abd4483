"""Processes that meet at an address to send weights; threads stand for them here."""

from __future__ import annotations

import runpy
import socket
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_module.base.waiting import WaitLimitError, at_most, until
from vllm_module.errors import RankError
from vllm_module.weights import init_weight_transfer, receive_weights, send_weights
from vllm_module.weights.meeting import _all_stay

free_port = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))["free_port"]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Return what each call returns or raises, in threads of their own."""
    found: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            found[index] = calls[index]()
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_weights_go_to_those_who_met() -> None:
    """Twice, by a group that no other group of the program knows of."""
    port = free_port()
    sent = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}

    def train() -> None:
        group = init_weight_transfer("127.0.0.1", port, 0, 3)
        for turn in range(2):
            send_weights({name: tensor + turn for name, tensor in sent.items()}, group=group)

    def receive(rank: int) -> list[dict[str, torch.Tensor]]:
        group = init_weight_transfer("127.0.0.1", port, rank, 3)
        assert (group.rank(), group.size()) == (rank, 3)
        rounds = []
        for _ in range(2):
            with receive_weights(src=0, group=group) as weights:
                rounds.append({name: tensor.clone() for name, tensor in weights})
        return rounds

    _, *received = together(train, lambda: receive(1), lambda: receive(2))
    for rounds in received:
        assert isinstance(rounds, list), rounds
        for turn, weights in enumerate(rounds):
            assert weights.keys() == sent.keys()
            assert all(torch.equal(weights[name], sent[name] + turn) for name in sent)
    assert not dist.is_initialized()


def store_at(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False)  # type: ignore[attr-defined]


def until_listens(port: int) -> None:
    """Wait until rank 0 has come."""
    store_at(port).wait(["place/0"])


def test_those_who_do_not_come_are_named() -> None:
    port = free_port()
    with pytest.raises(RankError, match=r"ranks 1, 2 of 3 did not come to .* within 0.2 s") as late:
        init_weight_transfer("127.0.0.1", port, 0, 3, timeout=0.2)
    assert late.value.ranks == (1, 2)
    with pytest.raises(RankError, match=r"rank 0 does not listen at 127.0.0.1:\d+ within 0.5 s"):
        init_weight_transfer("127.0.0.1", free_port(), 1, 2, timeout=0.5)


def test_rank_0_that_hangs_once_all_have_come_is_named() -> None:
    port = free_port()
    store: Any = dist
    hangs = store.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    hangs.set("size", "2")
    hangs.set("place/0", "came")
    with pytest.raises(RankError, match=r"all 2 ranks came to .*, and rank 0 had not let") as late:
        init_weight_transfer("127.0.0.1", port, 1, 2, timeout=0.3)
    assert late.value.ranks == (0,)


def test_what_listens_and_does_not_answer_is_told_from_rank_0() -> None:
    """As rank 0 does if it is stopped: the system takes connections for it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port, begin = silent.getsockname()[1], time.monotonic()
        with pytest.raises(RankError, match=rf"rank 0 at .*:{port} does not answer within 1 s"):
            init_weight_transfer("127.0.0.1", port, 1, 2, timeout=1)
        assert time.monotonic() - begin < 2.5  # it was two seconds after the limit


def test_who_is_one_too_many_is_refused() -> None:
    """Another number of processes, two of one rank, and a second trainer; the group is made."""
    port = free_port()

    def others() -> Any:
        until_listens(port)
        with pytest.raises(ValueError, match=r"expects 3 processes at .*, and another one 2"):
            init_weight_transfer("127.0.0.1", port, 1, 3)
        group = init_weight_transfer("127.0.0.1", port, 1, 2)
        with pytest.raises(ValueError, match=r"another process has come to .* as rank 1"):
            init_weight_transfer("127.0.0.1", port, 1, 2)
        with pytest.raises(OSError, match="rank 0 cannot listen at"):
            init_weight_transfer("127.0.0.1", port, 0, 2)
        return group

    for found in together(lambda: init_weight_transfer("127.0.0.1", port, 0, 2), others):
        assert isinstance(found, dist.ProcessGroup), found


def test_a_process_may_come_again() -> None:
    """One whose time was over, and who comes again, is no other process."""
    port, over = free_port(), threading.Event()

    def again() -> Any:
        try:
            until_listens(port)
            with pytest.raises(RankError, match="rank 2 of 3 did not come"):
                init_weight_transfer("127.0.0.1", port, 1, 3, timeout=0.5)
        finally:
            over.set()
        return init_weight_transfer("127.0.0.1", port, 1, 3)

    def late() -> Any:
        over.wait()
        return init_weight_transfer("127.0.0.1", port, 2, 3)

    calls = [lambda: init_weight_transfer("127.0.0.1", port, 0, 3), again, late]
    for found in together(*calls):
        assert isinstance(found, dist.ProcessGroup), found


def test_who_waits_learns_that_rank_0_gave_up() -> None:
    """At once, and not when its own time is over; though the error of rank 0 is kept."""
    port = free_port()

    def waits() -> Any:
        until_listens(port)
        return init_weight_transfer("127.0.0.1", port, 1, 3, timeout=1000)

    first, second = together(
        lambda: init_weight_transfer("127.0.0.1", port, 0, 3, timeout=3.0), waits
    )
    assert isinstance(first, RankError)
    assert isinstance(second, RankError)
    assert first.ranks == (2,)
    assert "rank 0 at 127.0.0.1" in str(second)
    assert "given up before all had come (not there until then: 2)" in str(second)
    assert second.ranks == (0, 2)


def come(port: int, rank: int, size: int, **options: Any) -> Any:
    """Take part as soon as the one who had this place before is gone."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            return init_weight_transfer("127.0.0.1", port, rank, size, **options)
        except ValueError as error:
            assert "another process has come" in str(error)  # noqa: PT017 - another one ends the loop
        except OSError as error:
            assert "cannot listen" in str(error)  # noqa: PT017 - another one ends the loop
    raise AssertionError(f"rank {rank} of before is still there")


@pytest.mark.parametrize("now", [*product(["own", "", "another"], repeat=3)])
def test_all_are_marked_or_none(now: tuple[str, ...]) -> None:
    """Between two looks at them, any may have left or have been replaced; then all may leave."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs lack it
    words = [f"own {rank}" for rank in range(3)]
    there = [each and f"{each} {rank}" for rank, each in enumerate(now)]
    for rank, word in enumerate(there):
        store.set(f"place/{rank}", word)
    stay = there == words
    assert _all_stay(store, words) == stay
    found = [store.get(f"place/{rank}").decode() for rank in range(3)]
    assert (found == there) == (not stay)
    for rank, word in enumerate(there):
        left = store.compare_set(f"place/{rank}", word, "") == b""
        assert left == (not stay)


def test_who_is_interrupted_is_there_no_more() -> None:
    """Its place is free, and nobody meets a caller that is gone."""
    port, left = free_port(), threading.Event()

    def again() -> Any:
        until_listens(port)
        with at_most(0.2), pytest.raises(WaitLimitError):
            init_weight_transfer("127.0.0.1", port, 1, 3)
        try:
            store = store_at(port)
            with at_most(60):
                until(lambda: not store.get("place/1"))
        finally:
            left.set()
        return come(port, 1, 3)

    def last() -> Any:
        left.wait()
        return come(port, 2, 3)

    for found in together(lambda: come(port, 0, 3), again, last):
        assert isinstance(found, dist.ProcessGroup), found


def test_rank_0_that_is_interrupted_listens_no_more() -> None:
    port = free_port()
    with at_most(0.2), pytest.raises(WaitLimitError):
        init_weight_transfer("127.0.0.1", port, 0, 2)
    with pytest.raises(RankError, match="rank 1 of 2 did not come"):
        come(port, 0, 2, timeout=0.2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": -1}, "rank should be an integer from 0 on, got -1"),
        ({"rank": 2}, "rank should be below the world_size 2, got 2"),
        ({"rank": True}, "rank should be an integer"),
        ({"world_size": 1}, "world_size should be an integer from 2 on, got 1"),
        ({"port": 65536}, "port should be at most 65535, got 65536"),
        ({"port": 0}, "port should be an integer from 1 on, got 0"),
        ({"timeout": float("nan")}, "timeout should be a number of seconds"),
    ],
)
def test_numbers_out_of_range_are_refused(changed: dict[str, Any], message: str) -> None:
    given = {"host": "127.0.0.1", "port": 1, "rank": 0, "world_size": 2, **changed}
    with pytest.raises(ValueError, match=message):
        init_weight_transfer(**given)
