"""Sums of a digest on the CPU, in numpy.

Of what torch and numpy do with integers of 64 bits, numpy's ``einsum`` multiplies and adds up the
fastest: it does both in one pass over its inputs. Large boxes are left to numba where it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_module.kernels.digest.boxes import Matrix
from vllm_module.kernels.digest.compiled import Multiply, compiled_multiply
from vllm_module.kernels.digest.keys import CHUNK, CHUNK_BYTES, WORD, chunk_keys, column_keys

_BATCH = 2**15  # words that are widened and multiplied at once: 256 KiB
_TASK = 2**21  # words that one thread takes at once, at most
_ROWS = 2**14  # of a task, at most
_COMPILED = 2**24  # bytes of a matrix for which compiling once is worth it
_COMPILED_BATCH = 2**18  # words


class ColumnRange(NamedTuple):
    """Columns of a matrix: a part of one chunk, or whole chunks."""

    first: int  # column of the tensor
    columns: int
    chunks: int


def add_matrix(matrix: Matrix) -> torch.Tensor:
    """Return the two sums of a matrix, int64 ``[2]``."""
    large = matrix.values.numel() * matrix.values.dtype.itemsize >= _COMPILED
    compiled = compiled_multiply() if large else None
    tasks = [(*task, compiled) for task in _tasks(matrix)]
    threads = min(torch.get_num_threads(), len(tasks))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            sums = [*pool.map(_add, tasks)]
    else:
        sums = [_add(task) for task in tasks]
    return torch.stack(sums).sum(0)


def _tasks(matrix: Matrix) -> Iterator[tuple[Matrix, ColumnRange]]:
    rows, columns = matrix.values.shape
    itemsize = matrix.values.dtype.itemsize
    for part in _parts(matrix.first_column, columns, itemsize):
        step = max(1, min(_ROWS, _TASK * WORD // (part.columns * itemsize)))
        start = part.first - matrix.first_column
        for row in range(0, rows, step):
            values = matrix.values[row : row + step, start : start + part.columns]
            first = matrix.first_row + row * matrix.step
            yield matrix._replace(values=values, first_row=first), part


def _parts(first: int, columns: int, itemsize: int) -> Iterator[ColumnRange]:
    """Cut columns at the edges of chunks; whole chunks stay together up to the size of a task."""
    width, end = CHUNK_BYTES // itemsize, first + columns
    while first < end:
        stop = min(end, first - first % width + width)
        chunks = 1
        if stop - first == width:
            chunks = min((end - first) // width, _TASK // CHUNK)
            stop = first + chunks * width
        yield ColumnRange(first, stop - first, chunks)
        first = stop


def _add(task: tuple[Matrix, ColumnRange, Multiply | None]) -> torch.Tensor:
    """Return the two sums of a part of a matrix."""
    matrix, part, compiled = task
    rows, itemsize = len(matrix.values), matrix.values.dtype.itemsize
    chunk, offset = divmod(part.first * itemsize, CHUNK_BYTES)
    place, lead = divmod(offset, WORD)
    width = part.columns // part.chunks
    words = -(-(lead + width * itemsize) // WORD)
    keys = column_keys(torch.device("cpu")).numpy().view(np.uint64)[:, place : place + words]
    sums = np.empty((2, rows, part.chunks), np.uint64)
    batch = _COMPILED_BATCH if compiled else _BATCH
    chunks_at_once = max(1, min(part.chunks, batch // words))
    if matrix.values.stride(1) != 1:
        chunks_at_once = 1  # many rows and few columns are faster to transpose
    rows_at_once = max(1, min(rows, batch // words // chunks_at_once))
    multiply = compiled or _multiply_in(np.empty((rows_at_once, chunks_at_once, words), np.uint64))
    aligned = _aligned(matrix.values, lead)
    for row in range(0, rows, rows_at_once):
        of_rows = slice(row, row + rows_at_once)
        for first in range(0, part.chunks, chunks_at_once):
            of_chunks = slice(first, first + chunks_at_once)
            if aligned is not None:
                read = aligned[of_rows].reshape(-1, part.chunks, words)[:, of_chunks]
            else:
                columns = slice(first * width, (first + chunks_at_once) * width)
                read = _copied(matrix.values[of_rows, columns], lead, words)
            multiply(read, keys, sums[:, of_rows, of_chunks])
    of_ones = _ones(part.first, width, itemsize).view(2, 1, 1)
    numbers = (matrix.first_row + torch.arange(rows, device="cpu") * matrix.step).unsqueeze(
        1
    ) * matrix.chunks
    keys_of_chunks = chunk_keys(numbers + torch.arange(chunk, chunk + part.chunks, device="cpu"))
    return ((torch.from_numpy(sums.view(np.int64)) + of_ones) * keys_of_chunks).sum((1, 2))


def _multiply_in(buffer: npt.NDArray[np.uint64]) -> Multiply:
    """Return numpy's twin of :func:`compiled_multiply`, which widens words in a buffer."""

    def multiply(
        words: npt.NDArray[np.uint32], keys: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint64]
    ) -> None:
        widened = buffer[: words.shape[0], : words.shape[1]]
        np.copyto(widened, words)
        np.einsum("rcw,mw->mrc", widened, keys, out=sums)

    return multiply


def _aligned(values: torch.Tensor, lead: int) -> npt.NDArray[np.uint32] | None:
    """Return a view of rows as words; ``None`` if words of memory are not those of the tensor."""
    rows, columns = values.shape
    itemsize = values.dtype.itemsize
    stride = values.stride(0) if rows > 1 else columns
    if columns > 1 and values.stride(1) != 1:
        return None
    if lead or columns * itemsize % WORD or stride * itemsize % WORD or values.data_ptr() % WORD:
        return None
    return values.as_strided((rows, columns), (stride, 1)).numpy().view(np.uint32)


def _copied(values: torch.Tensor, lead: int, words: int) -> npt.NDArray[np.uint32]:
    """Return words ``[rows, chunks, words]`` in which the bytes before and after rows are zero."""
    if values.stride(1) != 1:
        values = values.t().contiguous().t()  # in the order of memory first: six times as fast
    plain = values.contiguous().numpy().view(np.uint8)
    chunks = -(-(lead + plain.shape[1]) // (words * WORD))
    copy = np.zeros((len(plain), chunks * words * WORD), np.uint8)
    copy[:, lead : lead + plain.shape[1]] = plain
    return copy.view(np.uint32).reshape(len(plain), chunks, words)


def _ones(first: int, columns: int, itemsize: int) -> torch.Tensor:
    """Return what the ones that are added to elements add to the sums of a chunk, ``[2]``."""
    places = (first + torch.arange(columns, device="cpu")) * itemsize
    keys = column_keys(torch.device("cpu"))[:, places // WORD % CHUNK]
    return (keys << 8 * (places % WORD)).sum(1)
