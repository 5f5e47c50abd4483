"""Reading many weights with several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from queue import Empty, Full, Queue
from threading import Thread
from typing import TypeGuard

import torch

from vllm_module.weights.handle import (
    Destination,
    FileHandle,
    Handle,
    Weight,
    read_into,
    read_together,
)
from vllm_module.weights.pieces import Job, cut, nbytes_of
from vllm_module.weights.readable import Readable
from vllm_module.weights.staging import StagedReader, Staging, device_to_stage

# bytes: smaller weights are queued together, because each queue operation costs tens of µs.
_BATCH_BYTES = 2 << 20
_FIRST_BATCHES = 4  # the one with which threads start
# The same for a store, where the ranges of a batch are requested together.
_REMOTE_BATCH_BYTES = 32 << 20
_MAX_THREADS = 4
# A copy to a device takes less time than reading into host memory. This was not measured: eight
# threads of 6 GB/s would fill a bus of 50.
_MAX_THREADS_TO_DEVICE = 8


def reader_threads(device: torch.device | None = None) -> int:
    """Return the number of threads, with the calling one, that read at once onto ``device``."""
    on_host = device is None or device.type == "cpu"
    return min(_MAX_THREADS if on_host else _MAX_THREADS_TO_DEVICE, os.cpu_count() or 1)


def read_all(jobs: Iterable[tuple[Weight, Destination]]) -> None:
    """Read each weight into its destination, as :meth:`Readers.read` does."""
    with Readers() as readers:
        readers.read(jobs)


class Readers:
    """Threads that read weights, beside the calling one, while a ``with`` block lasts.

    They start with the fourth batch, so that a few megabytes of files are read without the cost of
    a thread, or with the first of a store; and all have ended when the block ends.

    Attributes:
        stopped: True if reading failed; then nothing more can be read.

    Args:
        device: the device of most destinations. If it is a CUDA device, weights are read through
            pinned memory (see :class:`~vllm_module.weights.staging.Staging`).

    """

    def __init__(self, device: torch.device | None = None) -> None:
        threads = reader_threads(device)
        self._most_threads = threads - 1
        staged = device_to_stage(device)
        self._staging = None if staged is None else Staging(staged, threads)
        self._read_batch = self._new_reader()  # reader of the calling thread
        self._queue: Queue[list[Job] | None] = Queue(2 * self._most_threads + 1)
        self._threads: list[Thread] = []
        self._errors: list[BaseException] = []
        self.stopped, self._queued = False, 0
        self._remote: set[Readable] = set()  # files of stores that threads may wait for
        # A new thread has torch's default modes, not those of the thread that starts it.
        self._inference, self._grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *error: object) -> None:
        if error[1] is not None:
            self._stop(error[1])
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        if self._staging is not None:
            self._staging.close(failed=self.stopped)
        self._errors.clear()  # drop other threads' errors too: their frames keep tensors alive

    def stages(self, weight: torch.Tensor, destination: Destination) -> bool:
        """Return whether a host tensor should be copied to ``destination`` through pinned memory.

        Give such a tensor to :meth:`read` as a ``TensorHandle``.
        """
        staging = self._staging
        return staging is not None and weight.is_cpu and destination.device == staging.device.device

    def read(self, jobs: Iterable[tuple[Weight, Destination]]) -> None:
        """Read each weight into its destination with all threads; return when all are read.

        On a device, the caller's stream waits until they have arrived there.

        ``jobs`` may be a generator that allocates each destination: at most a queue's worth of jobs
        is taken ahead of the reading. The calling thread reads too, and copies tensors in memory.

        Raises what ``read_into`` raises. The first exception stops the reading and leaves
        destinations partly filled; after it ``read`` must not be called again.
        """
        assert not self.stopped, "these readers failed before"
        try:
            batch: list[Job] = []
            nbytes = 0
            for weight, destination in jobs:
                if isinstance(weight, torch.Tensor):
                    read_into(weight, destination)
                    continue
                for piece in cut(weight, destination):
                    batch.append(piece)
                    nbytes += nbytes_of(piece[0])
                    if nbytes >= _batch_bytes(piece[0]):
                        self._queue_batch(batch)
                        batch, nbytes = [], 0
            if batch:
                self._read_batch(batch)
        except BaseException as error:
            self._stop(error)
            raise
        finally:
            if self._queued:
                self._empty_queue()  # batches are left in it after an exception
                self._queue.join()
        self._raise_error()
        if self._staging is not None:
            self._staging.deliver()

    def _queue_batch(self, batch: list[Job]) -> None:
        """Queue a batch for the threads or, if the queue is full, read it in this thread."""
        self._raise_error()
        self._queued += 1
        self._remote.update(weight.file_bytes for weight, _ in batch if _is_remote(weight))
        if self._queued >= _FIRST_BATCHES or _is_remote(batch[0][0]) or self._queue.full():
            self._start_threads()
        try:
            self._queue.put_nowait(batch)
        except Full:
            self._read_batch(batch)

    def _start_threads(self) -> None:
        while len(self._threads) < self._most_threads:
            thread = Thread(target=self._work, name="weight-reader", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads or memory: continue with the running ones
                self._most_threads = len(self._threads)
                break
            self._threads.append(thread)

    def _empty_queue(self) -> None:
        """Read queued batches in this thread or, once stopped, drop them."""
        while not self._queue.empty():
            try:
                batch = self._queue.get_nowait()
            except Empty:
                return
            try:
                if not self.stopped:
                    self._read_batch(batch or [])
            except BaseException:
                self.stopped = True
                raise
            finally:
                self._queue.task_done()

    def _stop(self, error: object) -> None:
        """Read no more. An interrupt does not wait for a store that is silent."""
        self.stopped = True
        if not isinstance(error, Exception):
            for file_bytes in self._remote:
                file_bytes.interrupt()

    def _raise_error(self) -> None:
        """Raise a thread's exception and drop it, because its frames keep tensors alive."""
        if self._errors:
            raise self._errors.pop()

    def _new_reader(self) -> Callable[[list[Job]], None]:
        return read_together if self._staging is None else StagedReader(self._staging).read

    def _work(self) -> None:
        read = self._new_reader()
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
            while (batch := self._queue.get()) is not None:
                try:
                    if not self.stopped:
                        read(batch)
                except BaseException as error:
                    if not self.stopped:
                        self._errors.append(error)
                    self.stopped = True
                finally:
                    del batch  # or its tensors would live until the next batch comes
                    self._queue.task_done()


def _is_remote(weight: Handle) -> TypeGuard[FileHandle]:
    return isinstance(weight, FileHandle) and weight.file_bytes.remote


def _batch_bytes(weight: Handle) -> int:
    """Return the size in bytes at which a batch of such weights is queued."""
    return _REMOTE_BATCH_BYTES if _is_remote(weight) else _BATCH_BYTES
