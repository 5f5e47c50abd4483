from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from queue import Empty, Full, Queue
from threading import Thread

import torch

from vllm_module.weights.handle import Destination, Handle, Weight, read_into

_PIECE = 16 << 20  # a larger weight is cut into pieces of this many bytes
_BATCH = 2 << 20  # smaller ones are handed over together: each time costs tens of µs
_MAX_THREADS = 4

_Job = tuple[Handle, Destination]


def read_all(jobs: Iterable[tuple[Weight, Destination]]) -> None:
    """Read each weight into its destination, as :meth:`Readers.read` does."""
    with Readers() as readers:
        readers.read(jobs)


def _nbytes(weight: Handle) -> int:
    return weight.shape.numel() * weight.dtype.itemsize


def _pieces(weight: Handle, destination: Destination) -> Iterator[_Job]:
    nbytes = _nbytes(weight)
    if (
        nbytes <= _PIECE
        or not isinstance(destination, torch.Tensor)
        or weight.shape != destination.shape  # is refused when read
    ):
        yield weight, destination
        return
    dim = next(dim for dim, size in enumerate(weight.shape) if size > 1)
    size = weight.shape[dim]
    step = max(1, size * _PIECE // nbytes)
    for start in range(0, size, step):
        length = min(step, size - start)
        yield from _pieces(
            weight.narrow(dim, start, length), destination.narrow(dim, start, length)
        )


def _read(batch: list[_Job]) -> None:
    for weight, destination in batch:
        read_into(weight, destination)


class Readers:
    """Threads that read beside the calling one while a ``with`` block lasts.

    They start with the first batch for them, and none outlives the block.
    """

    def __init__(self) -> None:
        self._helpers = min(_MAX_THREADS, os.cpu_count() or 1) - 1
        self._queue: Queue[list[_Job] | None] = Queue(2 * self._helpers + 1)
        self._threads: list[Thread] = []
        self._errors: list[BaseException] = []
        self._stopped = False
        # Threads do not inherit them.
        self._inference, self._grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *broken: object) -> None:
        self._stopped |= broken[0] is not None
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def read(self, jobs: Iterable[tuple[Weight, Destination]]) -> None:
        """Read each weight into its destination, by all threads at once.

        The calling thread reads too, and takes further jobs only while a thread is soon free for
        them, so ``jobs`` may make the destinations as it goes. Tensors in memory are copied. When
        it returns, everything is read. The first exception ends it, is raised as it is, and leaves
        destinations half filled; these readers then read no more. Raises as ``read_into`` does.
        """
        assert not self._stopped, "these readers failed before"
        try:
            batch: list[_Job] = []
            room = _BATCH
            for weight, destination in jobs:
                if isinstance(weight, torch.Tensor):
                    read_into(weight, destination)
                    continue
                for piece, part in _pieces(weight, destination):
                    batch.append((piece, part))
                    room -= _nbytes(piece)
                    if room <= 0:
                        self._hand_over(batch)
                        batch, room = [], _BATCH
            _read(batch)
            self._finish()
        except BaseException:
            self._stopped = True
            raise
        finally:
            self._finish()  # drops what is queued if it is stopped
            self._queue.join()
        self._check()

    def _hand_over(self, batch: list[_Job]) -> None:
        """Give a batch to a thread or, when all are busy, read it here."""
        self._check()
        while len(self._threads) < self._helpers:
            thread = Thread(target=self._work, name="weight-reader", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads or memory: those that run, and this one, read
                self._helpers = len(self._threads)
                break
            self._threads.append(thread)
        try:
            self._queue.put_nowait(batch)
        except Full:
            _read(batch)

    def _finish(self) -> None:
        """Help with what is still queued."""
        while not self._queue.empty():
            try:
                batch = self._queue.get_nowait()
            except Empty:
                return
            try:
                if not self._stopped:
                    _read(batch or [])
            except BaseException:
                self._stopped = True
                raise
            finally:
                self._queue.task_done()

    def _check(self) -> None:
        """Raise what a thread raised; to keep it here too would keep its frames' tensors alive."""
        if self._errors:
            raise self._errors.pop()

    def _work(self) -> None:
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
            while (batch := self._queue.get()) is not None:
                try:
                    if not self._stopped:
                        _read(batch)
                except BaseException as error:
                    if not self._stopped:
                        self._errors.append(error)
                    self._stopped = True
                finally:
                    del batch  # or it would be held until the next one comes
                    self._queue.task_done()
