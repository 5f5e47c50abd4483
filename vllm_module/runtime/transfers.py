"""Copying numbers from the host to a device, and back, in one copy each."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Numbers: TypeAlias = "array[float] | array[int]"


def upload(arrays: Sequence[Numbers], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device in one copy, for which the host does not wait.

    Args:
        arrays: arrays of type code "d" or "q".
        device: device of the tensors.

    Returns:
        A tensor for each array, in float64 or int64.

    """
    packed = bytearray().join(arrays)
    if not packed:
        return [torch.empty(0, dtype=_DTYPES[each.typecode], device=device) for each in arrays]
    sent = _send(torch.frombuffer(packed, dtype=torch.int64), device)
    parts = torch.split(sent, [len(each) for each in arrays])
    return [part.view(_DTYPES[each.typecode]) for part, each in zip(parts, arrays, strict=True)]


_DTYPES = {"d": torch.float64, "q": torch.int64}


def _send(numbers: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        # A copy from pageable memory would wait for the device.
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


# Function that returns when the device has reached an event.
Wait: TypeAlias = Callable[[torch.cuda.Event], None]


def synchronize(event: torch.cuda.Event) -> None:
    """Wait until the device has reached ``event``."""
    event.synchronize()


class Download:
    """A copy of numbers to the host, which is launched at once; :meth:`read` waits for it.

    On a GPU, the copy comes after work that was queued before it, and work that is queued later
    does not delay it.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            device = numbers.device  # may differ from the current device of the thread
            numbers = numbers.to("cpu", non_blocking=True)  # torch allocates pinned memory for it
            self._event = torch.cuda.current_stream(device).record_event()
        self._numbers = numbers

    def read(self, wait: Wait = synchronize) -> list[Any]:
        """Return the numbers as one list."""
        if self._event is not None:
            wait(self._event)
        values: list[Any] = self._numbers.view(-1).tolist()
        return values
