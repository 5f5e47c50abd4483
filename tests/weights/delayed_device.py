"""A stand-in for a CUDA device whose work is done as late as its streams and events allow.

Its memory is host memory. What a stream is given is done only when somebody waits for it: so a
pinned buffer that is filled again too early, or a parameter that is used too early, has wrong bits.
Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from vllm_module.weights import staging


class Stream:
    """A stream: work that waits, and how much of it was given and done."""

    def __init__(self, device: DelayedDevice) -> None:
        self.device = device
        self.waiting: list[Callable[[], object]] = []
        self.given = self.done = 0
        self.follows = -1  # how much of the caller's work is done before the work that comes next

    def give(self, work: Callable[[], object]) -> None:
        with self.device.lock:
            self.waiting.append(work)
            self.given += 1

    def do(self, until: int) -> None:
        with self.device.lock:
            while self.done < until:
                self.done += 1
                self.waiting.pop(0)()

    def synchronize(self) -> None:
        self.do(self.given)

    def wait_stream(self, other: Any) -> None:
        if other is self.device.caller:  # whose work is done at once
            self.follows = other.given
        else:
            until = other.given
            self.give(lambda: other.do(until))


class Caller:
    """The stream of the thread that opens a load: its work is done at once.

    Attributes:
        given: how many destinations it was given the allocation of.
        allocated: by address, which of them that was.

    """

    def __init__(self) -> None:
        self.given = 0
        self.allocated: dict[int, int] = {}

    def allocate(self, destination: torch.Tensor) -> torch.Tensor:
        """Count a new destination: only what follows the stream from here on may write to it."""
        self.given += 1
        self.allocated[destination.untyped_storage().data_ptr()] = self.given
        return destination

    def wait_stream(self, other: Stream) -> None:
        other.synchronize()


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.until = stream, stream.given

    def query(self) -> bool:
        return self.stream.done >= self.until

    def synchronize(self) -> None:
        self.stream.do(self.until)


class DelayedDevice:
    """A device for :class:`vllm_module.weights.staging.Staging`; all of its loads are counted.

    Attributes:
        pinned_bytes: of all buffers that were made.
        copies, conversions: how many were given to the streams.
        fails_at: the number of the copy or conversion that fails, if one shall.

    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.lock = threading.RLock()
        self.caller = Caller()
        self.pinned_bytes = self.copies = self.conversions = 0
        self.fails_at: int | None = None

    def pinned(self, nbytes: int) -> torch.Tensor:
        with self.lock:
            self.pinned_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def new_stream(self) -> Stream:
        return Stream(self)

    def empty(self, stream: Stream, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        assert stream.follows >= 0
        return torch.empty(shape, dtype=dtype)

    def run(self, stream: Stream, work: Sequence[Callable[[], object]]) -> None:
        in_use = "the destination's memory may still be in use"
        assert stream.follows >= 0, in_use
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        for each in work:
            with self.lock:
                is_copy = getattr(each, "func", None) is staging.copy_weight
                if is_copy:
                    memory = each.args[1].untyped_storage().data_ptr()
                    assert self.caller.allocated.get(memory, 0) <= stream.follows, in_use
                self.copies += is_copy
                self.conversions += not is_copy
                fails = self.copies + self.conversions == self.fails_at

            def later(each: Callable[[], object] = each, fails: bool = fails) -> None:
                if fails:
                    raise RuntimeError("CUDA error: an illegal memory access")
                with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                    each()

            stream.give(later)

    def mark(self, stream: Stream) -> Event:
        return Event(stream)


@contextmanager
def loading_onto_a_device(**small: int) -> Iterator[DelayedDevice]:
    """Let every load go through a device, in pieces and batches of a few bytes."""
    from vllm_module.weights import pieces, reading

    device = DelayedDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "device_to_stage", lambda _: device)
        patch.setattr(pieces, "PIECE_BYTES", small.get("piece", 64))
        patch.setattr(reading, "_BATCH_BYTES", small.get("batch", 32))
        patch.setattr("os.cpu_count", lambda: small.get("cpus", 3))
        yield device
