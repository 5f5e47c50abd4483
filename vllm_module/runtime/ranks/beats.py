"""Whether ranks of a launcher are there, by a number that each writes into their store."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import torch.distributed as dist

_log = logging.getLogger(__name__)

BEAT = 1.0  # seconds
SILENCE = 30.0  # seconds after which rank 0 is given up
_WORLD = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
_JOINING = b"joining"  # what rank 0 says in place of a number
_TOO_LATE = (
    "it waits for the other ranks in torch.distributed.init_process_group, and they run the model "
    "in the constructor of LLM: call init_process_group before LLM, or give LLM "
    "distributed_executor_backend='external_launcher' or tensor_parallel_size=1"
)


class Beats:
    """Says in a store that this rank is there, and looks whether rank 0 is, in a thread.

    Rank 0 notices in a step that another rank hangs. The others wait for its next message, for
    any time, and no connection tells that its process was stopped, or that the link was cut, or
    that it makes torch's default group, for which it waits for them.

    Args:
        store: one that all ranks have.
        rank, size: this rank, and the number of ranks.
        limit: seconds after which rank 0 is given up.

    """

    def __init__(self, store: Any, rank: int, size: int, limit: float) -> None:
        self._store, self._rank, self._size, self._limit = store, rank, size, limit
        self._heard, self._joins = threading.Event(), threading.Event()
        self._asked, self._silent = time.monotonic(), 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def lost(self) -> str:
        """Return what is wrong with rank 0, ``""`` if nothing is; call it often during a wait.

        Time in which this process was stopped does not count.
        """
        if self._joins.is_set():
            return _TOO_LATE
        now = time.monotonic()
        self._silent = 0.0 if self._heard.is_set() else self._silent + min(now - self._asked, BEAT)
        self._asked = now
        self._heard.clear()
        if self._silent < self._limit:
            return ""
        return f"nothing was heard of it for {self._limit:g} s"

    def suspects(self) -> list[int]:
        """Return the other ranks that say nothing for some beats.

        It is rank 0 if the store says nothing, which is on its host. There may be none: a rank that
        is not silent may hang, too.
        """
        found = [0] if self._rank else []
        if found and self.lost():
            return found

        def look() -> None:
            others = [rank for rank in range(self._size) if rank != self._rank]
            with suppress(RuntimeError):  # the process that has the store has ended
                before = [self._last(rank) for rank in others]
                time.sleep(3 * BEAT)
                after = [self._last(rank) for rank in others]
                pairs = zip(others, before, after, strict=True)
                found[:] = [rank for rank, last, now in pairs if last == now]

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(5 * BEAT)
        return found

    def end(self) -> None:
        """Stop; only a request that is not answered outlasts this."""
        self._stop.set()
        self._thread.join(BEAT)

    def _last(self, rank: int) -> bytes:
        """Return what a rank has said last."""
        key = f"beat {rank}"
        value: bytes = self._store.get(key) if self._store.check([key]) else b""
        return value

    def _run(self) -> None:
        count, last, joining = 0, b"", False
        place = [os.environ.get(name) for name in _WORLD]
        try:
            self._store = self._store.clone()  # a store answers one request after the other
            while not self._stop.is_set():
                count += 1
                self._store.set(f"beat {self._rank}", str(count))
                if self._rank and (now := self._last(0)) != last:
                    last = now
                    self._heard.set()
                    if now == _JOINING:
                        self._joins.set()
                before, joining = joining, not self._rank and _makes_world(place)
                if before and joining:  # it does not just pass
                    _log.error("rank 0 hangs, and the others end: %s", _TOO_LATE)
                    self._store.set("beat 0", _JOINING)
                    return
                self._stop.wait(BEAT)
        except RuntimeError:  # the process that has the store has ended: connections tell
            self._limit = math.inf


def _makes_world(place: list[str | None]) -> bool:
    """Tell whether a thread makes torch's default group of the processes that were launched.

    Torch does not tell. Its function is among those that run, with the address of the launcher's
    variables, whose values were ``place``, and not for a group of one.
    """
    if dist.is_initialized() or [os.environ.get(name) for name in _WORLD] != place:
        return False
    frame: FrameType | None
    for frame in sys._current_frames().values():
        while frame is not None:
            of_torch = frame.f_globals.get("__name__") == dist.distributed_c10d.__name__
            if of_torch and frame.f_code.co_name == dist.init_process_group.__name__:
                given = frame.f_locals
                return given.get("init_method") == "env://" and given.get("world_size") != 1
            frame = frame.f_back
    return False
