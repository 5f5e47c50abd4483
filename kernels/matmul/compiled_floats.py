"""Rows of floats, for the loops of :mod:`~vllm_module.kernels.matmul.compiled_rows`.

Functions are those of :mod:`~vllm_module.kernels.matmul.compiled_codes`, without scales, zeros and
table. Floats of 16 bits are read as integers. Each kind has functions of its own, because numba
finds what it has compiled by the names of functions in a module.
"""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT32, BFLOAT16, FLOAT16 = 20, 21, 22


def _bfloat16(stored: Any) -> Any:
    """Return the value of a bfloat16: its bits are the upper ones of a float32."""
    return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)


def _float16(stored: Any) -> Any:
    """Return the value of a float16: its bit 10 is bit 23 of a float32.

    No power of two is multiplied, as in ``_float8``, but for subnormal numbers.
    """
    magnitude = np.uint32(np.uint16(stored & np.uint16(0x7FFF)))
    exponent = np.uint16(stored & np.uint16(0x7C00))
    last = exponent == np.uint16(0x7C00)  # infinity and NaN
    more = np.uint32(224 << 23) if last else np.uint32(112 << 23)
    value = np.uint32(np.uint32(magnitude << np.uint32(13)) + more).view(np.float32)
    if exponent == np.uint16(0):
        value = np.float32(np.int32(magnitude)) * np.float32(2.0**-24)
    return -value if np.uint16(stored & np.uint16(0x8000)) else value


def _float32_values(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for at in range(rows.shape[2]):
        out[0, 0, at] = rows[n, 0, at]


def _bfloat16_values(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for at in range(rows.shape[2]):
        out[0, 0, at] = _bfloat16(rows[n, 0, at])


def _float16_values(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for at in range(rows.shape[2]):
        out[0, 0, at] = _float16(rows[n, 0, at])


def _float32_product(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any, sums: Any
) -> Any:
    product = np.float32(0)
    for at in range(rows.shape[2]):
        product += x[0, 0, at] * rows[n, 0, at]
    return product


def _bfloat16_product(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any, sums: Any
) -> Any:
    product = np.float32(0)
    for at in range(rows.shape[2]):
        product += x[0, 0, at] * _bfloat16(rows[n, 0, at])
    return product


def _float16_product(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any, sums: Any
) -> Any:
    product = np.float32(0)
    for at in range(rows.shape[2]):
        product += x[0, 0, at] * _float16(rows[n, 0, at])
    return product


USED = (_bfloat16, _float16)
VALUES = {FLOAT32: _float32_values, BFLOAT16: _bfloat16_values, FLOAT16: _float16_values}
PRODUCTS = {FLOAT32: _float32_product, BFLOAT16: _bfloat16_product, FLOAT16: _float16_product}
