"""Numbers in memory, float32 or bfloat16, in loops that numba compiles for this CPU.

A loop computes in float32, and rounds to bfloat16 where torch's operations round.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_module.kernels.matmul.torch_threads import numbers


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


def exp(x: Any) -> Any:
    """Return the exponential of a float32, exact to its last bit: it is computed in float64.

    It is two to the power of an integer, which are bits of a float64, times a Taylor series.
    """
    power = min(max(np.float64(x) * 1.4426950408889634, -1000.0), 1000.0)
    whole = np.floor(power + 0.5)
    f = (power - whole) * 0.6931471805599453  # at most 0.35
    series = 1 / 720 + f * (1 / 5040 + f * (1 / 40320))
    series = 1 / 2 + f * (1 / 6 + f * (1 / 24 + f * (1 / 120 + f * series)))
    scale = np.int64(np.int64(np.int64(whole) + np.int64(1023)) << np.int64(52)).view(np.float64)
    value = np.float32((1 + f * (1 + f * series)) * scale)
    return x if x != x else value


def silu(x: Any) -> Any:
    """Return SiLU of a float32."""
    return x / (1 + exp(-x))


USED = rounded, load, store
