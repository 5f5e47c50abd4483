"""Copying numbers from the host to a device, and back, in one copy each."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Numbers: TypeAlias = "array[float] | array[int]"
# Triton compiles another variant of a kernel for addresses and strides that are no multiples.
ALIGNMENT = 16
_DTYPES = {"d": torch.float64, "q": torch.int64, "i": torch.int32}


def pack(arrays: Sequence[Numbers], device: torch.device) -> Tensor:
    """Return the bytes of all arrays, one after another, as uint8 in host memory.

    Args:
        arrays: arrays of type code "d", "q" or "i", not all of them empty.
        device: device that they are copied to next. For a GPU, the memory is pinned, because a copy
            from pageable memory would wait for the device.

    """
    data = bytearray()
    for each in arrays:
        data += each
        data += bytes(-len(data) % ALIGNMENT)
    packed = torch.frombuffer(data, dtype=torch.uint8)
    # torch reuses pinned memory once its copies are done.
    return packed.pin_memory() if device.type == "cuda" else packed


def unpack(packed: Tensor, arrays: Sequence[Numbers]) -> list[Tensor]:
    """Return a view of each array in ``packed``, which :func:`pack` made of equal lengths."""
    of_code = {code: packed.view(dtype) for code, dtype in _DTYPES.items()}
    views, begin = [], 0
    for each in arrays:
        first = begin // each.itemsize
        views.append(of_code[each.typecode][first : first + len(each)])
        nbytes = len(each) * each.itemsize
        begin += nbytes + -nbytes % ALIGNMENT
    return views


def upload(arrays: Sequence[Numbers], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device in one copy, for which the host does not wait.

    Args:
        arrays: as for :func:`pack`.
        device: device of the tensors.

    Returns:
        A tensor for each array, in float64, int64 or int32.

    """
    return unpack(pack(arrays, device).to(device, non_blocking=True), arrays)


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
