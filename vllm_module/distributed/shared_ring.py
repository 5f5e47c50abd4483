"""A ring of buffers through which ranks pass each other the parts they read of batches of bytes.

The ranks of one host share the buffers, in anonymous memory, which the system frees when the last
of them has ended. Between hosts, the process group sends the parts.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vllm_module.base import waiting
from vllm_module.base.messages import describe_error

_log = logging.getLogger(__name__)

TAGS = range(1 << 18, 1 << 19)  # tags of messages with parts of batches
# Timeout of a wait: one of gloo's that times out closes all of its connections.
_FOREVER = timedelta(days=365)
_SHORTEST, _LONGEST = 0.0005, 0.01  # seconds between two reads of other processes' counters
_STALL = 60.0  # seconds without any progress after which a rank goes on alone
_IDLE = 1.0  # seconds without taking bytes after which a rank is considered finished with a batch
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


class SharedRing:
    """One rank's side of the ring; while it is open, threads read and send this rank's parts.

    Buffer ``k % buffers`` holds batch ``k``. Batches come in the same order on every rank. A rank's
    part of a batch is written once the batch before it in that buffer is complete and all ranks
    that share the memory have released it. A rank releases a batch when it has taken all the bytes
    that it wants of it, or will not take the rest.

    Args:
        memory: the memory that ``neighbours``, with this rank, share.
        parts: for each batch, begin and end of every rank's part in the buffer.
        wanted: for each batch, the bytes that this rank will take.
        read: ``read(batch, buffer)`` fills this rank's part.
        failure: a function that describes the other ranks' failures so far.
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
        wanted: Sequence[int],
        read: Callable[[int, torch.Tensor], None],
        failure: Callable[[], str],
        group: dist.ProcessGroup | None = None,
        tag: int = TAGS[0],
    ) -> None:
        self._rank, self._shape, self._parts = rank, shape, parts
        self._group, self._tag = group, tag
        self._wanted, self._read, self._failure = list(wanted), read, failure
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
        self._held = Counter[int]()  # number of threads that copy out of each batch
        self._awaited = 0  # number of threads that wait for a batch
        self._takes = 0
        self._skipped = 0  # no thread waits for batches before this one
        self._sent = 0
        self._alone = self._closed = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._running = 0

    # Taking

    @contextmanager
    def taking(self, batch: int) -> Iterator[torch.Tensor | None]:
        """Wait for a batch and yield its buffer, which does not change inside the block.

        Yields ``None`` if the batch does not come: this rank has released it, or another rank makes
        no
        progress. Raises ``RuntimeError`` if another rank failed, and the error of reading this
        rank's parts.
        """
        with self._changed:
            comes = self._comes(batch)
            self._held[batch] += comes
        try:
            yield self._buffers[batch % self._shape.buffers] if comes else None
        finally:
            with self._changed:
                self._held[batch] -= comes
                self._advance()

    def took(self, batch: int, nbytes: int) -> None:
        """Count bytes of a batch that this rank has taken or skipped."""
        with self._changed:
            self._takes += 1
            self._wanted[batch] -= nbytes
            self._advance()

    def _comes(self, batch: int) -> bool:
        own, buffers = self._released, self._shape.buffers

        def may_come() -> bool:
            return batch < own[self._rank] + buffers

        def activity() -> object:
            return object() if self._awaited else self._takes

        # The batch cannot come before this rank has taken all of an earlier one. If no thread is
        # about to take that, the rest of it was planned and is not read.
        if not self._alone and not self._wait(may_come, activity, _IDLE):
            self._skipped = max(self._skipped, batch - buffers + 1)
            self._advance()
        self._awaited += 1
        try:
            while not self._alone and batch >= own[self._rank]:
                if self._is_filled(batch):
                    return True
                if not self._wait(
                    lambda: self._is_filled(batch) or batch < own[self._rank] or self._alone
                ):
                    self.go_alone()
        finally:
            self._awaited -= 1
        return False

    def _is_read(self, batch: int) -> bool:
        return self._filled[self._rank] > batch

    def _is_filled(self, batch: int) -> bool:
        return min(self._filled) > batch

    def _is_free(self, batch: int) -> bool:
        """Return whether all neighbours have released the batch that was in this one's buffer.

        A neighbour that skips a batch may release it while others still write to it.
        """
        before = batch - self._shape.buffers
        released = all(self._released[each] > before for each in self._neighbours)
        return released and self._is_filled(before)

    def _advance(self) -> None:
        """Release, in order, the batches that this rank no longer needs."""
        batch = first = self._released[self._rank]
        while (
            batch < len(self._parts)
            and not self._held[batch]
            and (self._alone or batch < self._skipped or self._wanted[batch] <= 0)
            and (not self._others or batch < self._sent)  # its part must stay until it is sent
        ):
            batch += 1
        if batch > first:
            self._released[self._rank] = batch
            self._changed.notify_all()

    def go_alone(self) -> None:
        """Take no more batches, and let no rank wait for this one to take them."""
        with self._changed:
            self._alone = True
            self._advance()
            self._changed.notify_all()

    # Filling

    def start(self) -> None:
        """Start the threads that read this rank's parts and send parts between hosts."""
        works: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(self._fill, ())]
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

    def _fill(self) -> None:
        for batch, parts in enumerate(self._parts):
            begin, end = parts[self._rank]
            if begin < end:
                if not self._until(partial(self._is_free, batch)):
                    return
                self._read(batch, self._buffers[batch % self._shape.buffers])
            self._announce(self._rank, batch)

    def _send(self, targets: Sequence[int]) -> None:
        for batch, parts in enumerate(self._parts):
            begin, end = parts[self._rank]
            if begin < end:
                if not self._until(partial(self._is_read, batch)):
                    return
                part = self._buffers[batch % self._shape.buffers][begin:end]
                sent = [
                    dist.isend(part, group=self._group, group_dst=target, tag=self._tag)
                    for target in targets
                ]
                for work in sent:
                    self._finish(work)
            with self._changed:
                self._sent = batch + 1
                self._advance()

    def _receive(self, owner: int) -> None:
        for batch, parts in enumerate(self._parts):
            begin, end = parts[owner]
            if begin < end:
                if not self._until(partial(self._is_free, batch)):
                    return
                part = self._buffers[batch % self._shape.buffers][begin:end]
                self._finish(dist.irecv(part, group=self._group, group_src=owner, tag=self._tag))
            self._announce(owner, batch)

    def _finish(self, work: Any) -> None:
        assert work is not None
        try:
            work.wait(_FOREVER)
        except RuntimeError as error:
            # Exactly this type, because ``together`` traces it to the rank that left.
            raise RuntimeError(f"passing weights between hosts: {describe_error(error)}") from error

    def _announce(self, rank: int, batch: int) -> None:
        with self._changed:
            self._filled[rank] = batch + 1
            self._changed.notify_all()

    def moved(self) -> None:
        """Count progress in reading a part, so that a slow source is not taken for a hung rank."""
        self._moved[self._rank] += 1

    # Waiting and the end

    def _until(self, holds: Callable[[], bool]) -> bool:
        """Wait in one of this ring's threads; return whether ``holds()`` is true."""
        with self._changed:
            return self._wait(holds, object) and not self._closed

    def _wait(
        self,
        holds: Callable[[], bool],
        activity: Callable[[], object] | None = None,
        limit: float | None = None,
    ) -> bool:
        """Wait, with the lock, until ``holds()``; return ``False`` if activity ends before.

        ``activity`` returns a value that changes with it; by default, with any rank's progress.
        Time in which this process was stopped is not counted.
        """
        activity = activity or (lambda: (*self._filled, *self._released, *self._moved))
        limit = _STALL if limit is None else limit
        pause, idle, looked = _SHORTEST, 0.0, 0.0
        seen = activity()
        while not holds():
            if self._error is not None:
                raise self._error
            if self._closed:
                return False
            if looked <= 0:
                looked = _LONGEST
                if failure := self._failure():
                    raise RuntimeError(failure)
            before = time.monotonic()
            self._changed.wait(pause)
            waited = min(time.monotonic() - before, pause)
            idle, looked = idle + waited, looked - waited
            pause = min(1.5 * pause, _LONGEST)
            if (now := activity()) != seen:
                seen, idle, pause = now, 0.0, _SHORTEST
            elif idle - waited < waiting.SILENCE <= idle < limit:
                self._say_who_is_behind()
            elif idle >= limit:
                return False
        return True

    def _say_who_is_behind(self) -> None:
        """Log the ranks that have read the least, for which the others wait."""
        least = min(self._filled)
        behind = [rank for rank, filled in enumerate(self._filled) if filled == least]
        if behind != [self._rank]:
            named = ", ".join(str(rank) for rank in behind if rank != self._rank)
            _log.warning("reading together: waiting for rank %s of %d", named, len(self._filled))

    def finish(self) -> None:
        """Wait until the other ranks have all they need of this one, then close.

        Raises as :meth:`taking` does.
        """
        with self._changed:
            self._skipped = len(self._parts)
            self._advance()
            if not self._alone:
                self._wait(lambda: not self._running)
            if self._error is not None:
                raise self._error
        self.close()

    def close(self) -> None:
        """End all waits of this rank; its threads end when they return from system calls."""
        with self._changed:
            self._closed = self._alone = True
            self._changed.notify_all()
        end = time.monotonic() + _FAREWELL
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
