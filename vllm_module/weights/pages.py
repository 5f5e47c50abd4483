"""What this process tells the kernel about its memory; without Linux it tells nothing."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

POPULATE_READ = 22  # Linux 5.14; Python's mmap has no name for it
DONTNEED = 4
_HUGEPAGE = 14
_HUGE = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(address: int, length: int, advice: int) -> int:
    """Give ``advice`` about the pages that a range of memory touches; return 0 or an errno."""
    if sys.platform != "linux":
        return 0
    start = address - address % mmap.PAGESIZE
    return ctypes.get_errno() if _libc.madvise(start, address + length - start, advice) else 0


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for 2 MiB pages behind a tensor in host memory that nobody has written to yet.

    A first load is bound by the faults of its first touch, and this takes most of them away.
    Whether the kernel follows changes nothing else.
    """
    if tensor.is_cpu and tensor.nbytes >= 2 * _HUGE:
        start = -(-tensor.data_ptr() // _HUGE) * _HUGE
        end = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE
        if end > start:
            advise(start, end - start, _HUGEPAGE)
