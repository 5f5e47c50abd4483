"""Rows of codes with scales, for the loops of :mod:`~vllm_module.kernels.matmul.compiled_rows`.

Each function writes row ``n`` of ``rows [.., groups, bytes]`` to ``out [codes in a byte, groups,
bytes]``, or returns its product with one row of inputs. ``sums`` are those of a product in
:mod:`~vllm_module.kernels.matmul.compiled_blocks`. Scales and zeros are in the row ``of``.
Integers are cut to 32 bits before they become floats, because numba widens them to 64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_module.kernels.rows.compiled_vectors import (
    AS_ONES,
    AS_SIXTEENTHS,
    as_ones,
    as_sixteenths,
    codes,
    floats,
    spread,
    total,
)

INT8, FP8, CODES, IN_TABLE, DOWN, MXFP4 = 0, 1, {8: 2, 4: 3, 2: 5}, 4, 6, 7
PLANES = {3: 2, 4: 2, 5: 4, 7: 2}  # codes in a byte; of other kinds 1


def _less(zeros: Any, zero: Any, n: Any, group: Any) -> Any:
    """Return what is subtracted from the codes of a group."""
    less = zero
    if zeros.shape[1]:
        less = np.float32(np.int32(zeros[n, group]))
    return less


def _int8(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for group in range(rows.shape[1]):
        scale = scales[of, group]
        for at in range(rows.shape[2]):
            out[0, group, at] = np.float32(np.int8(rows[n, group, at])) * scale


def _float8(stored: Any) -> Any:
    """Return the value of a float8_e4m3fn: its bit 3 is bit 23 of a float32.

    No power of two is multiplied, with which the compiler could first multiply a scale.
    """
    mantissa = np.float32(np.int32(stored & np.uint8(7)))
    bits = np.uint32(np.uint32(stored & np.uint8(0x7F)) << np.uint32(20))
    value = np.uint32(bits + np.uint32(120 << 23)).view(np.float32)
    if not np.uint8(stored & np.uint8(0x78)):
        value = mantissa * np.float32(2.0**-9)
    return -value if np.uint8(stored & np.uint8(0x80)) else value


def _fp8(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for group in range(rows.shape[1]):
        scale = scales[of, group]
        for at in range(rows.shape[2]):
            out[0, group, at] = _float8(rows[n, group, at]) * scale


def _eight_bits(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for group in range(rows.shape[1]):
        scale, less = scales[of, group], _less(zeros, zero, of, group)
        for at in range(rows.shape[2]):
            out[0, group, at] = (np.float32(np.int32(rows[n, group, at])) - less) * scale


def _four_bits(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for group in range(rows.shape[1]):
        scale, less = scales[of, group], _less(zeros, zero, of, group)
        for at in range(rows.shape[2]):
            low = np.int32(rows[n, group, at] & np.uint8(15))
            high = np.int32(rows[n, group, at] >> np.uint8(4))
            out[0, group, at] = (np.float32(low) - less) * scale
            out[1, group, at] = (np.float32(high) - less) * scale


def _sixteen(table: Any) -> Any:
    """Return the numbers of a table as a tuple, which stays in registers."""
    first = table[0], table[1], table[2], table[3], table[4], table[5], table[6], table[7]
    last = table[8], table[9], table[10], table[11], table[12], table[13], table[14], table[15]
    return first + last


def _chosen(code: Any, t: Any) -> Any:
    """Return one of 16 numbers by selections, which a loop makes for many codes at once."""
    one, two = bool(np.uint8(code & np.uint8(1))), bool(np.uint8(code & np.uint8(2)))
    a, b = t[1] if one else t[0], t[3] if one else t[2]
    c, d = t[5] if one else t[4], t[7] if one else t[6]
    e, f = t[9] if one else t[8], t[11] if one else t[10]
    g, h = t[13] if one else t[12], t[15] if one else t[14]
    a, c, e, g = b if two else a, d if two else c, f if two else e, h if two else g
    four = bool(np.uint8(code & np.uint8(4)))
    a, e = c if four else a, g if four else e
    return e if np.uint8(code & np.uint8(8)) else a


def _in_table(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    t = _sixteen(table)
    for group in range(rows.shape[1]):
        scale = scales[of, group]
        for at in range(rows.shape[2]):
            byte = rows[n, group, at]
            out[0, group, at] = _chosen(np.uint8(byte & np.uint8(15)), t) * scale
            out[1, group, at] = _chosen(np.uint8(byte >> np.uint8(4)), t) * scale


def _power(exponent: Any) -> Any:
    """Return 2^(exponent - 127), and NaN for 255: the bits of a float32 are its exponent."""
    if exponent == np.uint8(255):
        return np.float32(np.nan)
    bits = np.uint32(1 << 22) if exponent == np.uint8(0) else np.uint32(exponent) << np.uint32(23)
    return np.uint32(bits).view(np.float32)


def _mxfp4(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    """Write codes in a table times powers of two, whose exponents are in ``zeros``."""
    t = _sixteen(table)
    for group in range(rows.shape[1]):
        scale = _power(zeros[of, group])
        for at in range(rows.shape[2]):
            byte = rows[n, group, at]
            out[0, group, at] = _chosen(np.uint8(byte & np.uint8(15)), t) * scale
            out[1, group, at] = _chosen(np.uint8(byte >> np.uint8(4)), t) * scale


def _two_bits(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for group in range(rows.shape[1]):
        scale, less = scales[of, group], _less(zeros, zero, of, group)
        for at in range(rows.shape[2]):
            byte, three = rows[n, group, at], np.uint8(3)
            second, third = byte >> np.uint8(2), byte >> np.uint8(4)
            out[0, group, at] = (np.float32(np.int32(byte & three)) - less) * scale
            out[1, group, at] = (np.float32(np.int32(second & three)) - less) * scale
            out[2, group, at] = (np.float32(np.int32(third & three)) - less) * scale
            out[3, group, at] = (np.float32(np.int32(byte >> np.uint8(6))) - less) * scale


def _down(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    """Write one of eight outputs that share a word; its code is ``shift`` bits up."""
    for group in range(rows.shape[1]):
        scale, less = scales[of, group], _less(zeros, zero, of, group)
        for at in range(rows.shape[2]):
            code = np.int32(np.uint32(rows[n, group, at]) >> shift & np.uint32(15))
            out[0, group, at] = (np.float32(code) - less) * scale


def _int8_product(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any, sums: Any
) -> Any:
    product = np.float32(0)
    for group in range(rows.shape[1]):
        own = np.float32(0)  # of this group, without its scale
        for at in range(rows.shape[2]):
            own += x[0, group, at] * np.float32(np.int8(rows[n, group, at]))
        product += own * scales[n, group]
    return product


def _fp8_product(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any, sums: Any
) -> Any:
    product = np.float32(0)
    for group in range(rows.shape[1]):
        own = np.float32(0)
        for at in range(rows.shape[2]):
            own += x[0, group, at] * _float8(rows[n, group, at])
        product += own * scales[n, group]
    return product


def _four_bit_product(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any, sums: Any
) -> Any:
    """Multiply sixteen bytes at once, of which a group has a multiple.

    One loop has them all, because starting one for each group takes longer than its work.
    """
    groups, size = rows.shape[1], rows.shape[2]
    product, begin, second = spread(np.float32(0)), n * groups * size, groups * size
    group, left = 0, size
    for at in range(0, groups * size, 16):
        if not left:
            group, left = group + 1, size
        left -= 16
        less, byte = _less(zeros, zero, n, group), codes(rows, begin + at)
        low = as_ones(byte & 15) - spread(np.float32(AS_ONES) + less)
        high = as_sixteenths(byte & 0xF0) - spread(np.float32(AS_SIXTEENTHS) + less)
        own = low * floats(x, at) + high * floats(x, second + at)
        product = product + own * spread(scales[n, group])
    return total(product)


USED = (_less, _float8, _sixteen, _chosen, _power)
VALUES = {
    INT8: _int8,
    FP8: _fp8,
    CODES[8]: _eight_bits,
    CODES[4]: _four_bits,
    IN_TABLE: _in_table,
    CODES[2]: _two_bits,
    DOWN: _down,
    MXFP4: _mxfp4,
}
# Without writing values.
PRODUCTS = {INT8: _int8_product, FP8: _fp8_product, CODES[4]: _four_bit_product}
