"""The messages of one peer in a process group, over its CPU backend."""

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
    """Another rank of the group, the messages from it, and the state of its connection.

    The first byte of a message is its kind: ``+`` is the first of two that each rank sends, ``.``
    the second and last one, and ``!`` is any other. A wait of gloo's cannot be interrupted, and one
    that times out closes this rank's connections to *all* others. So threads wait without a limit,
    and the caller has the timeout.

    Args:
        hear: is given each message, in the thread that receives; at the end ``None``, if the
            connection is closed. ``changed`` is held.

    Attributes:
        heard: how many of the two messages have come.
        leaves: the peer reads no more. The caller sets it, too.
        gone: the connection is closed, and every message that arrived has been read.

    """

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup | None,
        tag: int,
        changed: threading.Condition,
        hear: Callable[[Peer, bytes | None], None],
    ) -> None:
        self.rank = rank
        self.heard = 0
        self.leaves = self.gone = False
        self._group, self._tag, self._changed, self._hear = group, tag, changed, hear
        self.listening = True
        self.telling = 0
        self._told = False
        # Two receives are posted at any time, until a message is the last but one: gloo loses
        # messages of a peer that leaves before they are awaited.
        frames = []
        with suppress(RuntimeError, ValueError):
            frames += [self._ask(_FRAME, 0)]
            frames += [self._ask(_FRAME, 0)]
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
            if not is_open:
                self.leaves = self.gone = True
                self._hear(self, None)
            self._changed.notify_all()

    def _take(self, frames: list[tuple[bytearray, dist.Work]]) -> None:
        kind = b""
        while kind != b".":
            frame, arrival = frames[0]
            arrival.wait(_FOREVER)
            nbytes = int.from_bytes(frame[:8], "little")
            message = bytes(frame[8 : 8 + nbytes])
            if len(message) < nbytes:
                rest, arrival = self._ask(nbytes - len(message), 1)
                arrival.wait(_FOREVER)
                message += rest
            kind = message[:1]
            del frames[0]
            if kind == b"!":
                with suppress(RuntimeError, ValueError):  # the peer has closed it since
                    frames.append(self._ask(_FRAME, 0))
            with self._changed:
                self.heard += kind != b"!"
                self.leaves = self.leaves or (kind == b"." and message != kind)
                self._hear(self, message)
                self._changed.notify_all()

    def tell(self, frame: torch.Tensor) -> None:
        """Send a message without waiting for it to go out; after the last one, do nothing."""
        sent = []
        with self._changed:
            if self._told:
                return
            self._told = bool(frame[8] == ord("."))
            with suppress(RuntimeError, ValueError):  # if closed, the receiving thread finds out
                for tag, part in ((0, frame[:_FRAME]), (1, frame[_FRAME:])):
                    if len(part):
                        to = {"group_dst": self.rank, "tag": self._tag + tag}
                        sent.append((part, dist.isend(part, group=self._group, **to)))
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


def end_threads(peers: list[Peer], changed: threading.Condition, seconds: float) -> None:
    """Wait for threads: one that returns from gloo at interpreter exit aborts the process.

    ``peers`` must not contain gone ones: some of gloo's sends to them never return.
    """
    with changed:
        changed.wait_for(lambda: not any(p.listening or p.telling for p in peers), seconds)
