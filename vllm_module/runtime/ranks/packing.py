"""Lists of integers packed into one buffer, which needs one copy to a device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch

# Triton compiles another variant of a kernel for addresses and strides that are no multiples.
ALIGNMENT = 16
_CODES = {torch.int64: "q", torch.int32: "i"}


def pack(parts: Iterable[tuple[torch.dtype, Sequence[int]]]) -> torch.Tensor:
    """Return the bytes of all parts, int64 or int32, one after another, as uint8 ``[bytes]``."""
    data = bytearray()
    for dtype, values in parts:
        data += array(_CODES[dtype], values)
        data += bytes(-len(data) % ALIGNMENT)
    return torch.frombuffer(data, dtype=torch.uint8)


def unpack(
    packed: torch.Tensor, parts: Iterable[tuple[torch.dtype, Sequence[int]]]
) -> list[torch.Tensor]:
    """Return a view of each part of ``packed``, which :func:`pack` made of equal lengths."""
    of_dtype = {dtype: packed.view(dtype) for dtype in _CODES}
    views, begin = [], 0
    for dtype, values in parts:
        first = begin // dtype.itemsize
        views.append(of_dtype[dtype][first : first + len(values)])
        nbytes = len(values) * dtype.itemsize
        begin += nbytes + -nbytes % ALIGNMENT
    return views
