"""Blocks of GGUF files, for the loops of :mod:`~vllm_module.kernels.matmul.compiled_rows`.

Functions are those of :mod:`~vllm_module.kernels.matmul.compiled_codes`, with blocks for groups and
all float16 numbers, by their bits, for a table. Scales are in the blocks.

Formulas: ``dequantize_row_*`` in ggml-quants.c of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import Any

import numpy as np

BLOCKS = {"Q8_0": 10, "Q4_0": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}


def _half(low: Any, high: Any, halves: Any) -> Any:
    """Return the float16 number of two bytes; ``halves`` has all, by their bits."""
    return halves[np.uint32(low) | (np.uint32(high) << np.uint32(8))]


def _six_bits(own: Any, rest: Any, low: Any, upper: Any) -> Any:
    """Return a scale or offset: six bits of ``own``, or four of ``rest`` and two of ``own``."""
    high = np.int32((rest >> low & np.uint8(15)) | own >> np.uint8(6) << np.uint8(4))
    return np.float32(high if upper else np.int32(own & np.uint8(63)))


def _low(byte: Any) -> Any:
    """Return the four low bits; cut to a byte, because numba widens results to 64 bits."""
    return np.uint8(byte & np.uint8(15))


def _high(byte: Any) -> Any:
    return np.uint8(byte >> np.uint8(4))


def _float(code: Any) -> Any:
    return np.float32(np.int32(code))


def _scale_of_run(rows: Any, n: Any, block: Any, run: Any, halves: Any) -> Any:
    """Return scale and offset of a run of 32 values in a block of Q4_K or Q5_K.

    Bytes 4 to 7 are for scales, 8 to 11 for offsets, and 12 to 15 for both.
    """
    by = _half(rows[n, block, 0], rows[n, block, 1], halves)
    less_by = _half(rows[n, block, 2], rows[n, block, 3], halves)
    upper, four = run >= 4, run % 4
    rest, own = rows[n, block, 12 + four], rows[n, block, 8 + four]
    scale = by * _six_bits(rows[n, block, 4 + four], rest, np.uint8(0), upper)
    return scale, less_by * _six_bits(own, rest, np.uint8(4), upper)


def _q8_0(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for block in range(rows.shape[1]):
        scale = _half(rows[n, block, 0], rows[n, block, 1], table)
        for at in range(out.shape[2]):
            out[0, block, at] = np.float32(np.int8(rows[n, block, at + 2])) * scale


def _q4_0(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for block in range(rows.shape[1]):
        scale = _half(rows[n, block, 0], rows[n, block, 1], table)
        for at in range(out.shape[2] // 2):
            byte = rows[n, block, at + 2]
            low, high = np.int32(byte & np.uint8(15)), np.int32(byte >> np.uint8(4))
            out[0, block, at] = (np.float32(low) - np.float32(8)) * scale
            out[0, block, at + 16] = (np.float32(high) - np.float32(8)) * scale


def _q4_k(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for block in range(rows.shape[1]):
        for pair in range(4):  # of runs of 32 values, which share 32 bytes
            first, second, begin = 16 + 32 * pair, 64 * pair + 32, 64 * pair
            scale, less = _scale_of_run(rows, n, block, 2 * pair, table)
            upper, less_upper = _scale_of_run(rows, n, block, 2 * pair + 1, table)
            for at in range(min(out.shape[2], 32)):
                byte = rows[n, block, first + at]
                out[0, block, begin + at] = _float(_low(byte)) * scale - less
                out[0, block, second + at] = _float(_high(byte)) * upper - less_upper


def _q5_k(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for block in range(rows.shape[1]):
        for pair in range(4):  # of runs, whose fifth bits are in bytes 16 to 47
            first, second, begin = 48 + 32 * pair, 64 * pair + 32, 64 * pair
            scale, less = _scale_of_run(rows, n, block, 2 * pair, table)
            upper, less_upper = _scale_of_run(rows, n, block, 2 * pair + 1, table)
            bit, bit_upper = np.uint8(1 << (2 * pair)), np.uint8(2 << (2 * pair))
            for at in range(min(out.shape[2], 32)):
                byte, fifth = rows[n, block, first + at], rows[n, block, 16 + at]
                low = np.float32(16) if np.uint8(fifth & bit) else np.float32(0)
                high = np.float32(16) if np.uint8(fifth & bit_upper) else np.float32(0)
                out[0, block, begin + at] = (_float(_low(byte)) + low) * scale - less
                out[0, block, second + at] = (_float(_high(byte)) + high) * upper - less_upper


def _q6_k(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    """Low bits are in 128 bytes, high bits in 64, and 16 scales in 16."""
    bits = np.uint8(48)
    for block in range(rows.shape[1]):
        by = _half(rows[n, block, 208], rows[n, block, 209], table)
        for part in range(4):  # 16 values of each of four scales, 32 values apart
            half, side = part // 2, part % 2
            first, second, begin = 64 * half + 16 * side, 128 + 16 * part, 128 * half + 16 * side
            own = 192 + 8 * half + side
            one = by * np.float32(np.int8(rows[n, block, own]))
            two = by * np.float32(np.int8(rows[n, block, own + 2]))
            three = by * np.float32(np.int8(rows[n, block, own + 4]))
            four = by * np.float32(np.int8(rows[n, block, own + 6]))
            for at in range(min(out.shape[2], 16)):
                a, b = rows[n, block, first + at], rows[n, block, first + 32 + at]
                high = rows[n, block, second + at]
                code = np.uint8(_low(a) | np.uint8(np.uint8(high << np.uint8(4)) & bits))
                out[0, block, begin + at] = (_float(code) - np.float32(32)) * one
                code = np.uint8(_low(b) | np.uint8(np.uint8(high << np.uint8(2)) & bits))
                out[0, block, begin + 32 + at] = (_float(code) - np.float32(32)) * two
                code = np.uint8(_high(a) | np.uint8(high & bits))
                out[0, block, begin + 64 + at] = (_float(code) - np.float32(32)) * three
                code = np.uint8(_high(b) | np.uint8(np.uint8(high >> np.uint8(2)) & bits))
                out[0, block, begin + 96 + at] = (_float(code) - np.float32(32)) * four


def _q8_0_product(rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any) -> Any:
    product = np.float32(0)
    for block in range(rows.shape[1]):
        own = np.float32(0)  # of this block, without its scale
        for at in range(min(x.shape[2], 32)):
            own += x[0, block, at] * np.float32(np.int8(rows[n, block, at + 2]))
        product += own * _half(rows[n, block, 0], rows[n, block, 1], table)
    return product


def _q4_0_product(rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any) -> Any:
    product = np.float32(0)
    for block in range(rows.shape[1]):
        own = np.float32(0)
        for at in range(min(x.shape[2] // 2, 16)):
            byte = rows[n, block, at + 2]
            low, high = np.int32(byte & np.uint8(15)), np.int32(byte >> np.uint8(4))
            own += x[0, block, at] * (np.float32(low) - np.float32(8))
            own += x[0, block, at + 16] * (np.float32(high) - np.float32(8))
        product += own * _half(rows[n, block, 0], rows[n, block, 1], table)
    return product


USED = (_half, _low, _high, _float, _six_bits, _scale_of_run)
VALUES = {10: _q8_0, 11: _q4_0, 12: _q4_k, 13: _q5_k, 14: _q6_k}
PRODUCTS = {10: _q8_0_product, 11: _q4_0_product}  # without writing values
