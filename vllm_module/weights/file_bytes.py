from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from errno import EINVAL
from pathlib import Path

import torch

from vllm_module.errors import WeightReadError
from vllm_module.messages import printable
from vllm_module.weights import pages
from vllm_module.weights.lease import ReadLease
from vllm_module.weights.regular_file import open_regular
from vllm_module.weights.runs import Run, copy_run, view_of

# A system call a run costs about 1 µs and the GIL: from this length on it no longer shows.
_LONG_RUN = 64 << 10
# Bytes of the file whose pages are mapped by one madvise: large enough to hide the call, small
# enough that the pages are still cached when they are copied.
_WINDOW = 16 << 20
# Bytes of whole rows that are read at once where there is no lease: these are copied twice, and
# more of them would not stay cached in between.
_SCRATCH = 4 << 20
_LONGEST_ROW = 1 << 20


class FileBytes:
    """The bytes of one open file, read straight into memory; safe to use from many threads.

    Long runs are read by ``preadv``. Short ones, a few hundred bytes of each row, are copied
    out of a mapping: a system call for each would cost more than the bytes, and reading whole
    rows moves all that is not kept, which is done only where no lease makes a mapping safe. A file
    that cannot be opened is a CheckpointFormatError, one that cannot be read or has changed a
    WeightReadError.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path
        self._where = printable(path)
        self._fd = open_regular(path, folder)
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        self._identity = self._stat()
        self._lease = ReadLease(self._fd)
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
        self._lease.close()
        with self._lock:  # the number may be another file's as soon as it is closed
            self._finalizer()
            self._map = None  # unmapped when the last copy out of it has ended

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes that are not counted as weights (the header)."""
        data = bytearray(length)
        self._read(offset, memoryview(data))
        return bytes(data)

    def check_unchanged(self) -> None:
        """Refuse to go on with a file that was closed, or written to since it was opened."""
        self._check_open()
        now = self._stat()
        if now != self._identity:
            raise WeightReadError(
                f"{self._where} was changed since it was opened (it had {self.size} bytes and now "
                f"has {now[0]}); open the checkpoint again when nobody writes to it"
            )

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise WeightReadError(f"{self._where} was closed; open the checkpoint again")

    def read_runs(self, runs: Iterable[Run], address: int) -> None:
        """Fill the memory at ``address`` with the runs, one after the other without gaps."""
        self.check_unchanged()
        position = address
        for run in runs:
            # A call of a microsecond for each row costs less than a row of this many bytes.
            if run.count > 1 and run.length < _LONG_RUN and run.stride < _LONGEST_ROW:
                self._copy_short(run, position)
            else:
                for index in range(run.count):
                    view = view_of(position + index * run.length, run.length)
                    self._read(run.offset + index * run.stride, view)
            position += run.length * run.count
        self.check_unchanged()  # what was written meanwhile is a mixture
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
                    f"{self._where} ends at byte {offset}, where {len(view)} more should follow: "
                    "it was cut off while it was read; load again from a file that stays as it is"
                )
            view, offset = view[count:], offset + count

    def _copy_short(self, run: Run, address: int) -> None:
        scratch: torch.Tensor | None = None  # made once: fresh pages cost more than reading them
        first = 0
        while first < run.count:
            with self._lease.hold() as held:
                count = max(1, (_WINDOW if held else _SCRATCH) // run.stride)
                count = min(count, run.count - first)
                part = Run(run.offset + first * run.stride, run.length, run.stride, count)
                to = address + first * run.length
                if held:
                    self.check_unchanged()  # from here on nobody can cut it off
                    self._copy_mapped(part, to)
            if not held:
                if scratch is None:
                    scratch = torch.empty(part.span, dtype=torch.uint8)
                rows = scratch[: part.span]
                self._read(part.offset, view_of(rows.data_ptr(), part.span))
                copy_run(rows, part, to)
            first += count

    def _copy_mapped(self, run: Run, address: int) -> None:
        # The slice keeps the mapping alive, should another thread close the file meanwhile.
        source = self._mapping()[run.offset : run.offset + run.span]
        self._advise(source, run.offset, pages.POPULATE_READ)
        copy_run(source, run, address)
        self._advise(source, run.offset, pages.DONTNEED)

    def _mapping(self) -> torch.Tensor:
        with self._lock:
            if self._map is None:
                self._check_open()
                try:
                    # Private, so that also file systems without shared mappings can serve it.
                    mapped = mmap.mmap(self._fd, self.size, access=mmap.ACCESS_COPY)
                except (OSError, ValueError) as error:
                    raise self._failure(0, f"mapping it into memory failed ({error})") from error
                self._map = torch.frombuffer(mapped, dtype=torch.uint8)
            return self._map

    def _advise(self, source: torch.Tensor, offset: int, advice: int) -> None:
        """Map pages at once, and get an error where touching them is a SIGBUS; or let them go.

        Pages let go stay in the page cache, but no longer count as this process's memory.
        """
        code = pages.advise(source.data_ptr(), source.numel(), advice)
        if code not in (0, EINVAL):  # on an older kernel the copy itself faults the pages in
            raise self._failure(offset, os.strerror(code))

    def _stat(self) -> tuple[int, int]:
        try:
            stat = os.fstat(self._fd)
        except OSError as error:  # closed by another thread, or gone from its server
            raise self._failure(0, str(error)) from error
        return stat.st_size, stat.st_mtime_ns

    def _failure(self, offset: int, reason: str) -> WeightReadError:
        return WeightReadError(
            f"{self._where}: reading at byte {offset} failed: {reason}; check the disk or the "
            "network file system that holds it, and load again"
        )
