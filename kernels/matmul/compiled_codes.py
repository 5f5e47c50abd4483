"""Rows of codes with scales, for the loops of :mod:`~vllm_module.kernels.matmul.compiled_rows`.

Each function writes row ``n`` of ``rows [.., groups, bytes]`` to ``out [codes in a byte, groups,
bytes]``, or returns its product with one row of inputs. Scales and zeros are in the row ``of``.
Integers are cut to 32 bits before they become floats, because numba widens them to 64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

INT8, FP8, CODES, IN_TABLE, DOWN = 0, 1, {8: 2, 4: 3, 2: 5}, 4, 6
PLANES = {3: 2, 4: 2, 5: 4}  # codes in a byte; of other kinds 1


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


def _fp8(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    """Write float8_e4m3fn: bit 3 is bit 23 of a float32."""
    for group in range(rows.shape[1]):
        scale = scales[of, group]
        for at in range(rows.shape[2]):
            stored = np.uint32(rows[n, group, at])
            sign = np.uint32((stored & np.uint32(0x80)) << np.uint32(24))
            bits = np.uint32(sign | ((stored & np.uint32(0x7F)) << np.uint32(20)))
            out[0, group, at] = bits.view(np.float32) * np.float32(2.0**120) * scale


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


def _in_table(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for group in range(rows.shape[1]):
        scale = scales[of, group]
        for at in range(rows.shape[2]):
            out[0, group, at] = table[rows[n, group, at] & np.uint8(15)] * scale
            out[1, group, at] = table[rows[n, group, at] >> np.uint8(4)] * scale


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


def _int8_product(rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any) -> Any:
    product = np.float32(0)
    for group in range(rows.shape[1]):
        own = np.float32(0)  # of this group, without its scale
        for at in range(rows.shape[2]):
            own += x[0, group, at] * np.float32(np.int8(rows[n, group, at]))
        product += own * scales[n, group]
    return product


def _four_bit_product(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any
) -> Any:
    product = np.float32(0)
    for group in range(rows.shape[1]):
        own, less = np.float32(0), _less(zeros, zero, n, group)
        for at in range(rows.shape[2]):
            low = np.int32(rows[n, group, at] & np.uint8(15))
            high = np.int32(rows[n, group, at] >> np.uint8(4))
            own += x[0, group, at] * (np.float32(low) - less)
            own += x[1, group, at] * (np.float32(high) - less)
        product += own * scales[n, group]
    return product


USED = (_less,)
VALUES = {
    INT8: _int8,
    FP8: _fp8,
    CODES[8]: _eight_bits,
    CODES[4]: _four_bits,
    IN_TABLE: _in_table,
    CODES[2]: _two_bits,
    DOWN: _down,
}
PRODUCTS = {INT8: _int8_product, CODES[4]: _four_bit_product}  # without writing values
