"""Blocks of GGUF files, for the loops of :mod:`~vllm_module.kernels.matmul.compiled_rows`.

Functions are those of :mod:`~vllm_module.kernels.matmul.compiled_codes`, with blocks for groups and
all float16 numbers, by their bits, for a table. Scales are in the blocks. A product adds up sixteen
sums at once; each number of ``as_ones`` and ``as_sixteenths`` is exact, and so is its difference
from a whole number.

Formulas: ``dequantize_row_*`` in ggml-quants.c of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_module.kernels.rows.compiled_vectors import (
    AS_ONES,
    AS_SIXTEENTHS,
    as_ones,
    as_sixteenths,
    bytes_of,
    codes,
    floats,
    lane,
    signed,
    spread,
    total,
)

BLOCKS = {"Q8_0": 10, "Q4_0": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}


def _half(low: Any, high: Any, halves: Any) -> Any:
    """Return the float16 number of two bytes; ``halves`` has all, by their bits."""
    return halves[np.uint32(low) | (np.uint32(high) << np.uint32(8))]


def _low(byte: Any) -> Any:
    """Return the four low bits; cut to a byte, because numba widens results to 64 bits."""
    return np.uint8(byte & np.uint8(15))


def _high(byte: Any) -> Any:
    return np.uint8(byte >> np.uint8(4))


def _float(code: Any) -> Any:
    return np.float32(np.int32(code))


def _word(rows: Any, n: Any, block: Any, at: Any) -> Any:
    """Return four bytes of a block as an integer."""
    low = np.uint32(rows[n, block, at]) | np.uint32(rows[n, block, at + 1]) << np.uint32(8)
    high = np.uint32(rows[n, block, at + 2]) | np.uint32(rows[n, block, at + 3]) << np.uint32(8)
    return np.uint64(np.uint32(low) | np.uint32(high) << np.uint32(16))


def _of_runs(rows: Any, n: Any, block: Any) -> Any:
    """Return scales and offsets of the eight runs in a block of Q4_K or Q5_K, each in a byte.

    They have six bits. Bytes 4 to 7 have those of the first four scales, 8 to 11 of offsets; their
    two upper bits, and four of bytes 12 to 15, are those of the last four.
    """
    scales, offsets, both = (
        _word(rows, n, block, 4),
        _word(rows, n, block, 8),
        _word(rows, n, block, 12),
    )
    six, four, two = np.uint64(0x3F3F3F3F), np.uint64(0x0F0F0F0F), np.uint64(0x30303030)
    last_scales = both & four | scales >> np.uint64(2) & two
    last_offsets = both >> np.uint64(4) & four | offsets >> np.uint64(2) & two
    scales = scales & six | last_scales << np.uint64(32)
    return scales, offsets & six | last_offsets << np.uint64(32)


def _of_run(by: Any, of_runs: Any, run: Any) -> Any:
    """Return the scale or offset of a run, times that of its block."""
    return by * np.float32(np.int32(of_runs >> np.uint64(8 * run) & np.uint64(255)))


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
        by = _half(rows[n, block, 0], rows[n, block, 1], table)
        less_by = _half(rows[n, block, 2], rows[n, block, 3], table)
        scales, offsets = _of_runs(rows, n, block)
        for pair in range(4):  # of runs of 32 values, which share 32 bytes
            first, second, begin = 16 + 32 * pair, 64 * pair + 32, 64 * pair
            scale, less = _of_run(by, scales, 2 * pair), _of_run(less_by, offsets, 2 * pair)
            upper = _of_run(by, scales, 2 * pair + 1)
            less_upper = _of_run(less_by, offsets, 2 * pair + 1)
            for at in range(min(out.shape[2], 32)):
                byte = rows[n, block, first + at]
                out[0, block, begin + at] = _float(_low(byte)) * scale - less
                out[0, block, second + at] = _float(_high(byte)) * upper - less_upper


def _q5_k(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, of: Any, shift: Any, out: Any
) -> None:
    for block in range(rows.shape[1]):
        by = _half(rows[n, block, 0], rows[n, block, 1], table)
        less_by = _half(rows[n, block, 2], rows[n, block, 3], table)
        scales, offsets = _of_runs(rows, n, block)
        for pair in range(4):  # of runs, whose fifth bits are in bytes 16 to 47
            first, second, begin = 48 + 32 * pair, 64 * pair + 32, 64 * pair
            scale, less = _of_run(by, scales, 2 * pair), _of_run(less_by, offsets, 2 * pair)
            upper = _of_run(by, scales, 2 * pair + 1)
            less_upper = _of_run(less_by, offsets, 2 * pair + 1)
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


def _q8_0_product(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any, sums: Any
) -> Any:
    product = spread(np.float32(0))
    for block in range(rows.shape[1]):
        own, begin, first = spread(np.float32(0)), (n * rows.shape[1] + block) * 34 + 2, block * 32
        own = signed(rows, begin) * floats(x, first)
        own = own + signed(rows, begin + 16) * floats(x, first + 16)
        scale = _half(rows[n, block, 0], rows[n, block, 1], table)
        product = product + own * spread(scale)
    return total(product)


def _q4_0_product(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any, sums: Any
) -> Any:
    product = spread(np.float32(0))
    low, high = spread(np.float32(AS_ONES + 8)), spread(np.float32(AS_SIXTEENTHS + 8))
    for block in range(rows.shape[1]):
        byte, first = codes(rows, (n * rows.shape[1] + block) * 18 + 2), block * 32
        own = (as_ones(byte & 15) - low) * floats(x, first)
        own = own + (as_sixteenths(byte & 0xF0) - high) * floats(x, first + 16)
        scale = _half(rows[n, block, 0], rows[n, block, 1], table)
        product = product + own * spread(scale)
    return total(product)


def _sums_of_runs(x: Any, sums: Any) -> None:
    """Write the sums of inputs of each run, in places 8 to 15 of the sixteen of a block.

    The products below have the scales of eight runs in places 0 to 7, and their offsets there.
    """
    for block in range(x.shape[1]):
        for run in range(8):
            own = np.float32(0)
            for at in range(32):
                own += x[0, block, 32 * run + at]
            sums[block, 8 + run] = own


def _q4_k_product(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any, sums: Any
) -> Any:
    product, ones = spread(np.float32(0)), spread(np.float32(AS_ONES))
    less, sixteenths = spread(np.float32(0)), spread(np.float32(AS_SIXTEENTHS))
    for block in range(rows.shape[1]):
        begin, first = (n * rows.shape[1] + block) * 144 + 16, block * 256
        of_runs = as_ones(bytes_of(*_of_runs(rows, n, block))) - ones
        lower, upper = spread(np.float32(0)), spread(np.float32(0))
        for pair in range(4):  # of runs of 32 values, which share 32 bytes
            byte, more = codes(rows, begin + 32 * pair), codes(rows, begin + 32 * pair + 16)
            at = first + 64 * pair
            low = (as_ones(byte & 15) - ones) * floats(x, at)
            low = low + (as_ones(more & 15) - ones) * floats(x, at + 16)
            high = (as_sixteenths(byte & 0xF0) - sixteenths) * floats(x, at + 32)
            high = high + (as_sixteenths(more & 0xF0) - sixteenths) * floats(x, at + 48)
            lower = lower + low * lane(of_runs, 2 * pair)
            upper = upper + high * lane(of_runs, 2 * pair + 1)
        by = _half(rows[n, block, 0], rows[n, block, 1], table)
        less_by = _half(rows[n, block, 2], rows[n, block, 3], table)
        product = product + (lower + upper) * spread(by)
        less = less + of_runs * floats(sums, 16 * block) * spread(less_by)
    return total(product - less)


def _q5_k_product(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any, sums: Any
) -> Any:
    product, ones = spread(np.float32(0)), spread(np.float32(AS_ONES))
    less, sixteenths = spread(np.float32(0)), spread(np.float32(AS_SIXTEENTHS))
    for block in range(rows.shape[1]):
        begin, first = (n * rows.shape[1] + block) * 176 + 16, block * 256
        of_runs = as_ones(bytes_of(*_of_runs(rows, n, block))) - ones
        lower, upper = spread(np.float32(0)), spread(np.float32(0))
        of_first, of_second = codes(rows, begin), codes(rows, begin + 16)
        for pair in range(4):  # of runs, whose fifth bits are in bytes 16 to 47
            at, own = first + 64 * pair, begin + 32 + 32 * pair
            byte, fifth = codes(rows, own), of_first >> 2 * pair
            more, fifth_of_more = codes(rows, own + 16), of_second >> 2 * pair
            low = (as_ones(byte & 15 | (fifth & 1) << 4) - ones) * floats(x, at)
            own_low = as_ones(more & 15 | (fifth_of_more & 1) << 4) - ones
            low = low + own_low * floats(x, at + 16)
            high = as_sixteenths(byte & 0xF0 | (fifth & 2) << 7) - sixteenths
            high = high * floats(x, at + 32)
            own_high = as_sixteenths(more & 0xF0 | (fifth_of_more & 2) << 7) - sixteenths
            high = high + own_high * floats(x, at + 48)
            lower = lower + low * lane(of_runs, 2 * pair)
            upper = upper + high * lane(of_runs, 2 * pair + 1)
        by = _half(rows[n, block, 0], rows[n, block, 1], table)
        less_by = _half(rows[n, block, 2], rows[n, block, 3], table)
        product = product + (lower + upper) * spread(by)
        less = less + of_runs * floats(sums, 16 * block) * spread(less_by)
    return total(product - less)


def _q6_k_product(
    rows: Any, n: Any, scales: Any, zeros: Any, zero: Any, table: Any, x: Any, sums: Any
) -> Any:
    product, ones = spread(np.float32(0)), spread(np.float32(AS_ONES + 32))
    sixteenths = spread(np.float32(AS_SIXTEENTHS + 32))
    for block in range(rows.shape[1]):
        begin = (n * rows.shape[1] + block) * 210
        of_runs = signed(rows, begin + 192)
        lower, upper = spread(np.float32(0)), spread(np.float32(0))
        for part in range(4):  # 16 values of each of four scales, 32 values apart
            half, side = part // 2, part % 2
            place, scale = block * 256 + 128 * half + 16 * side, 8 * half + side
            a = codes(rows, begin + 64 * half + 16 * side)
            b = codes(rows, begin + 64 * half + 16 * side + 32)
            two = codes(rows, begin + 128 + 16 * part)
            low_a = (as_ones(a & 15 | (two & 3) << 4) - ones) * floats(x, place)
            low_b = (as_ones(b & 15 | (two & 12) << 2) - ones) * floats(x, place + 32)
            high_a = as_sixteenths(a & 0xF0 | (two & 48) << 4) - sixteenths
            high_b = as_sixteenths(b & 0xF0 | (two & 192) << 2) - sixteenths
            high_a, high_b = high_a * floats(x, place + 64), high_b * floats(x, place + 96)
            lower = lower + (low_a * lane(of_runs, scale) + low_b * lane(of_runs, scale + 2))
            upper = upper + (high_a * lane(of_runs, scale + 4) + high_b * lane(of_runs, scale + 6))
        by = _half(rows[n, block, 208], rows[n, block, 209], table)
        product = product + (lower + upper) * spread(by)
    return total(product)


USED = (_half, _low, _high, _float, _word, _of_runs, _of_run)
VALUES = {10: _q8_0, 11: _q4_0, 12: _q4_k, 13: _q5_k, 14: _q6_k}
# Without writing values.
PRODUCTS = {
    10: _q8_0_product,
    11: _q4_0_product,
    12: _q4_k_product,
    13: _q5_k_product,
    14: _q6_k_product,
}
# Of one row, for products without writing values.
SUMS = {12: _sums_of_runs, 13: _sums_of_runs}
