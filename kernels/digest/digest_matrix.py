"""Both sums of a digest over a matrix: in plain torch, and in Triton on a GPU."""

from __future__ import annotations

import torch

from vllm_module.kernels.digest import on_cpu
from vllm_module.kernels.digest.boxes import Matrix
from vllm_module.kernels.digest.keys import (
    CHUNK,
    CHUNK_BYTES,
    CHUNK_SEEDS,
    MULTIPLIERS,
    STEP,
    WORD,
    chunk_keys,
    column_keys,
)
from vllm_module.kernels.operators import next_power_of_2, operator, tl, triton

_TILE = 1024  # columns of a program
_ROWS = 32  # of a program


def digest_matrix(matrix: Matrix) -> torch.Tensor:
    """Return the two sums of a matrix, int64 ``[2]`` on its device; CPUs have a faster way."""
    if matrix.values.is_cuda:
        return _digest_matrix(*matrix)
    return on_cpu.add_matrix(matrix)


def digest_matrix_reference(
    values: torch.Tensor, first_row: int, step: int, first_column: int, chunks: int
) -> torch.Tensor:
    """Compute in plain torch, element by element; see :class:`~.boxes.Matrix`."""
    rows, columns = values.shape
    itemsize, device = values.dtype.itemsize, values.device
    places = (first_column + torch.arange(columns, device=device)) * itemsize  # in bytes
    words, keys = places // WORD % CHUNK, column_keys(device)
    low = values.long() & (2 ** (8 * min(itemsize, WORD)) - 1)
    total = (low + 1) * (keys[:, words] << 8 * (places % WORD)).unsqueeze(1)
    if itemsize > WORD:
        total += ((values >> 32) & (2**32 - 1)) * keys[:, words + 1].unsqueeze(1)
    numbers = (first_row + torch.arange(rows, device=device) * step).unsqueeze(1) * chunks
    return (total * chunk_keys(numbers + places // CHUNK_BYTES)).sum((1, 2))


def digest_matrix_triton(
    values: torch.Tensor, first_row: int, step: int, first_column: int, chunks: int
) -> torch.Tensor:
    """Compute by a Triton kernel; see :class:`~.boxes.Matrix`."""
    rows, columns = values.shape
    itemsize = values.dtype.itemsize
    tile = min(_TILE, CHUNK_BYTES // itemsize, max(32, next_power_of_2(columns)))
    first = first_column // tile
    tiles = -(-(first_column + columns) // tile) - first
    programs = -(-rows // _ROWS) * tiles
    sums = torch.empty(2, programs, dtype=torch.int64, device=values.device)
    keys = column_keys(values.device)
    _add[(programs,)](
        values, keys, sums, rows, columns, *values.stride(), first_row, step,
        first_column, chunks, first, tiles, programs,
        BYTES=itemsize, WORD=WORD, CHUNK=CHUNK, TILE=tile, ROWS=_ROWS,
        SEED_0=CHUNK_SEEDS[0], SEED_1=CHUNK_SEEDS[1], STEP=STEP, FIRST=MULTIPLIERS[0],
        SECOND=MULTIPLIERS[1], num_warps=4, maxnreg=128,
    )  # fmt: skip
    return sums.sum(1)


@triton.jit(
    do_not_specialize=[
        "rows", "columns", "first_row", "step", "first_column", "chunks", "first_tile", "tiles",
        "programs",
    ]
)  # fmt: skip
def _add(
    values_ptr, keys_ptr, sums_ptr, rows, columns, row_stride, column_stride, first_row, step,
    first_column, chunks, first_tile, tiles, programs,
    BYTES: tl.constexpr, WORD: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, SEED_0: tl.constexpr, SEED_1: tl.constexpr, STEP: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Add up some rows of a tile: by the keys of their chunk first, then by those of columns.

    A tile lies within one chunk. Its columns are counted from the start of the tensor's row.
    """
    program = tl.program_id(0)
    tile = (first_tile + program % tiles).to(tl.int64)
    place = tile * TILE + tl.arange(0, TILE)
    column = place - first_column
    inside = (column >= 0) & (column < columns)
    chunk = tile * TILE * BYTES // (WORD * CHUNK)
    start = (program // tiles).to(tl.int64) * ROWS
    at = values_ptr + column * column_stride
    low_0 = tl.zeros((TILE,), tl.uint64)
    low_1, high_0, high_1 = low_0, low_0, low_0
    first_row, step = first_row.to(tl.int64), step.to(tl.int64)
    for row in range(start, tl.minimum(start + ROWS, rows)):
        number = ((first_row + row * step) * chunks + chunk).to(tl.uint64)
        key_0 = _odd_number(number, SEED_0, STEP, FIRST, SECOND)
        key_1 = _odd_number(number, SEED_1, STEP, FIRST, SECOND)
        value = tl.load(at + row * row_stride, mask=inside, other=0)
        if BYTES == 2:
            value = value.to(tl.uint16, bitcast=True)
        elif BYTES == 4:
            value = value.to(tl.uint32, bitcast=True)
        elif BYTES == 8:
            value = value.to(tl.uint64, bitcast=True)
            high_0 += (value >> 32) * key_0
            high_1 += (value >> 32) * key_1
            value = value & 0xFFFFFFFF
        present = value.to(tl.uint64) + inside.to(tl.uint64)
        low_0 += present * key_0
        low_1 += present * key_1
    word = place * BYTES // WORD % CHUNK
    shift = (place * BYTES % WORD * 8).to(tl.uint64)
    key_0 = tl.load(keys_ptr + word).to(tl.uint64, bitcast=True)
    key_1 = tl.load(keys_ptr + CHUNK + word).to(tl.uint64, bitcast=True)
    sum_0 = low_0 * (key_0 << shift)
    sum_1 = low_1 * (key_1 << shift)
    if BYTES == 8:
        sum_0 += high_0 * tl.load(keys_ptr + word + 1).to(tl.uint64, bitcast=True)
        sum_1 += high_1 * tl.load(keys_ptr + CHUNK + word + 1).to(tl.uint64, bitcast=True)
    at = sums_ptr + program
    tl.store(at, tl.sum(sum_0, 0).to(tl.int64, bitcast=True))
    tl.store(at + programs, tl.sum(sum_1, 0).to(tl.int64, bitcast=True))


@triton.jit
def _odd_number(
    place, SEED: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr
):
    """Return a number of a SplitMix64 sequence, made odd; see ``keys.odd_numbers``."""
    x = (place + 1) * STEP + SEED
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return (x ^ (x >> 31)) | 1


def _empty(values: torch.Tensor, *_: int) -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64, device=values.device)


_digest_matrix = operator(digest_matrix_reference, digest_matrix_triton, _empty)
