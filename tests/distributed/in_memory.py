"""A network in memory for :func:`vllm_module.distributed.together`: each rank is a thread.

It has the promises that gloo has: messages of a pair arrive in order, once the receiver has asked
for them; a rank that ends, or leaves, closes its connections to all others.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from vllm_module.distributed import exchange

LIMIT = 300.0  # seconds after which a rank counts as hanging


class Network:
    """``size`` ranks. ``sent`` counts messages, by rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.RLock()
        self.sent: Counter[int] = Counter()
        self.peers: dict[tuple[int, int], MemoryPeer] = {}  # of a rank, for another
        self.early: dict[tuple[int, int], list[bytes]] = defaultdict(list)
        self.closed: set[int] = set()
        self.stopped: set[int] = set()
        self.dies_after: dict[int, int] = {}  # so many messages, by rank
        self.boxes = [queue.SimpleQueue[Any]() for _ in range(size)]
        for rank in range(size):
            threading.Thread(target=self._deliver, args=(rank,), daemon=True).start()

    def _deliver(self, rank: int) -> None:
        while (item := self.boxes[rank].get()) is not None:
            peer, message = item
            while rank in self.stopped:
                time.sleep(0.01)
            if message is None:  # gloo's connections have a thread each
                threading.Thread(target=peer.hear, args=(None,), daemon=True).start()
            else:
                peer.hear(message)

    def close(self, rank: int) -> None:
        with self.lock:
            if rank in self.closed:
                return
            self.closed.add(rank)
            for (here, other), peer in self.peers.items():
                if rank in (here, other):
                    self.boxes[here].put((peer, None))

    def end(self) -> None:
        for box in self.boxes:
            box.put(None)

    def run(
        self, work: Callable[[int], Any], timeout: float, waits_for: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """Return what ranks returned or raised; ``waits_for`` are all ranks by default."""
        found: dict[int, Any] = {}

        def pickled(result: Any) -> tuple[Any, bytes]:
            return result, pickle.dumps(result)

        def run_rank(rank: int) -> None:
            try:
                each = exchange._Exchange((self, rank), rank, self.size, 0)  # type: ignore[arg-type]
                found[rank] = exchange._carry_out(lambda: pickled(work(rank)), timeout, each)
            except BaseException as error:
                found[rank] = error

        end = time.monotonic() + LIMIT
        threads = [threading.Thread(target=run_rank, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.daemon = True
            thread.start()
        for rank in range(self.size) if waits_for is None else waits_for:
            threads[rank].join(max(0, end - time.monotonic()))
        return found


class Killed(BaseException):
    """Ends a thread whose rank has closed its connections."""


class MemoryPeer:
    """As :class:`vllm_module.distributed.peer.Peer`."""

    def __init__(self, rank: int, group: Any, tag: int, changed: Any, hear: Any) -> None:
        self.network, self.here = group
        self.rank, self.heard, self.telling = rank, 0, 0
        self.leaves = self.gone = self.told = False
        self.listening = True
        self._changed, self._hear = changed, hear
        with self.network.lock:
            self.network.peers[self.here, rank] = self
            for message in self.network.early.pop((self.here, rank), []):
                self._put(message)
            other = self.network.peers.get((rank, self.here))
            if other is not None and other.telling:
                self.network.boxes[rank].put((other, b""))
            if rank in self.network.closed:
                self._put(None)

    def _put(self, message: bytes | None) -> None:
        self.network.boxes[self.here].put((self, message))

    def hear(self, message: bytes | None) -> None:
        with self._changed:
            if message == b"":  # what was told has gone out
                self.telling = 0
                self._changed.notify_all()
                return
            if not self.listening:
                return
            if message is None:
                self.listening, self.leaves, self.gone = False, True, True
            else:
                self.heard += message[:1] != b"!"
                self.listening = message[:1] != b"."
                self.leaves = self.leaves or (not self.listening and message != b".")
            self._hear(self, message)
            self._changed.notify_all()

    def tell(self, frame: Any) -> None:
        nbytes = int.from_bytes(bytes(frame[:8].tolist()), "little")
        message = frame[8 : 8 + nbytes].numpy().tobytes()
        while self.here in self.network.stopped:
            time.sleep(0.01)
        with self.network.lock:
            if self.network.sent[self.here] >= self.network.dies_after.get(self.here, 10**6):
                self.network.close(self.here)
                raise Killed
            if self.told or {self.here, self.rank} & self.network.closed:
                return
            self.told = message[:1] == b"."
            self.network.sent[self.here] += 1
            other = self.network.peers.get((self.rank, self.here))
            if other is None:
                self.network.early[self.rank, self.here].append(message)
                self.telling += 1
            else:
                other._put(message)


def in_memory() -> None:
    """Let this process exchange in memory, and by gloo no more."""
    exchange.Peer = MemoryPeer  # type: ignore[misc, assignment]
    exchange.cut_off = lambda ranks, group, tag: group[0].close(group[1])
