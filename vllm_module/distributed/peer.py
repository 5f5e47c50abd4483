"""The messages of one peer in a process group, over its CPU backend: two to it, and two from it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_FRAME = 4096  # bytes of a message that gloo receives while this rank works
_FOREVER = timedelta(days=365)  # timeout of a thread's wait: only the caller's timeout counts


def framed(message: bytes) -> torch.Tensor:
    """Return a message with its length in front, uint8; the same memory is sent to all peers."""
    frame = bytearray(max(_FRAME, 8 + len(message)))
    frame[:8] = len(message).to_bytes(8, "little")
    frame[8 : 8 + len(message)] = message
    return torch.frombuffer(frame, dtype=torch.uint8)


class Peer:
    """Another rank of the group, the messages received from it, and the state of its connection.

    It sends two messages: the outcome of its work, and the ranks that failed. A wait of gloo's
    cannot be interrupted, and one that times out closes this rank's connections to *all* others. So
    threads wait without a limit, and the caller has the timeout. ``gone`` is set when the
    connection is closed and every message that arrived has been read.
    """

    def __init__(
        self, rank: int, group: dist.ProcessGroup | None, tag: int, changed: threading.Condition
    ) -> None:
        self.rank = rank
        self.received: list[bytes] = []
        self.gone = False
        self._group, self._tag, self._changed = group, tag, changed
        self.listening = False
        self.telling = 0
        self._told = 0
        # Both receives are posted now: gloo loses messages of a peer that leaves before they are
        # awaited.
        try:
            frames = [self._ask(_FRAME, number) for number in (0, 1)]
        except (RuntimeError, ValueError):
            self.gone = True
        else:
            self.listening = True
            self._start(self._listen, frames)

    def _try(self, function: Callable[[list[T]], None], works: list[T]) -> bool:
        """Return whether the connection stays open; clear ``works``, which hold locks of gloo."""
        try:
            function(works)
        except Exception:  # the connection is closed, the group was destroyed, or memory is short
            return False
        finally:
            works.clear()
        return True

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        name = f"together with rank {self.rank}"
        threading.Thread(target=function, args=arguments, name=name, daemon=True).start()

    def _ask(self, nbytes: int, tag: int) -> tuple[bytearray, dist.Work]:
        buffer = bytearray(nbytes)
        memory = torch.frombuffer(buffer, dtype=torch.uint8)
        work = dist.irecv(memory, group=self._group, group_src=self.rank, tag=self._tag + tag)
        assert work is not None
        return buffer, work

    def _listen(self, frames: list[tuple[bytearray, dist.Work]]) -> None:
        is_open = self._try(self._take, frames)
        with self._changed:
            self.listening = False
            self.gone = not is_open
            self._changed.notify_all()

    def _take(self, frames: list[tuple[bytearray, dist.Work]]) -> None:
        for number, (frame, arrival) in enumerate(frames):
            arrival.wait(_FOREVER)
            nbytes = int.from_bytes(frame[:8], "little")
            message = bytes(frame[8 : 8 + nbytes])
            if len(message) < nbytes:
                rest, arrival = self._ask(nbytes - len(message), 2 + number)
                arrival.wait(_FOREVER)
                message += rest
            with self._changed:
                self.received.append(message)
                self._changed.notify_all()

    def tell(self, frame: torch.Tensor) -> None:
        """Send a message without waiting for it to go out; after two, do nothing."""
        number, self._told = self._told, self._told + 1
        if number > 1:
            return
        sent = []
        with suppress(RuntimeError, ValueError):  # if it is closed, the receiving thread finds out
            for tag, part in ((number, frame[:_FRAME]), (2 + number, frame[_FRAME:])):
                if len(part):
                    to = {"group_dst": self.rank, "tag": self._tag + tag}
                    sent.append((part, dist.isend(part, group=self._group, **to)))
            with self._changed:
                self.telling += 1
            self._start(self._see_off, sent)

    def _see_off(self, sent: list[tuple[torch.Tensor, dist.Work | None]]) -> None:
        self._try(self._wait, sent)
        with self._changed:
            self.telling -= 1
            self._changed.notify_all()

    def _wait(self, sent: list[tuple[torch.Tensor, dist.Work | None]]) -> None:
        for _memory, departure in sent:
            assert departure is not None
            departure.wait(_FOREVER)

    def leaves(self) -> bool:
        """Return whether the peer reads no more: it is gone, or failed, or knows of a failure."""
        failed = self.received[:1] and self.received[0][:1] == b"-"
        return self.gone or (len(self.received) > 1 and (bool(failed) or self.received[1] != b"{}"))

    def cut_off(self) -> None:
        """Close this rank's connections to all others, by a wait that times out."""
        with suppress(RuntimeError, ValueError):
            self._ask(1, 7)[1].wait(timedelta(milliseconds=1))
