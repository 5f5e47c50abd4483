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
        for run in range(8):  # 32 values
            scale, less = _scale_of_run(rows, n, block, run, table)
            shift, first = np.uint8(4 * (run % 2)), 16 + 32 * (run // 2)
            for at in range(out.shape[2] // 8):
                code = np.int32(rows[n, block, first + at] >> shift & np.uint8(15))
                out[0, block, 32 * run + at] = np.float32(code) * scale - less


def _q5_k(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for block in range(rows.shape[1]):
        for run in range(8):  # 32 values, whose fifth bits are in bytes 16 to 47
            scale, less = _scale_of_run(rows, n, block, run, table)
            shift, first, place = np.uint8(4 * (run % 2)), 48 + 32 * (run // 2), np.uint8(run)
            for at in range(out.shape[2] // 8):
                low = rows[n, block, first + at] >> shift & np.uint8(15)
                high = rows[n, block, 16 + at] >> place & np.uint8(1)
                code = np.int32(low | high << np.uint8(4))
                out[0, block, 32 * run + at] = np.float32(code) * scale - less


def _q6_k(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    """Low bits are in 128 bytes, high bits in 64, and 16 scales in 16."""
    for block in range(rows.shape[1]):
        by = _half(rows[n, block, 208], rows[n, block, 209], table)
        for run in range(8):  # 32 values, of two scales
            one = by * np.float32(np.int8(rows[n, block, 192 + 2 * run]))
            other = by * np.float32(np.int8(rows[n, block, 193 + 2 * run]))
            half, quarter = run // 4, run % 4
            shift, place = np.uint8(quarter // 2 * 4), np.uint8(2 * quarter)
            first, second = 64 * half + quarter % 2 * 32, 128 + 32 * half
            for at in range(out.shape[2] // 8):
                low = rows[n, block, first + at] >> shift & np.uint8(15)
                high = rows[n, block, second + at] >> place & np.uint8(3)
                value = np.float32(np.int32(low | high << np.uint8(4))) - np.float32(32)
                out[0, block, 32 * run + at] = value * (one if at < 16 else other)


def _q8_0_product(rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any) -> Any:
    product = np.float32(0)
    for block in range(rows.shape[1]):
        own = np.float32(0)  # of this block, without its scale
        for at in range(x.shape[2]):
            own += x[0, block, at] * np.float32(np.int8(rows[n, block, at + 2]))
        product += own * _half(rows[n, block, 0], rows[n, block, 1], table)
    return product


def _q4_0_product(rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any) -> Any:
    product = np.float32(0)
    for block in range(rows.shape[1]):
        own = np.float32(0)
        for at in range(x.shape[2] // 2):
            byte = rows[n, block, at + 2]
            low, high = np.int32(byte & np.uint8(15)), np.int32(byte >> np.uint8(4))
            own += x[0, block, at] * (np.float32(low) - np.float32(8))
            own += x[0, block, at + 16] * (np.float32(high) - np.float32(8))
        product += own * _half(rows[n, block, 0], rows[n, block, 1], table)
    return product


USED = (_half, _six_bits, _scale_of_run)
VALUES = {10: _q8_0, 11: _q4_0, 12: _q4_k, 13: _q5_k, 14: _q6_k}
PRODUCTS = {10: _q8_0_product, 11: _q4_0_product}  # without writing values
