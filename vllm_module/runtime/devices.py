"""Devices and streams, which torch keeps for each thread: an engine has its own, in any thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def own_device(device: torch.device, local_rank: int | None = None) -> torch.device:
    """Return ``device``; of ``cuda``, the device with index ``local_rank``.

    Without ``local_rank``, that is the one which is current where this is called: threads differ.
    Raises ``ValueError`` if there are not enough devices.
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
    """Make ``device`` the current one of this thread inside, if it is a CUDA device.

    Streams, events, graphs and synchronization are of the current device, which is the first one in
    a new thread.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def queued_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Launch on ``stream`` what this thread launches inside, and all in the order of the calls.

    The stream waits for what this thread has queued before, and what it queues afterwards waits for
    the stream. So threads with streams of their own may share what is computed on it. ``None`` is
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
    """Yield what ``items`` yields, with ``device`` current while it computes the next."""
    while True:
        with current(device):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
        del item  # or it would be in memory while the next is computed
