"""Loops over rows of codes, which numba compiles for this CPU where the extra ``cpu`` is installed.

This is no operation by itself: it belongs to :mod:`~vllm_module.kernels.matmul.code_rows`.

A row of the weight is dequantized into memory that stays in the cache, and multiplied by all rows
of the input. If that is one row, the kinds used most are multiplied without writing their values.
Loops have lengths that the compiler does not know, because it unrolls those that it knows instead
of computing eight numbers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_AT_ONCE = 16  # outputs that a thread takes at once
# Sums may be taken in any order. Infinities and NaN stay what they are.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": False,
    "fastmath": {"contract", "reassoc", "nsz"},
}


def _half(low: Any, high: Any, halves: Any) -> Any:
    """Return the float16 number of two bytes; ``halves`` has all, by their bits."""
    return halves[np.int32(low) | (np.int32(high) << np.int32(8))]


def _codes(
    kind: Any, rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, out: Any
) -> None:
    """Write row ``n`` of the weight to ``out [codes in a byte, groups, bytes]``."""
    for group in range(rows.shape[1]):
        scale, less = scales[n, group], zero
        if zeros.shape[1]:
            less = np.float32(np.int32(zeros[n, group]))
        if kind == 0:  # int8
            for at in range(rows.shape[2]):
                out[0, group, at] = np.float32(np.int8(rows[n, group, at])) * scale
        elif kind == 1:  # float8_e4m3fn: bit 3 is bit 23 of a float32
            for at in range(rows.shape[2]):
                stored = np.uint32(rows[n, group, at])
                sign = np.uint32((stored & np.uint32(0x80)) << np.uint32(24))
                bits = np.uint32(sign | ((stored & np.uint32(0x7F)) << np.uint32(20)))
                out[0, group, at] = bits.view(np.float32) * np.float32(2.0**120) * scale
        elif kind == 2:  # a code of 8 bits
            for at in range(rows.shape[2]):
                out[0, group, at] = (np.float32(np.int32(rows[n, group, at])) - less) * scale
        elif kind == 3:  # two codes of 4 bits
            for at in range(rows.shape[2]):
                byte = np.int32(rows[n, group, at])
                out[0, group, at] = (np.float32(byte & np.int32(15)) - less) * scale
                out[1, group, at] = (np.float32(byte >> np.int32(4)) - less) * scale
        elif kind == 4:  # two codes of 4 bits, in a table
            for at in range(rows.shape[2]):
                byte = np.int32(rows[n, group, at])
                out[0, group, at] = table[byte & np.int32(15)] * scale
                out[1, group, at] = table[byte >> np.int32(4)] * scale
        else:  # four codes of 2 bits
            for at in range(rows.shape[2]):
                byte, three = np.int32(rows[n, group, at]), np.int32(3)
                out[0, group, at] = (np.float32(byte & three) - less) * scale
                out[1, group, at] = (np.float32((byte >> np.int32(2)) & three) - less) * scale
                out[2, group, at] = (np.float32((byte >> np.int32(4)) & three) - less) * scale
                out[3, group, at] = (np.float32(byte >> np.int32(6)) - less) * scale


def _blocks(kind: Any, rows: Any, n: Any, halves: Any, out: Any) -> None:
    """Write row ``n`` of a weight in a GGUF file's blocks to ``out [1, blocks, values]``."""
    for block in range(rows.shape[1]):
        scale = _half(rows[n, block, 0], rows[n, block, 1], halves)
        if kind == 10:  # Q8_0
            for at in range(out.shape[2]):
                out[0, block, at] = np.float32(np.int8(rows[n, block, at + 2])) * scale
        elif kind == 11:  # Q4_0
            for at in range(out.shape[2] // 2):
                byte = np.int32(rows[n, block, at + 2])
                low, high = np.float32(byte & np.int32(15)), np.float32(byte >> np.int32(4))
                out[0, block, at] = (low - np.float32(8)) * scale
                out[0, block, at + 16] = (high - np.float32(8)) * scale


def _multiplied_at_once(kind: Any) -> Any:
    """Return whether :func:`_product` takes this kind."""
    return kind == 0 or kind == 3 or kind >= 10


def _product(
    kind: Any, rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any
) -> np.float32:
    """Return the product of one row ``x``, of the shape of ``out`` above, and row ``n``."""
    product = np.float32(0)
    for group in range(rows.shape[1]):
        own = np.float32(0)  # of this group, without its scale
        if kind == 0:
            for at in range(rows.shape[2]):
                own += x[0, group, at] * np.float32(np.int8(rows[n, group, at]))
        elif kind == 3:
            less = zero
            if zeros.shape[1]:
                less = np.float32(np.int32(zeros[n, group]))
            for at in range(rows.shape[2]):
                byte = np.int32(rows[n, group, at])
                own += x[0, group, at] * (np.float32(byte & np.int32(15)) - less)
                own += x[1, group, at] * (np.float32(byte >> np.int32(4)) - less)
        elif kind == 10:
            for at in range(x.shape[2]):
                own += x[0, group, at] * np.float32(np.int8(rows[n, group, at + 2]))
        else:
            for at in range(x.shape[2] // 2):
                byte = np.int32(rows[n, group, at + 2])
                low, high = np.float32(byte & np.int32(15)), np.float32(byte >> np.int32(4))
                own += x[0, group, at] * (low - np.float32(8))
                own += x[0, group, at + 16] * (high - np.float32(8))
        if kind < 10:
            product += own * scales[n, group]
        else:
            product += own * _half(rows[n, group, 0], rows[n, group, 1], table)
    return product


def _products(x: Any, values: Any, n: Any, y: Any) -> None:
    """Multiply rows of ``x`` by row ``n`` of the weight: four at once, which read it once."""
    rows, row = x.shape[0], 0
    while row + 4 <= rows:
        sum0, sum1 = np.float32(0), np.float32(0)
        sum2, sum3 = np.float32(0), np.float32(0)
        for at in range(x.shape[1]):
            value = values[at]
            sum0 += x[row, at] * value
            sum1 += x[row + 1, at] * value
            sum2 += x[row + 2, at] * value
            sum3 += x[row + 3, at] * value
        y[n, row], y[n, row + 1], y[n, row + 2], y[n, row + 3] = sum0, sum1, sum2, sum3
        row += 4
    while row < rows:
        sum0 = np.float32(0)
        for at in range(x.shape[1]):
            sum0 += x[row, at] * values[at]
        y[n, row] = sum0
        row += 1


def compiled_multiply(parallel: bool) -> Callable[..., None]:
    """Return what multiplies ``x [rows, input]`` by a weight and writes ``y [output, rows]``.

    Further arguments are those of :class:`~vllm_module.kernels.matmul.code_rows.CodeRows`. The
    first call on a machine compiles for some seconds; numba keeps the result in its cache.

    Args:
        parallel: whether numba's threads share the outputs.

    Raises:
        ImportError: numba is not installed.

    """
    from numba import njit, prange
    from numba.extending import register_jitable

    for function in (_half, _codes, _blocks, _multiplied_at_once, _product, _products):
        register_jitable(inline="always")(function)  # a call takes as long as a row

    def multiply(
        x: Any, kind: Any, rows: Any, scales: Any, zeros: Any, zero: Any, table: Any, y: Any
    ) -> None:
        outputs, groups, columns = rows.shape[0], rows.shape[1], x.shape[1]
        planes = 1
        if kind >= 3 and kind < 6:
            planes = 4 if kind == 5 else 2
        size = columns // (planes * groups)
        for part in prange((outputs + _AT_ONCE - 1) // _AT_ONCE):
            values = np.empty(columns, np.float32)
            out = values.reshape(planes, groups, size)
            alone = x.reshape(len(x), planes, groups, size)[0]
            for n in range(part * _AT_ONCE, min((part + 1) * _AT_ONCE, outputs)):
                if len(x) == 1 and _multiplied_at_once(kind):
                    y[n, 0] = _product(kind, rows, n, scales, zeros, zero, table, alone)
                    continue
                if kind < 10:
                    _codes(kind, rows, n, scales, zeros, zero, table, out)
                else:
                    _blocks(kind, rows, n, table, out)
                _products(x, values, n, y)

    compiled: Callable[..., None] = njit(multiply, parallel=parallel, cache=True, **_OPTIONS)
    return compiled
