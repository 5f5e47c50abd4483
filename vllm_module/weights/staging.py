"""Reading onto a device: into pinned host memory, and from there by copies of its own streams."""

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

_ALIGNMENT = 64  # bytes: where each weight in a buffer begins, so that it is copied by whole words
_MORE_BUFFERS = 2  # than threads: they are copied while every thread reads into another one


class CudaDevice:
    """What staging takes from a CUDA device: pinned memory, streams and events.

    Attributes:
        device: where destinations are.
        caller: the stream in which the thread that opened the load works.

    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.caller = torch.cuda.current_stream(self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return host memory that the device copies while the host does other work."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def new_stream(self) -> torch.cuda.Stream:
        """Return a stream of work, done in order and beside that of other streams."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # as PyTorch has it

    def empty(
        self, stream: torch.cuda.Stream, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return new memory on the device, to be used in ``stream``."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def run(self, stream: torch.cuda.Stream, work: Sequence[Callable[[], object]]) -> None:
        """Call each function of ``work``; what they launch is done in ``stream``."""
        # A thread's device is 0 at first. The stream alone would go back to it, and make a context.
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for each in work:
                each()

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event that happens when all work so far in ``stream`` is done."""
        # A thread that waits leaves the CPU to others.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # as PyTorch has it
        event.record(stream)
        return event


def device_to_stage(device: torch.device | None) -> CudaDevice | None:
    """Return the device that weights are copied to, ``None`` if they are read into its memory."""
    return CudaDevice(device) if device is not None and device.type == "cuda" else None


def staging_buffers(threads: int) -> int:
    """Return how many pinned buffers of ``PIECE_BYTES`` so many reading threads share, at most."""
    return threads + _MORE_BUFFERS


class _Buffer:
    """Pinned memory, and the event after which nothing is copied out of it any more."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.copied: Any = None  # an event, whose methods have no types

    def is_copied(self) -> bool:
        """Tell whether nothing is copied out of it any more."""
        return self.copied is None or bool(self.copied.query())

    def wait(self) -> None:
        """Wait until nothing is copied out of it."""
        if self.copied is not None:
            self.copied.synchronize()


class Staging:
    """The pinned buffers and the streams by which the threads of a load read onto a device.

    There are :func:`staging_buffers` of ``PIECE_BYTES`` at most. A thread fills one and launches
    the copies out of it; meanwhile it fills another one. A buffer is filled again once its copies
    are done. Each thread has a stream. What a weight is copied for, such as a cast or a conversion,
    is done in that stream too: on the device, and after the copy.
    """

    def __init__(self, device: CudaDevice, threads: int) -> None:
        self.device = device
        self._free: deque[_Buffer] = deque()
        self._unmade = staging_buffers(threads)
        self._lock = Lock()
        self._streams: list[torch.cuda.Stream] = []

    def take(self) -> _Buffer:
        """Return a buffer that nothing is copied out of.

        It is the one that was given back first. A new one is made where that is still copied, and
        where there are all buffers, its copies are waited for.
        """
        with self._lock:
            if self._unmade and not (self._free and self._free[0].is_copied()):
                buffer = _Buffer(self.device.pinned(pieces.PIECE_BYTES))
                self._unmade -= 1
                return buffer
            buffer = self._free.popleft()  # there are more than threads, and each has one at most
        buffer.wait()
        return buffer

    def give_back(self, buffer: _Buffer) -> None:
        """Let the buffer be filled again once its event has happened."""
        with self._lock:
            self._free.append(buffer)

    def new_stream(self) -> torch.cuda.Stream:
        """Return a stream for one thread, which the caller's stream will wait for."""
        stream = self.device.new_stream()
        with self._lock:
            self._streams.append(stream)
        return stream

    def deliver(self) -> None:
        """Let the caller's stream wait for everything that was read so far; the host does not."""
        for stream in self._streams:
            self.device.caller.wait_stream(stream)

    def close(self, *, failed: bool) -> None:
        """Wait until the device has done everything, and raise what failed there.

        After a failure, what fails now is not raised.
        """
        for stream in self._streams:
            try:
                stream.synchronize()
            except Exception:
                if not failed:
                    raise


class StagedReader:
    """One thread's reading onto a device."""

    def __init__(self, staging: Staging) -> None:
        self._staging, self._device = staging, staging.device
        self._stream: torch.cuda.Stream | None = None
        self._buffer: _Buffer | None = None
        self._used = 0  # bytes of the buffer
        self._to_read: list[tuple[Handle, torch.Tensor]] = []  # into the buffer
        self._to_launch: list[Callable[[], object]] = []  # once that is read

    def read(self, jobs: Iterable[Job]) -> None:
        """Read each weight, and launch its copy to its destination, or its conversion.

        Destinations elsewhere are filled as ``read_together`` fills them.
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
        # The caller's stream has made the destinations, and has used what they held before.
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
                self._to_launch.append(partial(destination.receive, raw))
            self._launch()
        finally:
            self._release()

    def _stage(self, weight: Handle, destination: torch.Tensor) -> None:
        """Give a weight of at most PIECE_BYTES a place in a buffer."""
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
        self._to_read.append((weight, host))
        copy = partial(copy_weight, host, destination, weight, non_blocking=True)
        self._to_launch.append(copy)

    def _launch(self) -> None:
        """Read what has a place in the buffer, and launch what follows on the device."""
        assert self._stream is not None
        read_together(self._to_read)
        self._device.run(self._stream, self._to_launch)
        self._to_read, self._to_launch = [], []

    def _release(self) -> None:
        """Give the buffer back; if reading failed, drop what was not done."""
        self._to_read, self._to_launch = [], []
        buffer, self._buffer, self._used = self._buffer, None, 0
        if buffer is not None:
            assert self._stream is not None
            buffer.copied = self._device.mark(self._stream)
            self._staging.give_back(buffer)
