"""Multiplying words by keys in a loop that numba compiles, where the extra ``digest`` is installed.

It takes a fourth of numpy's time in the cache, and less than half where memory is the limit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

Multiply = Callable[[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]], None]


@functools.cache
def compiled_multiply() -> Multiply | None:
    """Return a function that fills sums ``[2, rows, chunks]`` of words ``[rows, chunks, words]``.

    The last stride of words is 1. Without numba there is no such function. The first call compiles
    for about a second.
    """
    try:
        import numba
    except ImportError:
        return None

    @numba.njit("void(uint32[::1], int64, int64, uint64[:, :], uint64[:, :, :])", nogil=True)
    def add_up(words, row_stride, chunk_stride, keys, sums):
        of_first, of_second = keys[0].copy(), keys[1].copy()  # their stride is known to be 1
        length = len(of_first)
        for row in range(sums.shape[1]):
            for chunk in range(sums.shape[2]):
                start = row * row_stride + chunk * chunk_stride
                line = words[start : start + length]
                first, second = np.uint64(0), np.uint64(0)
                for place in range(length):
                    word = np.uint64(line[place])
                    first += word * of_first[place]
                    second += word * of_second[place]
                sums[0, row, chunk] = first
                sums[1, row, chunk] = second

    def multiply(words: npt.NDArray[Any], keys: npt.NDArray[Any], sums: npt.NDArray[Any]) -> None:
        rows, chunks, length = words.shape
        row_stride, chunk_stride = (stride // words.itemsize for stride in words.strides[:2])
        reach = (rows - 1) * row_stride + (chunks - 1) * chunk_stride + length
        flat = as_strided(words, (reach,), (words.itemsize,))
        add_up(flat, row_stride, chunk_stride, keys, sums)

    return multiply
