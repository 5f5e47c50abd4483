"""Advice to the operating system about OS pages of memory and of files.

Advice is given on Linux only; elsewhere the functions do nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

POPULATE_READ = 22  # Linux 5.14; Python's mmap has no name for it
DONTNEED = 4
_HUGEPAGE = 14
_HUGE_PAGE_BYTES = 2 << 20
# For one piece of advice, the kernel reads at most a request, or its read-ahead window, of bytes.
_ADVISED_BYTES = 512 << 10
_SAMPLES = 16  # positions in a range whose OS pages are checked if the kernel cannot count them
_CACHESTAT = 451  # Linux 6.5; neither C libraries nor Python have a name for it
# Machines where the system call has this number.
_HAS_CACHESTAT = sys.platform == "linux" and os.uname().machine in (
    "x86_64", "aarch64", "riscv64", "ppc64le", "s390x"
)  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(address: int, length: int, advice: int) -> int:
    """Call ``madvise`` for the OS pages that a range of memory touches; return 0 or an errno."""
    if sys.platform != "linux":
        return 0
    start = address - address % mmap.PAGESIZE
    return ctypes.get_errno() if _libc.madvise(start, address + length - start, advice) else 0


def cached(descriptor: int, offset: int, length: int) -> bool:
    """Return whether the page cache has all OS pages of a range of a file.

    The kernel's count is exact. Without it (an older kernel, another user's file, overlayfs), 16
    bytes are read without waiting, and the answer is a guess. On systems with neither, the answer
    is True, because nothing can be read ahead there.
    """
    first, last = offset // mmap.PAGESIZE, (offset + length - 1) // mmap.PAGESIZE
    count = _count_cached(descriptor, offset, length)
    pages = (first + (last - first) * sample // (_SAMPLES - 1) for sample in range(_SAMPLES))
    places = (page * mmap.PAGESIZE for page in pages)
    return count > last - first or (
        count == 0 and all(is_cached(descriptor, place) is not False for place in places)
    )


def _count_cached(descriptor: int, offset: int, length: int) -> int:
    """Return how many OS pages of a range are in the page cache, or 0 if that is unknown."""
    if not _HAS_CACHESTAT:
        return 0
    counts = (ctypes.c_uint64 * 5)()
    bounds = (ctypes.c_uint64 * 2)(offset, length)
    failed: int = _libc.syscall(_CACHESTAT, descriptor, bounds, counts, 0)
    return 0 if failed else counts[0]


def is_cached(descriptor: int, offset: int) -> bool | None:
    """Return whether the page cache has a byte of a file; ``None`` where nothing can tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:  # this file system cannot tell
        return None


def read_ahead(descriptor: int, offset: int, length: int) -> None:
    """Ask the kernel to start reading the OS pages of a range of a file, and no others.

    The kernel reads the pages that the page cache lacks. This function returns before they are
    read, or when the disk's queue has space for them.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    end = offset + length
    # The file system takes no advice; or the file is closed, and the next read raises.
    with suppress(OSError):
        for begin in range(offset, end, _ADVISED_BYTES):
            size = min(_ADVISED_BYTES, end - begin)
            os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_WILLNEED)


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Request OS pages of 2 MiB for a new tensor in host memory that was not written to yet.

    Faults at the first touch of each OS page take most of the time of a first load; huge pages
    avoid most of them. If the kernel refuses, the tensor has ordinary OS pages.
    """
    if tensor.is_cpu and tensor.nbytes >= 2 * _HUGE_PAGE_BYTES:
        start = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if end > start:
            advise(start, end - start, _HUGEPAGE)
