"""The current device and stream, which torch keeps for each thread, set for an engine's calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def own_device(device: torch.device, local_rank: int | None = None) -> torch.device:
    """Return ``device``; ``cuda`` becomes the device with index ``local_rank``.

    Without ``local_rank``, it becomes this thread's current device. Raises ``ValueError`` if there
    are not enough devices.
    """
    if str(device) != "cuda":
        return device
    if local_rank is None:
        return torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(
            f"{local_rank + 1} ranks need a CUDA device each, and there are {count}: lower "
            "tensor_parallel_size, or use more hosts by torchrun"
        )
    return torch.device("cuda", local_rank)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` this thread's current one inside the block, if it is a CUDA device.

    Streams, events, graphs and synchronization belong to the current device, which is the first one
    in a new thread.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def queued_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Launch this thread's kernels on ``stream`` inside the block, ordered with those outside it.

    The stream waits for work that this thread has queued before, and work queued after the block
    waits for the stream. So threads with streams of their own may share its results. ``None`` is
    for a device without streams.
    """
    if stream is None or (own := torch.cuda.current_stream(stream.device)) == stream:
        yield
        return
    stream.wait_stream(own)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        own.wait_stream(stream)


def as_called(items: Iterator[T], device: torch.device) -> Iterator[T]:
    """Yield the items, with ``device`` current while each one is computed."""
    while True:
        with current(device):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
        del item  # or it would be in memory while the next is computed
