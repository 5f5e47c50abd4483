"""Ranks of one host that pass each other parts of batches in buffers that they share."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_module.base import waiting
from vllm_module.distributed.shared_ring import RingShape, SharedRing

MARGIN = 60.0  # seconds that a busy machine may take


def in_two_threads(run: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_buffer_is_not_filled_again_while_a_rank_writes_to_it() -> None:
    """Ranks may release a batch that they do not take before all of it is there."""
    shape, written = RingShape(2, 2, 64), list[tuple[int, int]]()
    shared, again = mmap.mmap(-1, shape.nbytes), threading.Event()
    parts = [[(0, 0), (0, 64)], [(0, 0), (0, 0)], [(0, 64), (0, 0)]]

    def read(rank: int, batch: int, buffer: torch.Tensor) -> None:
        if batch == 0:
            again.wait(0.2)
        else:
            again.set()
        written.append((rank, batch))

    def run(rank: int) -> None:
        among: Any = {"hosts": [[0, 1]], "failure": lambda hanging=(), how="": how}
        ring = SharedRing(shared, shape, rank=rank, parts=parts, timeout=60.0, **among)
        with ring.reading(partial(read, rank)):
            pass  # a rank that takes nothing

    in_two_threads(run)
    assert written == [(1, 0), (0, 2)]


def test_a_buffer_is_not_filled_again_while_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other host gets each batch, however late the network takes its bytes."""
    shape, again, sent = RingShape(2, 1, 64), threading.Event(), list[int]()

    class Late:
        def __init__(self, part: torch.Tensor, **_: Any) -> None:
            self.part = part

        def wait(self, timeout: object) -> None:
            again.wait(0.2)
            sent.append(int(self.part.unique()))

    monkeypatch.setattr(dist, "isend", Late)  # a real network may be too fast to show it
    mine = {"hosts": [[0], [1]], "failure": lambda *_: "", "rank": 0, "timeout": 60.0}
    among: Any = mine | {"parts": [[(0, 64), (0, 0)]] * 2}
    ring = SharedRing(mmap.mmap(-1, shape.nbytes), shape, **among)

    def read(batch: int, buffer: torch.Tensor) -> None:
        buffer.fill_(batch + 1)
        if batch:
            again.set()

    with ring.reading(read):
        for batch in range(2):
            assert int(ring.take(batch).unique()) == batch + 1
            ring.release(batch + 1)
    assert sent == [1, 2]


@pytest.mark.parametrize("says", [True, False])
def test_a_slow_source_is_no_hang(
    says: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that takes longer than the limit is waited for while its reader counts progress.

    Without progress, the log says once who is waited for, long before the limit.
    The reader goes on when rank 0 looks for failures, which is each 0.01 s of its wait, and rank 0
    waits for the reader then.
    """
    monkeypatch.setattr(waiting, "SILENCE", 0.1)  # 10 s, of a limit of 30 minutes
    shape, looks, limit = RingShape(2, 2, 64), 200, 0.3  # 2 s in all
    shared = mmap.mmap(-1, shape.nbytes)
    looked, gone_on, over = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    found: list[Any] = []

    def read(ring: SharedRing, batch: int, buffer: torch.Tensor) -> None:
        for look in range(looks):
            assert looked.acquire(timeout=MARGIN)
            if over.is_set():
                break
            if says and look % 5 == 0:
                ring.moved()
            gone_on.release()
        over.set()
        gone_on.release(looks)
        buffer.fill_(7)

    def failure(rank: int, hanging: Any = (), how: str = "") -> str:
        if rank == 0 and not how and not over.is_set():
            looked.release()
            assert gone_on.acquire(timeout=MARGIN)
        return how and str(hanging)

    def run(rank: int) -> None:
        among: Any = {"hosts": [[0, 1]], "failure": partial(failure, rank)}
        parts = [[(0, 0), (0, 64)]]
        ring = SharedRing(shared, shape, rank=rank, parts=parts, timeout=limit, **among)
        try:
            with ring.reading(partial(read, ring)):
                if rank == 0:
                    found.append(ring.take(0).tolist())
        except RuntimeError as error:
            found.append(str(error))
            over.set()
            looked.release()

    in_two_threads(run)
    if says:
        assert found == [[7] * 64]
        assert caplog.messages == []
    else:
        assert caplog.messages.count("reading together: waiting for rank 1 of 2") == 1
        assert "[1]" in found, "rank 0 has named the rank that is behind"


def test_an_error_of_reading_for_others_is_raised() -> None:
    """Of a rank that takes nothing itself, at the end, when the others wait for its part."""

    def read(batch: int, buffer: torch.Tensor) -> None:
        raise OSError("the disk is gone")

    shape, parts = RingShape(2, 2, 64), [[(0, 0), (0, 64)]]
    shared = mmap.mmap(-1, shape.nbytes)
    among: Any = {"hosts": [[0, 1]], "failure": lambda *_: ""}
    ring = SharedRing(shared, shape, rank=1, parts=parts, timeout=MARGIN, **among)
    with pytest.raises(OSError, match="the disk is gone"), ring.reading(read):
        pass
