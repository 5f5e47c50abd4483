"""Numbers of a device, which the host reads once the device has computed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

# Returns when the device has come to an event.
Wait: TypeAlias = Callable[[torch.cuda.Event], None]


def synchronize(event: torch.cuda.Event) -> None:
    """Wait for the device."""
    event.synchronize()


class Download:
    """A copy of numbers to the host, which begins now, and for which :meth:`read` waits.

    On a GPU, the copy comes after the work that was queued before it, and work that is queued later
    does not delay it.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            device = numbers.device  # not always that of the caller's thread
            numbers = numbers.to("cpu", non_blocking=True)  # torch takes pinned memory for it
            self._event = torch.cuda.current_stream(device).record_event()
        self._numbers = numbers

    def read(self, wait: Wait = synchronize) -> list[Any]:
        """Return the numbers, all in one list."""
        if self._event is not None:
            wait(self._event)
        values: list[Any] = self._numbers.view(-1).tolist()
        return values
