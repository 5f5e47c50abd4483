"""Loops over rows of codes or floats, which numba compiles for this CPU (the extra ``cpu``).

This is no operation by itself: it belongs to :mod:`~vllm_module.kernels.matmul.code_rows_matmul`.

Four or eight rows of the weight are read as float32 into memory that stays in the cache, and
multiplied by all rows of the input. If these are bfloat16, and the processor multiplies it, the
values are rounded to it first, and twice as many are multiplied at once. One row is multiplied by
the kinds used most without writing their values, those of fewer bits sixteen at once
(:mod:`~vllm_module.kernels.rows.compiled_vectors`). Other loops have lengths that the compiler does
not know, because it unrolls those that it knows instead of computing eight numbers at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_module.kernels.matmul import compiled_blocks, compiled_codes, compiled_floats
from vllm_module.kernels.matmul.compiled_codes import CODES, DOWN, PLANES
from vllm_module.kernels.matmul.compiled_floats import BFLOAT16, FLOAT16, FLOAT32
from vllm_module.kernels.matmul.kept_loops import compiled
from vllm_module.kernels.matmul.torch_threads import numbers, thread, threads
from vllm_module.kernels.rows.compiled_numbers import USED, load, store
from vllm_module.kernels.rows.compiled_vectors import (
    added,
    floats,
    has_bfloat16,
    has_many_registers,
    prefetch,
    spread,
    tell_numba_of_vectors,
    write_rounded,
    write_totals,
)

# What the loops are given, in this order; see code_rows.CodeRows. Of rows the kind says the dtype.
ARGUMENTS = {
    "x": torch.float32,
    "rows": None,
    "scales": torch.float32,
    "zeros": torch.uint8,
    "table": torch.float32,
    "place": torch.int64,
    "starts": torch.int64,
    "y": torch.float32,
}
AT_ONCE = 32  # outputs of two threads are not in one line of a cache


def _by_group(
    codes: Any, place: Any, starts: Any, scales: Any, zeros: Any, zero: Any, n: Any, out: Any
) -> None:
    """Write ``codes [input]`` to ``out`` with the inputs of a group side by side, times its scale.

    ``place`` has the place in ``codes`` of each of them, and ``starts`` the first of each group.
    """
    for group in range(len(starts) - 1):
        scale, less = scales[n, group], zero
        if zeros.shape[1]:
            less = np.float32(np.int32(zeros[n, group]))
        own, written = place[starts[group] : starts[group + 1]], out[starts[group] :]
        for at in range(len(own)):
            written[at] = (codes[own[at]] - less) * scale


def _products(
    x: Any,
    values: Any,
    at: Any,
    tiles: Any,
    count: Any,
    y: Any,
    n: Any,
    following: Any,
    lines: Any,
    rows: Any,
) -> None:
    """Multiply rows of ``x`` by four or eight rows of the weight, the outputs from ``n`` on.

    Four rows are multiplied by four at once, or by one: their sums stay in registers.

    Args:
        x, y: the inputs, float32 or bits of bfloat16, and the results.
        values, at: of the same dtype, and the place of the first row, as wide as ``x``.
        tiles: how many times four rows there are.
        count: how many numbers are multiplied at once.
        following, lines: address of what is read next, and how many lines of a cache it has for
            each of ``count`` numbers of four rows. They are read into the cache on the way.
        rows: how many rows of ``x`` are to be multiplied four at once.

    """
    zero, width, of = np.float32(0), x.shape[1], y.shape[1]
    # All rows share what is read next: memory gives it at an even pace.
    each = (lines * 4 + rows - 1) // max(rows, 4)
    for row in range(0, rows, 4):
        a, b, c, d = row * width, (row + 1) * width, (row + 2) * width, (row + 3) * width
        for tile in range(tiles):
            first, to = at + 4 * tile * width, n + 4 * tile
            a0, a1, a2, a3 = spread(zero), spread(zero), spread(zero), spread(zero)
            b0, b1, b2, b3 = spread(zero), spread(zero), spread(zero), spread(zero)
            c0, c1, c2, c3 = spread(zero), spread(zero), spread(zero), spread(zero)
            d0, d1, d2, d3 = spread(zero), spread(zero), spread(zero), spread(zero)
            for k in range(0, width, count):
                for _ in range(each):
                    prefetch(following)
                    following += 64
                v0, v1 = floats(values, first + k), floats(values, first + width + k)
                v2 = floats(values, first + 2 * width + k)
                v3 = floats(values, first + 3 * width + k)
                own = floats(x, a + k)
                a0, a1 = added(a0, own, v0), added(a1, own, v1)
                a2, a3 = added(a2, own, v2), added(a3, own, v3)
                own = floats(x, b + k)
                b0, b1 = added(b0, own, v0), added(b1, own, v1)
                b2, b3 = added(b2, own, v2), added(b3, own, v3)
                own = floats(x, c + k)
                c0, c1 = added(c0, own, v0), added(c1, own, v1)
                c2, c3 = added(c2, own, v2), added(c3, own, v3)
                own = floats(x, d + k)
                d0, d1 = added(d0, own, v0), added(d1, own, v1)
                d2, d3 = added(d2, own, v2), added(d3, own, v3)
            write_totals(y, row * of + to, a0, a1, a2, a3)
            write_totals(y, (row + 1) * of + to, b0, b1, b2, b3)
            write_totals(y, (row + 2) * of + to, c0, c1, c2, c3)
            write_totals(y, (row + 3) * of + to, d0, d1, d2, d3)
    for row in range(rows, len(x)):
        for tile in range(tiles):
            first, to = at + 4 * tile * width, n + 4 * tile
            a0, a1, a2, a3 = spread(zero), spread(zero), spread(zero), spread(zero)
            for k in range(0, width, count):
                if not row:
                    for line in range(lines):
                        prefetch(following + 64 * ((tile * width + k) // count * lines + line))
                own, place = floats(x, row * width + k), first + k
                a0 = added(a0, own, floats(values, place))
                a1 = added(a1, own, floats(values, place + width))
                a2 = added(a2, own, floats(values, place + 2 * width))
                a3 = added(a3, own, floats(values, place + 3 * width))
            write_totals(y, row * of + to, a0, a1, a2, a3)


def _no_sums(x: Any, sums: Any) -> None:
    """Write no sums of inputs: most kinds need none."""


_KINDS = compiled_codes, compiled_blocks, compiled_floats
_VALUES = {kind: write for module in _KINDS for kind, write in module.VALUES.items()}
_PRODUCTS = {kind: product for module in _KINDS for kind, product in module.PRODUCTS.items()}
# The dtype of rows, as torch and the loops have it; of other kinds they are bytes.
STORED = {
    DOWN: (torch.int32, np.int32),
    FLOAT32: (torch.float32, np.float32),
    BFLOAT16: (torch.bfloat16, np.uint16),
    FLOAT16: (torch.float16, np.uint16),
}
BYTES = torch.uint8, np.uint8


@compiled
def compiled_multiply(kind: int, ordered: bool) -> Any:
    """Return what multiplies ``x [rows, input]`` by a weight and writes ``y [rows, output]``.

    It is a function of C that each of torch's threads calls, for some of the outputs. Its argument
    is the address of integers of 64 bits: ``zero``, then each of :data:`ARGUMENTS`, its address and
    its shape; whether ``x`` is bfloat16, not float32, and whether ``y`` is; and the address of the
    input of each number in a row, int64, or 0. The outputs of ``y`` are padded to a multiple of 8.
    The other arguments are those of :class:`~vllm_module.kernels.matmul.code_rows.CodeRows`. The
    first call on a machine compiles for some seconds; the result is kept.

    Args:
        kind: how the weight is stored, which the compiler knows.
        ordered: whether inputs of a group are not side by side; ``place`` and ``starts`` say where.

    Raises:
        ImportError: numba is not installed, or torch has no threads of OpenMP.

    """
    from numba.extending import register_jitable

    tell_numba_of_vectors()
    down, planes = kind == DOWN, PLANES.get(kind, 1)
    alone = kind in _PRODUCTS and not ordered  # one row is multiplied without writing values
    sum_up = compiled_blocks.SUMS.get(kind, _no_sums)
    sixteens = kind == CODES[4]  # its product takes groups of whole sixteens of bytes
    write, product = _VALUES[kind], _PRODUCTS.get(kind, compiled_codes.PRODUCTS[0])
    each = 8 if down else 1  # outputs of a row in memory
    dtype, stored = STORED.get(kind, BYTES)
    pairs, itemsize = kind == BFLOAT16 and has_bfloat16(), dtype.itemsize
    rounds = kind not in compiled_floats.VALUES and has_bfloat16()
    direct, count = kind == FLOAT32 or pairs, 32 if pairs else 16  # as stored, so many at once
    lines = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}.get(kind, 1)
    many = has_many_registers()
    called = (*USED, *(function for module in _KINDS for function in module.USED))
    for function in (*called, _by_group, _products):  # numba compiles these once for all loops
        register_jitable(function)
    for inlined in (write, product, sum_up):
        register_jitable(inline="always")(inlined)  # a call takes as long as a row

    def multiply(argument: Any) -> None:
        at = numbers(argument, np.int64, (26,))
        zero, x_narrow, y_narrow, order = np.float32(at[0]), at[23], at[24], at[25]
        inputs = numbers(order, np.int64, (at[3] if order else 0,))
        # Rows of bfloat16, if not one alone, are multiplied by weights that are rounded to it.
        narrow = rounds and x_narrow and at[2] > 1
        read = np.empty((at[2] if (x_narrow or order) and not narrow else 0, at[3]), np.float32)
        given = np.empty(at[3], np.float32)
        for row in range(len(read)):
            load(at[1] + (2 if x_narrow else 4) * row * at[3], x_narrow, given)
            for column in range(at[3]):
                read[row, column] = given[inputs[column] if order else column]
        # Of bfloat16 that is not read, only the shape is used.
        x = read if len(read) else numbers(at[1], np.float32, (at[2], at[3]))
        bits = numbers(at[1], np.uint16, (at[2], at[3]))
        rows = numbers(at[4], stored, (at[5], at[6], at[7]))
        scales = numbers(at[8], np.float32, (at[9], at[10]))
        zeros = numbers(at[11], np.uint8, (at[12], at[13]))
        table = numbers(at[14], np.float32, (at[15],))
        place = numbers(at[16], np.int64, (at[17],))
        starts = numbers(at[18], np.int64, (at[19],))
        products = np.empty((at[21] if y_narrow else 0, at[22]), np.float32)
        y = products if y_narrow else numbers(at[20], np.float32, (at[21], at[22]))
        groups, columns = rows.shape[1], x.shape[1]
        outputs, size = rows.shape[0] * each, columns // (planes * groups)
        one, none, shift = np.ones((1, 1), np.float32), zeros[:1, :0], np.uint32(0)
        codes = np.empty((planes, groups, size), np.float32)
        only = x.reshape(len(x), planes, groups, size)[0]
        single = alone and len(x) == 1 and not (sixteens and size % 16)
        sums = np.zeros((groups, 16), np.float32)
        if single:
            sum_up(only, sums)
        width = (columns + 15) // 16 * 16
        as_it_is = single or narrow or width == columns
        padded = np.zeros((0 if as_it_is else len(x), width), np.float32)
        for row in range(len(padded)):
            padded[row, :columns] = x[row]
        given_rows = padded if len(padded) else x
        even = (columns + 31) // 32 * 32
        moved = np.zeros((len(x) if narrow and (order or even > columns) else 0, even), np.uint16)
        for row in range(len(moved)):
            for column in range(columns):
                moved[row, column] = bits[row, inputs[column] if order else column]
        # For more rows, some stay in the nearest cache while eight outputs are computed, not four.
        together = 8 if down or (many and len(x) > 8) else 4
        values, tiles = np.zeros((together, width), np.float32), together // 4
        step = rows.shape[1] * rows.shape[2] * itemsize * together // each  # bytes, of all outputs
        rounded = np.zeros((together if narrow else 0, even), np.uint16)
        stored_rows = bits if pairs else x
        as_stored = direct and not single and columns % count == 0 and (x_narrow or not pairs)
        fours = len(x) // 4 * 4 if many else 0
        parts = (outputs + AT_ONCE - 1) // AT_ONCE
        begin = parts * thread() // threads() * AT_ONCE
        end = min(parts * (thread() + 1) // threads() * AT_ONCE, outputs)
        for first in range(begin, end, together):
            following = at[4] + (first // together + 1) * step
            if direct and as_stored and first + together <= outputs:
                own = first * columns
                _products(stored_rows, rows, own, tiles, count, y, first, following, 4, fours)
                continue
            for n in range(first, min(first + together, end)):
                if single:
                    y[0, n] = product(rows, n, scales, zeros, zero, table, only, sums)
                elif ordered:
                    write(rows, n, one, none, np.float32(0), table, 0, shift, codes)
                    own, flat = values[n - first], codes.reshape(columns)
                    _by_group(flat, place, starts, scales, zeros, zero, n, own)
                else:
                    if down:
                        shift = np.uint32(4 * place[n - first])
                    own = values[n - first, :columns].reshape(planes, groups, size)
                    write(rows, n // each, scales, zeros, zero, table, n, shift, own)
            if rounds:
                for n in range(len(rounded)):
                    for k in range(0, width, 16):
                        write_rounded(rounded, n * even + k, floats(values, n * width + k))
                if narrow:
                    own_rows, twice = moved if len(moved) else bits, 2 * lines
                    _products(own_rows, rounded, 0, tiles, 32, y, first, following, twice, fours)
            if not (single or narrow):
                _products(given_rows, values, 0, tiles, 16, y, first, following, lines, fours)
        for row in range(len(products)):
            if begin < end:  # some outputs behind the last one are padding
                store(products[row, begin:end], at[20] + 2 * (row * at[22] + begin), True)

    return multiply
