"""Numbers of the host, sent to a device at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Numbers: TypeAlias = "array[float] | array[int]"


def upload(arrays: Sequence[Numbers], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device, all in one copy that the host does not wait for.

    Args:
        arrays: of type code "d" or "q".
        device: that the tensors shall be on.

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
        # From pageable memory, the copy would wait for the device.
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
