"""Runs of bytes: segments of equal length and distance, such as some columns of every row."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Reading this many more OS pages takes a disk no longer than one more request (14 µs, measured at
# 1 GB/s).
_SMALL_GAP = 3
# Small gaps are read too, as long as they are at most this share of the OS pages touched.
_SHARE_OF_GAPS = 1 / 8

_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_view.restype = ctypes.py_object
_PYBUF_WRITE = 0x200


@dataclass(frozen=True, slots=True)
class ByteRun:
    """``count`` segments of ``length`` bytes, at ``offset`` and every ``stride`` bytes after it.

    ``cut`` is True if the reader may have no use for the bytes before and after them.
    """

    offset: int
    length: int
    stride: int
    count: int
    cut: bool = False

    @property
    def span(self) -> int:
        """Bytes from the first byte of the first segment to the last byte of the last one."""
        return (self.count - 1) * self.stride + self.length

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return self.count * self.length

    def windows(self, span: int, address: int) -> Iterator[tuple[ByteRun, int]]:
        """Split the run into runs of at most ``span`` bytes of the file, but at least one segment.

        Each is yielded with the address in memory of its first byte; this run begins at
        ``address``.
        """
        step = max(1, span // self.stride)
        for first in range(0, self.count, step):
            count = min(step, self.count - first)
            offset = self.offset + first * self.stride
            run = ByteRun(offset, self.length, self.stride, count, self.cut)
            yield run, address + first * self.length

    def segments(self, gap: int) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of each segment; of all together if at most ``gap`` is between two."""
        if self.stride - self.length <= gap:
            yield self.offset, self.offset + self.span
            return
        for begin in range(self.offset, self.offset + self.span, self.stride):
            yield begin, begin + self.length

    def pages(self) -> list[tuple[int, int]]:
        """Return the ranges of bytes to read for this run, (begin, end), in whole OS pages.

        They cover the OS pages that segments touch, and some of the small gaps between these: a
        disk reads few large ranges faster than many small ones.
        """
        page = mmap.PAGESIZE
        begin, end = self.offset // page, (self.offset + self.span - 1) // page + 1
        if self.stride - self.length < page:  # no OS page fits between two segments
            return [(begin * page, end * page)]
        import torch

        offsets = torch.arange(self.count, device="cpu") * self.stride + self.offset
        first, last = offsets // page, (offsets + (self.length - 1)) // page
        gaps = (first[1:] - last[:-1] - 1).clamp(min=0)  # OS pages between the segments
        filled = (gaps > 0) & (gaps <= _SMALL_GAP)  # True for gaps that are read too
        most = int((end - begin - gaps.sum()) * _SHARE_OF_GAPS)
        sizes = gaps * filled
        if sizes.sum() > most:  # too much would be read: fill only some of the gaps, evenly spread
            turns = sizes.cumsum(0) * most // (sizes.sum() * sizes.max())
            filled &= turns.diff(prepend=turns.new_zeros(1)) > 0
        after = ((gaps > 0) & ~filled).nonzero().flatten()  # indices of segments before a gap
        begins = [begin, *first[after + 1].tolist()]
        ends = [*(last[after] + 1).tolist(), end]
        return [(one * page, other * page) for one, other in zip(begins, ends, strict=True)]


def copy_segments(span: torch.Tensor, run: ByteRun, address: int) -> None:
    """Copy a run's segments out of ``span``, as bytes, to ``address``, without gaps."""
    import numpy as np

    # numpy copies a segment by one memcpy, torch number by number.
    shape = run.count, run.length
    segments = np.ndarray(shape, np.uint8, span.numpy(), 0, (run.stride, 1))
    target = np.frombuffer(memory(address, run.nbytes), np.uint8).reshape(shape)
    np.copyto(target, segments)


def memory(address: int, length: int) -> memoryview:
    """Return the memory at ``address`` as a writable buffer; torch offers no such view."""
    view: memoryview = _memory_view(address, length, _PYBUF_WRITE)
    return view
