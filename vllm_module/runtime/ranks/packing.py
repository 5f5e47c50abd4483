"""Lists of integers as tensors that lie in one buffer, which one copy brings to a device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch

# Triton compiles a kernel again for addresses and strides that are no multiples of this.
ALIGNMENT = 16
_CODES = {torch.int64: "q", torch.int32: "i"}


def pack(parts: Iterable[tuple[torch.dtype, Sequence[int]]]) -> torch.Tensor:
    """Return the bytes of each part, int64 or int32, one after another, uint8 ``[bytes]``."""
    data = bytearray()
    for dtype, values in parts:
        data += array(_CODES[dtype], values)
        data += bytes(-len(data) % ALIGNMENT)
    return torch.frombuffer(data, dtype=torch.uint8)


def unpack(
    packed: torch.Tensor, parts: Iterable[tuple[torch.dtype, Sequence[int]]]
) -> list[torch.Tensor]:
    """Return a view of each part of ``packed``, which :func:`pack` made of parts so long."""
    of_dtype = {dtype: packed.view(dtype) for dtype in _CODES}
    views, begin = [], 0
    for dtype, values in parts:
        first = begin // dtype.itemsize
        views.append(of_dtype[dtype][first : first + len(values)])
        nbytes = len(values) * dtype.itemsize
        begin += nbytes + -nbytes % ALIGNMENT
    return views
