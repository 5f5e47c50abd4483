"""A ring of buffers through which ranks pass each other the parts they read of batches of bytes.

The ranks of one host share the buffers, in anonymous memory, which the system frees when the last
of them has ended. Between hosts, the process group sends the parts.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from vllm_module.base import waiting
from vllm_module.base.messages import describe_error

_log = logging.getLogger(__name__)

TAGS = range(1 << 18, 1 << 19)  # of messages with parts of batches
_FOREVER = timedelta(days=365)  # a wait of gloo's that times out closes all of its connections
_SHORTEST, _LONGEST = 0.0005, 0.01  # seconds between two looks at other processes' counters
_FAREWELL = 0.3  # seconds for threads to end after a failure


class RingShape(NamedTuple):
    """The memory layout of a ring: counters of every rank, then the buffers."""

    size: int
    buffers: int
    batch_bytes: int

    @property
    def header(self) -> int:
        """Bytes of the counters, in whole OS pages."""
        return -(-3 * 8 * self.size // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def nbytes(self) -> int:
        """Bytes of the whole memory, with its token at the end."""
        return self.header + self.buffers * self.batch_bytes + mmap.PAGESIZE


class Failure(Protocol):
    """Says which other ranks have failed; ``""`` if none has."""

    def __call__(self, hanging: Sequence[int] = (), how: str = "") -> str:
        """Count the ranks that are ``hanging`` among them, and say ``how``."""


class SharedRing:
    """The ring as one rank sees it, open while the block of :meth:`reading` lasts.

    Buffer ``k % buffers`` holds batch ``k``. Every rank takes the batches that it wants, in order.
    A rank's part of a batch is written once the batch before it in that buffer is complete, and all
    ranks that share the memory have released it.

    Args:
        memory: what ``neighbours`` share, this rank included.
        parts: for each batch, where every rank's part begins and ends in the buffer; a rank has the
            same part of every buffer, or the beginning of it.
        failure: says which other ranks have failed.
        timeout: seconds without any progress of any rank after which the ranks that are behind
            count as failed.
        hosts: the neighbours of every host, in the order of their first ranks.
        group: the process group that sends parts between hosts.
        tag: one of ``TAGS``, the same on all ranks. Do not use the tag of an earlier ring of the
            group: a late message for that ring would be taken for this one's.

    """

    def __init__(
        self,
        memory: mmap.mmap,
        shape: RingShape,
        *,
        rank: int,
        hosts: Sequence[Sequence[int]],
        parts: Sequence[Sequence[tuple[int, int]]],
        failure: Failure,
        timeout: float,
        group: dist.ProcessGroup | None = None,
        tag: int = TAGS[0],
    ) -> None:
        self._rank, self._shape, self._parts = rank, shape, parts
        self._group, self._tag = group, tag
        self._failure, self._timeout = failure, timeout
        (self._neighbours,) = [host for host in hosts if rank in host]
        self._others = [host for host in hosts if rank not in host]
        header = memoryview(memory)[: 3 * 8 * shape.size].cast("q")
        # By rank: batches whose part has arrived, batches released, and a count of progress. Each
        # entry has one writer, which writes it after the data it announces.
        self._filled, self._released, self._moved = (
            header[n * shape.size : (n + 1) * shape.size] for n in range(3)
        )
        data = memoryview(memory)[shape.header : shape.header + shape.buffers * shape.batch_bytes]
        self._buffers = torch.frombuffer(data, dtype=torch.uint8).chunk(shape.buffers)
        self._changed = threading.Condition()
        self._sent = 0
        self._closed = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._running = 0

    # Taking

    def take(self, batch: int) -> torch.Tensor:
        """Wait for a batch and return its buffer, which stays as it is until it is released.

        Raises ``RuntimeError`` if another rank failed, and what reading this rank's parts raised.
        """
        with self._changed:
            self._wait(partial(self._is_filled, batch))
        return self._buffers[batch % self._shape.buffers]

    def release(self, following: int | None) -> None:
        """Release the batches before ``following``, which is taken next; ``None``: all."""
        with self._changed:
            self._released[self._rank] = len(self._parts) if following is None else following
            self._changed.notify_all()

    def _is_filled(self, batch: int) -> bool:
        return min(self._filled) > batch

    def _is_free(self, batch: int) -> bool:
        """Return whether all neighbours have released the batch that was in this one's buffer.

        This rank's part of it has been sent to other hosts, too. Neighbours that do not take
        a batch may release it while others still write to it.
        """
        before = batch - self._shape.buffers
        released = all(self._released[each] > before for each in self._neighbours)
        return released and self._is_filled(before) and (not self._others or self._sent > before)

    # Filling

    def start(self, read: Callable[[int, torch.Tensor], None]) -> None:
        """Start the threads that read this rank's parts and carry parts between hosts."""
        works: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(self._fill, (read,))]
        if self._others:
            targets = [host[self._rank % len(host)] for host in self._others]
            works.append((self._send, (targets,)))
            here = self._neighbours
            for owner in (rank for host in self._others for rank in host):
                if here[owner % len(here)] == self._rank:
                    works.append((self._receive, (owner,)))
        self._running = len(works)
        for work, arguments in works:
            name = f"shared ring {work.__name__}"
            thread = threading.Thread(
                target=self._run, args=(work, *arguments), name=name, daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:  # raised at this rank's next wait
            self._error = self._error or error
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _fill(self, read: Callable[[int, torch.Tensor], None]) -> None:
        def fill(batch: int, part: torch.Tensor) -> None:
            read(batch, self._buffers[batch % self._shape.buffers])

        self._for_each_part(self._rank, self._is_free, fill, partial(self._announce, self._rank))

    def _send(self, targets: Sequence[int]) -> None:
        def is_read(batch: int) -> bool:
            return self._filled[self._rank] > batch

        def send(batch: int, part: torch.Tensor) -> None:
            to: dict[str, Any] = {"group": self._group, "tag": self._tag}
            for work in [dist.isend(part, group_dst=target, **to) for target in targets]:
                self._finish(work)

        def count(batches: int) -> None:
            self._sent = batches

        self._for_each_part(self._rank, is_read, send, count)

    def _receive(self, owner: int) -> None:
        def receive(batch: int, part: torch.Tensor) -> None:
            self._finish(dist.irecv(part, group=self._group, group_src=owner, tag=self._tag))

        self._for_each_part(owner, self._is_free, receive, partial(self._announce, owner))

    def _for_each_part(
        self,
        owner: int,
        may: Callable[[int], bool],
        work: Callable[[int, torch.Tensor], None],
        done: Callable[[int], None],
    ) -> None:
        """Do ``work`` with the owner's part of each batch when it ``may``; call ``done``."""
        for batch, parts in enumerate(self._parts):
            begin, end = parts[owner]
            if begin < end:
                with self._changed:
                    self._wait(partial(may, batch))
                    if self._closed:
                        return
                work(batch, self._buffers[batch % self._shape.buffers][begin:end])
            with self._changed:
                done(batch + 1)
                self._changed.notify_all()

    def _announce(self, rank: int, batches: int) -> None:
        self._filled[rank] = batches

    def _finish(self, work: Any) -> None:
        assert work is not None
        try:
            work.wait(_FOREVER)
        except RuntimeError as error:
            # Exactly this type, because ``together`` traces it to the rank that left.
            raise RuntimeError(f"passing weights between hosts: {describe_error(error)}") from error

    def moved(self) -> None:
        """Count progress that no batch shows, so that a slow source is not taken for a hang."""
        self._moved[self._rank] += 1

    # Waiting and the end

    def _wait(self, holds: Callable[[], bool]) -> None:
        """Wait, with the lock, until ``holds()`` or the ring is closed.

        Ranks without any progress for the timeout count as failed. A time in which this process was
        stopped is not counted.
        """
        pause, idle, looked = _SHORTEST, 0.0, 0.0
        seen = None
        while not holds() and not self._closed:
            if self._error is not None:
                raise self._error
            if (now := (*self._filled, *self._released, *self._moved)) != seen:
                seen, idle, pause = now, 0.0, _SHORTEST
            if looked <= 0:
                looked = _LONGEST
                if failure := self._failure():
                    raise RuntimeError(failure)
            before = time.monotonic()
            self._changed.wait(pause)
            waited = min(time.monotonic() - before, pause)
            idle, looked = idle + waited, looked - waited
            pause = min(1.5 * pause, _LONGEST)
            if idle - waited < waiting.SILENCE <= idle < self._timeout:
                named = ", ".join(map(str, self._behind()))
                _log.warning("reading together: waiting for rank %s of %d", named, self._shape.size)
            elif idle >= self._timeout:
                late = f"passed nothing on for {self._timeout:g} s"
                raise RuntimeError(self._failure(self._behind(), late))

    def _behind(self) -> list[int]:
        """Return the other ranks that have read the least or, if all wait, released the least."""
        others = [rank for rank in range(self._shape.size) if rank != self._rank]
        progress = {
            rank: (self._filled[rank], self._released[rank] if rank in self._neighbours else 0)
            for rank in others
        }
        return [rank for rank in others if progress[rank] == min(progress.values())]

    @contextmanager
    def reading(self, read: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
        """Let ``read(batch, buffer)`` fill this rank's parts while the block takes batches.

        At its end, wait until the other ranks have what they need of this one. Raises as
        :meth:`take` does. After an error, threads end when they are not in the system.
        """
        try:
            self.start(read)
            yield
            self.release(None)
            with self._changed:
                self._wait(lambda: not self._running)
                if self._error is not None:
                    raise self._error
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            end = time.monotonic() + _FAREWELL
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))
            # The memory is freed now, and not when Python collects an error's frames. A thread that
            # is still in the system fails when it returns.
            del self._buffers, self._filled, self._released, self._moved
