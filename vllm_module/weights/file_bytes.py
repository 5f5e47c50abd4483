from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from errno import EINVAL
from math import gcd
from pathlib import Path

import torch

from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights import pages

# A system call a run costs about 1 µs and the GIL: from this length on it no longer shows.
_LONG_RUN = 64 << 10
# Bytes of the file whose pages are mapped by one madvise: large enough to hide the call, small
# enough that the pages are still cached when they are copied.
_WINDOW = 16 << 20
# torch starts its own threads for a copy of this many elements: readers are threads already.
_SERIAL_ELEMENTS = 32768
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_view.restype = ctypes.py_object
_PYBUF_WRITE = 0x200


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` pieces of ``length`` bytes, the first at ``offset``, one every ``stride`` bytes."""

    offset: int
    length: int
    stride: int
    count: int


class FileBytes:
    """The bytes of one open file, read straight into memory; safe to use from many threads.

    Long runs are read by ``preadv``. Short ones, a few hundred bytes of each row, are copied
    out of a mapping: a system call for each would cost more than the bytes, and reading whole
    rows would move all that is not kept. A file that cannot be opened is a
    CheckpointFormatError, one that cannot be read or has changed a WeightReadError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise CheckpointFormatError(f"{path} is not a file; check the path, or download it")
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointFormatError(
                f"{path} cannot be opened: {error.strerror}; check its permissions"
            ) from error
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        self._identity = self._stat()
        self._lock = threading.Lock()
        self._bytes_read = 0
        self._map: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""
        return self._identity[0]

    @property
    def bytes_read(self) -> int:
        """Bytes delivered by ``read_runs`` so far."""
        return self._bytes_read

    def close(self) -> None:
        """Close the file; reading from it afterwards is a WeightReadError."""
        self._finalizer()
        self._map = None  # unmapped when the last copy out of it has ended

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes that are not counted as weights (the header)."""
        data = bytearray(length)
        self._read(offset, memoryview(data))
        return bytes(data)

    def read_runs(self, runs: Iterable[Run], address: int) -> None:
        """Fill the memory at ``address`` with the runs, one after the other without gaps."""
        self._check_unchanged()
        position = address
        for run in runs:
            if run.count > 1 and run.length < _LONG_RUN:
                self._copy_mapped(run, position)
            else:
                for index in range(run.count):
                    view = _view(position + index * run.length, run.length)
                    self._read(run.offset + index * run.stride, view)
            position += run.length * run.count
        with self._lock:
            self._bytes_read += position - address

    def _read(self, offset: int, view: memoryview) -> None:
        while view:
            try:
                count = os.preadv(self._fd, [view], offset)
            except OSError as error:
                raise self._failure(offset, str(error)) from error
            if count == 0:
                raise WeightReadError(
                    f"{self.path} ends at byte {offset}, where {len(view)} more should follow: "
                    "it was cut off while it was read; load again from a file that stays as it is"
                )
            view, offset = view[count:], offset + count

    def _copy_mapped(self, run: Run, address: int) -> None:
        # The slice keeps the mapping alive, should another thread close the file meanwhile.
        span = (run.count - 1) * run.stride + run.length
        source = self._mapping()[run.offset : run.offset + span]
        unit = gcd(8, run.offset, run.length, run.stride, address)
        dtype, columns = _UNITS[unit], run.length // unit
        rows_from = source.view(dtype).as_strided((run.count, columns), (run.stride // unit, 1))
        rows_to = torch.frombuffer(_view(address, run.count * run.length), dtype=dtype)
        rows_to = rows_to.view(run.count, columns)
        window = max(1, _WINDOW // run.stride)
        step = max(1, (_SERIAL_ELEMENTS - 1) // columns)
        for first in range(0, run.count, window):
            last = min(first + window, run.count)
            start = first * run.stride
            length = (last - first - 1) * run.stride + run.length
            begin = source.data_ptr() + start
            self._advise(begin, run.offset + start, length, pages.POPULATE_READ)
            for row in range(first, last, step):
                stop = min(row + step, last)
                rows_to[row:stop].copy_(rows_from[row:stop])
            self._advise(begin, run.offset + start, length, pages.DONTNEED)

    def _mapping(self) -> torch.Tensor:
        with self._lock:
            if self._map is None:
                try:
                    # Private, so that also file systems without shared mappings can serve it.
                    mapped = mmap.mmap(self._fd, self.size, access=mmap.ACCESS_COPY)
                except (OSError, ValueError) as error:
                    raise self._failure(0, f"mapping it into memory failed ({error})") from error
                self._map = torch.frombuffer(mapped, dtype=torch.uint8)
            return self._map

    def _advise(self, address: int, offset: int, length: int, advice: int) -> None:
        """Map pages at once, and get an error where touching them is a SIGBUS; or let them go.

        Pages let go stay in the page cache, but no longer count as this process's memory.
        """
        code = pages.advise(address, length, advice)
        if code not in (0, EINVAL):  # on an older kernel the copy itself faults the pages in
            raise self._failure(offset, os.strerror(code))

    def _stat(self) -> tuple[int, int]:
        stat = os.fstat(self._fd)
        return stat.st_size, stat.st_mtime_ns

    def _check_unchanged(self) -> None:
        if not self._finalizer.alive:
            raise WeightReadError(f"{self.path} was closed; open the checkpoint again")
        if self._stat() != self._identity:
            raise WeightReadError(
                f"{self.path} was changed since it was opened (it had {self.size} bytes and now "
                f"has {self._stat()[0]}); open the checkpoint again when nobody writes to it"
            )

    def _failure(self, offset: int, reason: str) -> WeightReadError:
        return WeightReadError(
            f"{self.path}: reading at byte {offset} failed: {reason}; check the disk or the "
            "network file system that holds it, and load again"
        )


def _view(address: int, length: int) -> memoryview:
    """See the memory at ``address`` as a writable buffer, which a tensor does not offer."""
    view: memoryview = _memory_view(address, length, _PYBUF_WRITE)
    return view
