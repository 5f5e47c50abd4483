"""Numbers in memory, float32 or bfloat16, in loops that numba compiles for this CPU.

A loop computes in float32, and rounds to bfloat16 where torch's operations round. It has
``WRITTEN`` as a closure, because numba's cache does not see that functions of other files change.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from vllm_module.kernels.matmul.torch_threads import numbers

WRITTEN = zlib.crc32(Path(__file__).read_bytes()) or 1


def rounded(value: Any) -> Any:
    """Return a float32 rounded to the nearest bfloat16, to the even one of two; NaN stays NaN."""
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    near = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd)
    near = np.uint32(near & np.uint32(0xFFFF0000))
    return value if value != value else near.view(np.float32)


def load(address: Any, narrow: Any, out: Any) -> None:
    """Read as many numbers as ``out`` has, which are bfloat16 if ``narrow``."""
    if narrow:
        bits = numbers(address, np.uint16, (len(out),))
        for at in range(len(out)):
            out[at] = np.uint32(np.uint32(bits[at]) << np.uint32(16)).view(np.float32)
    else:
        wide = numbers(address, np.float32, (len(out),))
        for at in range(len(out)):
            out[at] = wide[at]


def store(values: Any, address: Any, narrow: Any) -> None:
    """Write numbers, as bfloat16 if ``narrow``."""
    if narrow:
        bits = numbers(address, np.uint16, (len(values),))
        for at in range(len(values)):
            near = np.float32(rounded(values[at])).view(np.uint32)
            bits[at] = np.uint16(np.uint32(near >> np.uint32(16)))
    else:
        wide = numbers(address, np.float32, (len(values),))
        for at in range(len(values)):
            wide[at] = values[at]


USED = rounded, load, store
