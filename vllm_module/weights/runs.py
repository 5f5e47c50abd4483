from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import gcd

import torch

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

    @property
    def span(self) -> int:
        """Bytes from the first piece's first to the last one's last."""
        return (self.count - 1) * self.stride + self.length


def copy_run(source: torch.Tensor, run: Run, address: int) -> None:
    """Copy a run to ``address``, without gaps; ``source`` is the bytes of its span."""
    unit = gcd(8, source.data_ptr(), run.length, run.stride, address)
    dtype, columns = _UNITS[unit], run.length // unit
    rows_from = source.view(dtype).as_strided((run.count, columns), (run.stride // unit, 1))
    rows_to = torch.frombuffer(view_of(address, run.count * run.length), dtype=dtype)
    rows_to = rows_to.view(run.count, columns)
    step = max(1, (_SERIAL_ELEMENTS - 1) // columns)
    for row in range(0, run.count, step):
        rows_to[row : row + step].copy_(rows_from[row : row + step])


def view_of(address: int, length: int) -> memoryview:
    """See the memory at ``address`` as a writable buffer, which a tensor does not offer."""
    view: memoryview = _memory_view(address, length, _PYBUF_WRITE)
    return view
