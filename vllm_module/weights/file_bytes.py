"""Reading runs of bytes of an open file into memory, by preadv or from a mapping."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from errno import EINVAL
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_module.base.messages import printable
from vllm_module.errors import WeightReadError
from vllm_module.weights import os_pages
from vllm_module.weights.cut_rows import ByteRun, copy_segments, memory
from vllm_module.weights.regular_file import ReadLease, open_again, open_regular

if TYPE_CHECKING:
    import torch

# One preadv costs about 1 µs and the GIL. For segments of this length that is negligible.
_LONG_SEGMENT = 64 << 10
# preadv takes 1,024 on Linux.
_MOST_VIEWS = 256
# A row of this length takes longer to read whole than a preadv for its segment.
_LONGEST_ROW = 1 << 20
# The same limit where whole rows are read into scratch memory: bytes between two segments.
_LONGEST_GAP = 16 << 10
# Segments of this length use the kernel's read-ahead: its larger folios are copied faster, and
# the bytes it reads past the end are few beside them.
_SEQUENTIAL = 8 << 20
# Bytes of the file that one madvise maps: enough to hide the call, few enough to stay in the CPU's
# cache until they are copied.
_WINDOW = 16 << 20
# Bytes that are read at once without a lease. They are copied twice, so they should still be in
# the CPU's cache for the second copy.
_SCRATCH = 4 << 20


class FileBytes:
    """The bytes of one open file, which many threads may read into memory at once.

    Long segments are read by ``preadv`` straight into the destination. For segments of a few
    hundred bytes (columns cut out of each row) a system call would cost more than the bytes: they
    are copied out of a mapping of the file under a lease, which makes that safe. Without a lease,
    whole rows are read and cut in memory.

    If the page cache lacks a run that is cut out of a tensor, all OS pages that the run touches
    are requested at once before they are read. If OS pages between them are not wanted, each
    segment is read by ``preadv``: a mapping of the whole span would read those too.

    A file that cannot be opened is a CheckpointFormatError, one that cannot be read or has changed
    a WeightReadError. torch is imported by the first copy, because headers are read without it.
    """

    remote = False

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path
        self._where = printable(path)
        self._fd = open_regular(path, folder)
        self._descriptors = [self._fd]
        self._finalizer = weakref.finalize(self, _close, self._descriptors)
        self._identity = self._stat()
        self.size = self._identity[0]  # when it was opened
        self._lease = ReadLease(self._fd)
        self._lock = threading.Lock()
        self._bytes_read = 0
        self._mapping: torch.Tensor | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes that ``read_runs`` has read so far."""
        return self._bytes_read

    def close(self) -> None:
        """Close the file; reading from it afterwards is a WeightReadError."""
        self._lease.close()
        with self._lock:  # after closing, the descriptor's number may be reused for another file
            self._finalizer()
            self._mapping = None  # is unmapped when the last copy out of it has ended

    def interrupt(self) -> None:
        """Do nothing: a read of a file ends soon."""

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes (of the header) without counting them in ``bytes_read``."""
        data = bytearray(length)
        self._read(offset, [memoryview(data)], self._fd)
        return bytes(data)

    def read_ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: the kernel reads ahead of ``read_bytes``."""

    def check_unchanged(self) -> None:
        """Raise WeightReadError if the file was closed, or has changed since it was opened."""
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

    def read_runs(self, runs: Iterable[tuple[ByteRun, int]]) -> None:
        """Read each run to its address in memory; its segments are stored there without gaps."""
        self.check_unchanged()
        nbytes = 0
        singly: list[tuple[ByteRun, int]] = []
        together: list[tuple[ByteRun, int]] = []
        for run, address in runs:
            nbytes += run.nbytes
            if run.count == 1 or run.length >= _LONG_SEGMENT or run.stride >= _LONGEST_ROW:
                if _is_scattered(run):
                    self._read_ahead_of_segments(run)
                singly.append((run, address))
            else:
                for window in run.windows(_WINDOW, address):
                    (singly if self._read_ahead_of_rows(window[0]) else together).append(window)
        self._read_singly(singly)
        if together:
            self._read_rows(together)
        # A write in the meantime would have left a mixture of old and new bytes.
        self.check_unchanged()
        with self._lock:
            self._bytes_read += nbytes

    def _read_ahead_of_segments(self, run: ByteRun) -> None:
        descriptor = self._scattered()
        for index in range(run.count):
            offset = run.offset + index * run.stride
            if not os_pages.cached(descriptor, offset, run.length):
                os_pages.read_ahead(descriptor, offset, run.length)

    def _read_ahead_of_rows(self, run: ByteRun) -> bool:
        """Start read-ahead of a run's OS pages; return whether pages between them are left out."""
        descriptor = self._scattered()
        if os_pages.cached(descriptor, run.offset, run.span):
            return False
        pages = run.pages()
        for begin, end in pages:
            os_pages.read_ahead(descriptor, begin, end - begin)
        return len(pages) > 1

    def _read_singly(self, parts: list[tuple[ByteRun, int]]) -> None:
        """Read each segment by ``preadv``; runs that follow each other in the file by one."""
        parts.sort(key=lambda part: part[0].offset)
        views: list[memoryview] = []
        begin = end = 0
        for run, address in parts:
            if run.count > 1 or _is_scattered(run):
                self._read_segments(run, address)
                continue
            if run.offset != end or len(views) == _MOST_VIEWS:
                self._read(begin, views, self._fd)
                begin = end = run.offset
                views = []
            views.append(memory(address, run.length))
            end += run.length
        self._read(begin, views, self._fd)

    def _read_segments(self, run: ByteRun, address: int) -> None:
        descriptor = self._scattered() if _is_scattered(run) else self._fd
        view = memory(address, run.nbytes)
        for index in range(run.count):
            segment = view[index * run.length : (index + 1) * run.length]
            self._read(run.offset + index * run.stride, [segment], descriptor)

    def _scattered(self) -> int:
        """Return a descriptor on which the kernel does no read-ahead.

        On the ordinary one, the kernel takes rows that follow each other for a stream and reads up
        to its read-ahead window between and behind them. If no second descriptor can be opened, the
        ordinary one is returned.
        """
        with self._lock:
            self._check_open()
            if len(self._descriptors) == 1:
                try:
                    self._descriptors.append(open_again(self._fd))
                except OSError:
                    return self._fd
            return self._descriptors[1]

    def _read(self, offset: int, views: Sequence[memoryview], descriptor: int) -> None:
        """Fill ``views``, one after the other, with the bytes at ``offset``."""
        views = [view for view in views if view]
        while views:
            try:
                count = os.preadv(descriptor, views, offset)
            except OSError as error:
                raise self._failure(offset, str(error)) from error
            if count == 0:
                missing = sum(map(len, views))
                raise WeightReadError(
                    f"{self._where} ends at byte {offset}, where {missing} more should follow: "
                    "it was cut off while it was read; load again from a file that stays as it is"
                )
            offset += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def _read_rows(self, parts: list[tuple[ByteRun, int]]) -> None:
        """Copy short segments out of their rows; each part spans at most _WINDOW bytes."""
        while parts:
            spans = accumulate(run.span for run, _ in parts)
            # A writer waits while the lease is held, so each turn is short.
            count = max(1, sum(span <= _WINDOW for span in spans))
            with self._lease.hold() as leased:
                if leased:
                    for part in parts[:count]:
                        self._copy_mapped(*part)
            if not leased:
                self._read_rows_whole(parts[:count])
            parts = parts[count:]

    def _read_rows_whole(self, parts: list[tuple[ByteRun, int]]) -> None:
        import torch

        # Shared by all turns: allocating costs more than reading.
        scratch: torch.Tensor | None = None
        for run, address in parts:
            if run.stride - run.length >= _LONGEST_GAP:
                self._read_segments(run, address)
                continue
            for rows, target in run.windows(_SCRATCH, address):
                if scratch is None or scratch.numel() < rows.span:
                    scratch = torch.empty(rows.span, dtype=torch.uint8, device="cpu")
                span = scratch[: rows.span]
                view = memory(span.data_ptr(), rows.span)
                self._read(rows.offset, [view], self._scattered())
                copy_segments(span, rows, target)

    def _copy_mapped(self, run: ByteRun, address: int) -> None:
        """Copy a run out of the mapping; the caller holds the lease."""
        with self._lock:
            self.check_unchanged()  # the lease prevents truncation from here on
            if self._mapping is None:
                self._mapping = self._map()
            # The slice keeps the mapping alive if another thread closes the file.
            source = self._mapping[run.offset : run.offset + run.span]
        start, length = source.data_ptr(), source.numel()
        # One madvise maps all OS pages. It fails where touching a page would raise SIGBUS.
        code = os_pages.advise(start, length, os_pages.POPULATE_READ)
        if code not in (0, EINVAL):  # an older kernel maps each OS page on first touch
            raise self._failure(run.offset, os.strerror(code))
        copy_segments(source, run, address)
        # The OS pages stay in the page cache, but no longer count as memory of this process.
        os_pages.advise(start, length, os_pages.DONTNEED)

    def _map(self) -> torch.Tensor:
        import torch

        try:
            # The mapping is private, because some file systems have no shared mappings.
            mapped = mmap.mmap(self._fd, self.size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise self._failure(0, f"mapping it into memory failed ({error})") from error
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def _stat(self) -> tuple[int, int]:
        try:
            stat = os.fstat(self._fd)
        except OSError as error:  # closed by another thread, or deleted on its server
            raise self._failure(0, str(error)) from error
        return stat.st_size, stat.st_mtime_ns

    def _failure(self, offset: int, reason: str) -> WeightReadError:
        return WeightReadError(
            f"{self._where}: reading at byte {offset} failed: {reason}; check the disk or the "
            "network file system that holds it, and load again"
        )


def _is_scattered(run: ByteRun) -> bool:
    """Return whether most of what the kernel would read ahead of the run is not part of it."""
    return run.cut and run.length < _SEQUENTIAL


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
