"""Reading onto a device: into pinned host memory, and from there by asynchronous copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch

from vllm_module.weights import pieces
from vllm_module.weights.handle import (
    Handle,
    check_destination,
    copy_weight,
    read_together,
)
from vllm_module.weights.pieces import Job, cut, nbytes_of

_ALIGNMENT = 64  # bytes between the starts of weights in a buffer, so that copies are aligned
_MORE_BUFFERS = 2  # extra buffers: these are copied while every thread fills another one


class CudaDevice:
    """The CUDA calls of staging: pinned memory, streams and events.

    Attributes:
        device: the device of the destinations.
        caller: the stream of the thread that opened the load.

    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.caller = torch.cuda.current_stream(self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned host memory, which the device copies while the host does other work."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def new_stream(self) -> torch.cuda.Stream:
        """Create a stream, whose work runs in order and beside that of other streams."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # as PyTorch has it

    def empty(
        self, stream: torch.cuda.Stream, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        """Allocate memory on the device, for use in ``stream``."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def run(self, stream: torch.cuda.Stream, work: Sequence[Callable[[], object]]) -> None:
        """Call each function of ``work``, so that its kernels are launched in ``stream``."""
        # A new thread's current device is 0. Entering the stream alone would restore that device at
        # exit and create a context on it.
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for each in work:
                each()

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record an event at the end of the work launched so far in ``stream``."""
        # Blocking: a thread that waits for the event sleeps.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # as PyTorch has it
        event.record(stream)
        return event


def device_to_stage(device: torch.device | None) -> CudaDevice | None:
    """Return the device that weights are staged to, or ``None`` if they are read directly."""
    return CudaDevice(device) if device is not None and device.type == "cuda" else None


def staging_buffers(threads: int) -> int:
    """Return the largest number of pinned buffers of ``PIECE_BYTES`` for so many threads."""
    return threads + _MORE_BUFFERS


class _Buffer:
    """Pinned memory, and the event after the last copy out of it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.copied: Any = None  # an event (its methods have no type hints)

    def is_copied(self) -> bool:
        """Return whether all copies out of the buffer are done."""
        return self.copied is None or bool(self.copied.query())

    def wait(self) -> None:
        """Wait until all copies out of the buffer are done."""
        if self.copied is not None:
            self.copied.synchronize()


class Staging:
    """Pinned buffers and streams by which the threads of a load read onto a device.

    There are at most :func:`staging_buffers` of ``PIECE_BYTES``. A thread fills a buffer, launches
    the copies out of it, and fills another one meanwhile. A buffer is filled again once its copies
    are done. Each thread has a stream. The work that follows a copy, such as a cast or a
    conversion, runs on the device in the same stream.
    """

    def __init__(self, device: CudaDevice, threads: int) -> None:
        self.device = device
        self._free: deque[_Buffer] = deque()
        self._unmade = staging_buffers(threads)
        self._lock = Lock()
        self._streams: list[torch.cuda.Stream] = []

    def take(self) -> _Buffer:
        """Return a buffer whose copies are done.

        The buffer that was given back first is taken. If its copies are not done, a new buffer is
        allocated; if the maximum is reached, its copies are waited for.
        """
        with self._lock:
            if self._unmade and not (self._free and self._free[0].is_copied()):
                buffer = _Buffer(self.device.pinned(pieces.PIECE_BYTES))
                self._unmade -= 1
                return buffer
            # Each thread holds at most one buffer, and there are more buffers than threads.
            buffer = self._free.popleft()
        buffer.wait()
        return buffer

    def give_back(self, buffer: _Buffer) -> None:
        """Return the buffer to the pool; it is filled again once its event has happened."""
        with self._lock:
            self._free.append(buffer)

    def new_stream(self) -> torch.cuda.Stream:
        """Create a stream for one thread; the caller's stream will wait for it."""
        stream = self.device.new_stream()
        with self._lock:
            self._streams.append(stream)
        return stream

    def deliver(self) -> None:
        """Make the caller's stream, and not the host, wait for everything read so far."""
        for stream in self._streams:
            self.device.caller.wait_stream(stream)

    def close(self, *, failed: bool) -> None:
        """Wait until the device has finished, and raise its errors.

        After a failure, errors of the device are dropped.
        """
        for stream in self._streams:
            try:
                stream.synchronize()
            except Exception:
                if not failed:
                    raise


class StagedReader:
    """One thread's reader of weights onto a device, through the pinned buffers."""

    def __init__(self, staging: Staging) -> None:
        self._staging, self._device = staging, staging.device
        self._stream: torch.cuda.Stream | None = None
        self._buffer: _Buffer | None = None
        self._used = 0  # bytes used of the buffer
        # Weights and their regions of the buffer.
        self._pending_reads: list[tuple[Handle, torch.Tensor]] = []
        # Copies and conversions to launch after reading.
        self._pending_launches: list[Callable[[], object]] = []

    def read(self, jobs: Iterable[Job]) -> None:
        """Read each weight, and launch its copy to its destination, or its conversion.

        Destinations that need no staging are filled as ``read_together`` does.
        """
        staged: list[Job] = []
        elsewhere: list[Job] = []
        for job in jobs:
            (staged if job[1].device == self._device.device else elsewhere).append(job)
        if staged:
            self._read_staged(staged)
        read_together(elsewhere)

    def _read_staged(self, jobs: list[Job]) -> None:
        if self._stream is None:
            self._stream = self._staging.new_stream()
        # The caller's stream allocated the destinations, and may still use what they held before.
        self._stream.wait_stream(self._device.caller)
        try:
            for weight, destination in jobs:
                if isinstance(destination, torch.Tensor):
                    self._stage(weight, destination)
                    continue
                raw = self._device.empty(self._stream, weight.shape, weight.dtype)
                for piece, target in cut(weight, raw):
                    assert isinstance(target, torch.Tensor)
                    self._stage(piece, target)
                self._pending_launches.append(partial(destination.receive, raw))
            self._launch()
        finally:
            self._release()

    def _stage(self, weight: Handle, destination: torch.Tensor) -> None:
        """Reserve space in a buffer for a weight of at most PIECE_BYTES."""
        check_destination(weight.shape, destination, weight)
        nbytes = nbytes_of(weight)
        if self._buffer is not None and self._used + nbytes > self._buffer.memory.numel():
            self._launch()
            self._release()
        if self._buffer is None:
            self._buffer = self._staging.take()
        place = self._buffer.memory[self._used : self._used + nbytes]
        host = place.view(weight.dtype).view(weight.shape)
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._pending_reads.append((weight, host))
        copy = partial(copy_weight, host, destination, weight, non_blocking=True)
        self._pending_launches.append(copy)

    def _launch(self) -> None:
        """Read the weights that have space in the buffer; launch their copies and conversions."""
        assert self._stream is not None
        read_together(self._pending_reads)
        self._device.run(self._stream, self._pending_launches)
        self._pending_reads, self._pending_launches = [], []

    def _release(self) -> None:
        """Return the buffer to the pool; if reading failed, drop the work that was not launched."""
        self._pending_reads, self._pending_launches = [], []
        buffer, self._buffer, self._used = self._buffer, None, 0
        if buffer is not None:
            assert self._stream is not None
            buffer.copied = self._device.mark(self._stream)
            self._staging.give_back(buffer)
