"""Quantizing to eight bits, with one scale for the elements of a block."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from vllm_module.kernels.dtypes import EIGHT_BITS, WIDE_FLOATS, can_convert, greatest
from vllm_module.kernels.operators import (
    expect,
    expect_writable,
    next_power_of_2,
    nothing,
    operator,
    tl,
    triton,
)

# Elements converted at once: as many as fit a CPU's cache, and as many as fill another device.
_CPU_CHUNK, _CHUNK = 1 << 19, 1 << 23
# Elements of a tile: the most for a program with whole blocks, and those for part of a block.
_WHOLE, _PART = 32768, 4096
_TINY = torch.finfo(torch.float32).tiny


def quantize(
    wide: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]
) -> None:
    """Quantize ``wide`` symmetrically, in float32, block by block.

    A block's scale is its largest absolute value, divided by the largest number of
    ``quantized.dtype``, and at least the smallest normal float32, so that zeros stay zeros. An
    element is ``wide / scale``, rounded to even. If a number is not finite, its block's scale is
    not finite either. The bits are the same on every device.

    Args:
        wide: ``[rows, columns]``, floating point.
        quantized: ``[rows, columns]``, float8_e4m3fn, float8_e5m2 or int8; written.
        scale: float32 ``[ceil(rows / block[0]), ceil(columns / block[1])]``; written.
        block: rows and columns that share a scale: ``(1, columns)`` for a scale for each token,
            ``(1, 128)`` for a scale for each group of 128 features.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; written elements share memory.

    """
    _check(wide, quantized, scale, block)
    expect_writable("scale", scale)
    _quantize(wide, quantized, scale, *block)


def quantize_static(
    wide: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]
) -> None:
    """Quantize ``wide`` by given scales; numbers out of range saturate.

    Shapes and errors are those of :func:`quantize`; ``scale`` is read.
    """
    _check(wide, quantized, scale, block)
    _quantize_static(wide, quantized, scale, *block)


def _check(
    wide: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]
) -> None:
    rows, columns = wide.shape if wide.dim() == 2 else (None, None)
    expect("wide", wide, (rows, columns), WIDE_FLOATS)
    if block[0] < 1 or block[1] < 1:
        raise ValueError(f"a block must have rows and columns, got {block}")
    expect("quantized", quantized, wide.shape, EIGHT_BITS, wide)
    expect_writable("quantized", quantized)
    blocks = -(-wide.shape[0] // block[0]), -(-wide.shape[1] // block[1])
    expect("scale", scale, blocks, (torch.float32,), wide)


def quantize_reference(
    wide: torch.Tensor,
    quantized: torch.Tensor,
    scale: torch.Tensor,
    block_rows: int,
    block_columns: int,
) -> None:
    """Quantize in plain torch; see :func:`quantize`."""
    block = block_rows, block_columns
    limit = greatest(quantized.dtype)
    for first, count, pieces in _stripes(wide, block):
        amax = wide.new_zeros((count, scale.shape[1]), dtype=torch.float32)
        values = None
        for top, rows in pieces:
            values = None  # free the last copy before the next is made
            values = _in_blocks(wide[top : top + rows], block)
            amax = torch.maximum(amax, _amax(values))
        stripe = scale[first : first + count]
        # Divide by a tensor, because CUDA would multiply by the reciprocal of a number.
        stripe.copy_((amax / torch.full_like(amax, limit)).clamp_(min=_TINY))
        divisor = stripe[:, None, :, None].float()
        for top, rows in pieces:
            if values is None or len(pieces) > 1:
                values = None
                values = _in_blocks(wide[top : top + rows], block)
            values.div_(divisor)
            if not quantized.dtype.is_floating_point:
                values.round_()
            values.clamp_(-limit, limit)
            flat = values.view(-1, values.shape[2] * values.shape[3])
            quantized[top : top + rows].copy_(flat[:rows, : wide.shape[1]])


def dequantize(
    quantized: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return ``quantized * scale``, multiplied in float32, as ``dtype [rows, columns]``.

    Shapes are as for :func:`quantize`.
    """
    wide = torch.empty(quantized.shape, dtype=dtype, device=quantized.device)
    for first, count, pieces in _stripes(quantized, block):
        factor = scale[first : first + count, None, :, None].float()
        for top, rows in pieces:
            values = _in_blocks(quantized[top : top + rows], block).mul_(factor)
            flat = values.view(-1, values.shape[2] * values.shape[3])
            wide[top : top + rows].copy_(flat[:rows, : wide.shape[1]])
    return wide


def _stripes(
    matrix: torch.Tensor, block: tuple[int, int]
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yield rows of blocks to convert together: the first, their count, and parts of their rows.

    A part (first row, rows) is small enough to convert at once.
    """
    rows, columns = matrix.shape
    if not matrix.numel():
        return
    chunk = _CPU_CHUNK if matrix.is_cpu else _CHUNK
    chunk_rows = max(1, chunk // columns)
    count = max(1, chunk_rows // block[0])
    for first in range(0, -(-rows // block[0]), count):
        begin, end = first * block[0], min((first + count) * block[0], rows)
        step = chunk_rows if count == 1 and block[0] > chunk_rows else end - begin
        pieces = [(top, min(step, end - top)) for top in range(begin, end, step)]
        yield first, -(-(end - begin) // block[0]), pieces


def _in_blocks(rows: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return a float32 copy ``[blocks, block rows, blocks, block columns]``, padded with zeros.

    Rows that belong to a single block are not padded.
    """
    height, width = rows.shape
    down, across = math.ceil(height / block[0]), math.ceil(width / block[1])
    tall = block[0] if down > 1 else height
    shape = (down * tall, across * block[1])
    values = torch.empty(shape, dtype=torch.float32, device=rows.device)
    values[:height, :width].copy_(rows)
    values[height:].zero_()
    values[:, width:].zero_()
    return values.view(down, tall, across, block[1])


def _amax(values: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of each block, without copying ``values``."""
    if values.shape[0] == values.shape[2] == 1:  # this case is several times as fast
        least, most = values.aminmax()
        return torch.maximum(most, -least).view(1, 1)
    return torch.maximum(values.amax((1, 3)), values.amin((1, 3)).neg_())


def quantize_static_reference(
    wide: torch.Tensor,
    quantized: torch.Tensor,
    scale: torch.Tensor,
    block_rows: int,
    block_columns: int,
) -> None:
    """Quantize by given scales in plain torch; see :func:`quantize_static`."""
    rows, columns = wide.shape
    each = scale.repeat_interleave(block_rows, 0)[:rows]
    each = each.repeat_interleave(block_columns, 1)[:, :columns]
    limit = greatest(quantized.dtype)
    values = (wide.float() / each).clamp_(-limit, limit)
    quantized.copy_(values if quantized.dtype.is_floating_point else values.round_())


def quantize_triton(
    wide: torch.Tensor,
    quantized: torch.Tensor,
    scale: torch.Tensor,
    block_rows: int,
    block_columns: int,
) -> None:
    """Quantize by Triton kernels; see :func:`quantize`."""
    if not can_convert(quantized.dtype, wide):
        quantize_reference(wide, quantized, scale, block_rows, block_columns)
        return
    if not wide.numel():
        return
    tall, broad = min(block_rows, wide.shape[0]), min(block_columns, wide.shape[1])
    tile = next_power_of_2(tall), next_power_of_2(broad)
    if tile[0] * tile[1] <= _WHOLE:  # each number is read once
        if tall == 1:
            tile = max(1, _PART // tile[1]), tile[1]
        _launch(wide, quantized, scale, None, (tall, broad), tile, WHOLE=True)
        return
    tile = _part(tall, broad)
    amax = torch.zeros(scale.shape, dtype=torch.int32, device=wide.device)
    tiles = _tiles(wide, (tall, broad), tile)
    _largest[(tiles,)](
        wide,
        amax,
        *wide.shape,
        tall,
        broad,
        *wide.stride(),
        *amax.stride(),
        TALL_1=tall == 1,
        TILE_ROWS=tile[0],
        TILE_COLUMNS=tile[1],
        num_warps=_warps(tile),
    )
    _launch(wide, quantized, scale, amax, (tall, broad), tile, WHOLE=False)


def quantize_static_triton(
    wide: torch.Tensor,
    quantized: torch.Tensor,
    scale: torch.Tensor,
    block_rows: int,
    block_columns: int,
) -> None:
    """Quantize by given scales in a Triton kernel; see :func:`quantize_static`."""
    if not can_convert(quantized.dtype, wide):
        quantize_static_reference(wide, quantized, scale, block_rows, block_columns)
        return
    if not wide.numel():
        return
    tall, broad = min(block_rows, wide.shape[0]), min(block_columns, wide.shape[1])
    tile = _part(tall if tall > 1 else _PART, broad)
    _launch(wide, quantized, scale, None, (tall, broad), tile, WHOLE=False)


def _launch(
    wide: torch.Tensor,
    quantized: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    block: tuple[int, int],
    tile: tuple[int, int],
    *,
    WHOLE: bool,
) -> None:
    """Quantize tile by tile; scales come from the tile (WHOLE), from ``amax``, or are given."""
    _quantize_tiles[(_tiles(wide, block, tile),)](
        wide,
        quantized,
        scale,
        amax,
        *wide.shape,
        *block,
        *wide.stride(),
        *quantized.stride(),
        *scale.stride(),
        *(scale if amax is None else amax).stride(),
        WHOLE=WHOLE,
        TALL_1=block[0] == 1,
        TILE_ROWS=tile[0],
        TILE_COLUMNS=tile[1],
        MAX=greatest(quantized.dtype),
        num_warps=_warps(tile),
    )


def _part(rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of a tile that covers part of a block."""
    across = min(next_power_of_2(columns), _PART)
    return min(next_power_of_2(rows), _PART // across), across


def _tiles(wide: torch.Tensor, block: tuple[int, int], tile: tuple[int, int]) -> int:
    """Return the number of tiles: each is part of a block, or several blocks of one row."""
    (rows, columns), (tall, broad) = wide.shape, block
    down = -(-rows // tile[0]) if tall == 1 else -(-rows // tall) * -(-tall // tile[0])
    return down * -(-columns // broad) * -(-broad // tile[1])


def _warps(tile: tuple[int, int]) -> int:
    """Return the number of warps of a tile: about 32 elements for each thread."""
    return min(16, max(1, tile[0] * tile[1] // 1024))


# Kernels compare absolute values by their bits, which as integers have the same order, NaN last.


@triton.jit
def absolute_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_from_bits(bits, MAX: tl.constexpr):
    """Return the scale of a block whose largest absolute value has these bits."""
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, MAX, tl.float32))
    tiny = 1.1754943508222875e-38
    return tl.maximum(scale, tiny, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scaled_to(x, scale, MAX: tl.constexpr, dtype: tl.constexpr):
    """Return ``x / scale`` (float32, of equal shapes) in eight bits, rounded to even."""
    y = tl.div_rn(x, scale)
    y = tl.minimum(y, MAX, propagate_nan=tl.PropagateNan.ALL)
    y = tl.maximum(y, -MAX, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.int8:
        y = (y + 12582912.0) - 12582912.0  # a sum with 1.5 * 2**23 has no fraction bits
    else:
        # GPUs before Hopper truncate to float16 first, so that numbers just beyond a tie look like
        # ties. So one bit below FP8's precision is set if any later bit is set.
        bits = y.to(tl.int32, bitcast=True)
        y = ((bits | ((bits & 0x1FFFF) + 0x1FFFF)) & -0x20000).to(tl.float32, bitcast=True)
    return y.to(dtype)


@triton.jit
def _tile(
    rows,
    columns,
    tall,
    broad,
    TALL_1: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Return a program's rows, columns, mask, block rows, their mask, and block column.

    A tile of one-row blocks has a block for each row; any other tile lies in one block.
    """
    parts = tl.cdiv(broad, TILE_COLUMNS)
    all_across = tl.cdiv(columns, broad) * parts
    down = (tl.program_id(0) // all_across).to(tl.int64)
    across = (tl.program_id(0) % all_across).to(tl.int64)
    j = across % parts * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    across = across // parts
    column = across * broad + j
    if TALL_1:
        row = down * TILE_ROWS + tl.arange(0, TILE_ROWS)
        block, exists = row, row < rows
    else:
        parts = tl.cdiv(tall, TILE_ROWS)
        i = down % parts * TILE_ROWS + tl.arange(0, TILE_ROWS)
        block = down // parts + tl.zeros([1], tl.int64)
        row = block * tall + i
        exists = (i < tall) & (row < rows)
    inside = exists[:, None] & ((j < broad) & (column < columns))[None, :]
    return row[:, None], column[None, :], inside, block, block < tl.cdiv(rows, tall), across


@triton.jit
def _largest_bits(x, TALL_1: tl.constexpr):
    """Return the bits of the largest absolute value of each block of a tile."""
    bits = tl.max(absolute_bits(x), axis=1)
    if not TALL_1:
        bits = tl.max(bits, axis=0, keep_dims=True)
    return bits


@triton.jit(do_not_specialize=["rows", "tall", "scale_row", "amax_row"])
def _quantize_tiles(
    wide_ptr,
    quantized_ptr,
    scale_ptr,
    amax_ptr,
    rows,
    columns,
    tall,
    broad,
    wide_row,
    wide_column,
    quantized_row,
    quantized_column,
    scale_row,
    scale_column,
    amax_row,
    amax_column,
    WHOLE: tl.constexpr,
    TALL_1: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    MAX: tl.constexpr,
):
    """Quantize a tile, and write its scales unless they are given.

    With ``amax``, all tiles of a block write the same scale.
    """
    row, column, inside, block, exists, across = _tile(
        rows, columns, tall, broad, TALL_1, TILE_ROWS, TILE_COLUMNS
    )
    x = tl.load(wide_ptr + row * wide_row + column * wide_column, mask=inside, other=0.0)
    x = x.to(tl.float32)
    scale_ptrs = scale_ptr + block * scale_row + across * scale_column
    if WHOLE:
        scale = scale_from_bits(_largest_bits(x, TALL_1), MAX)
        tl.store(scale_ptrs, scale, mask=exists)
    elif amax_ptr is not None:
        bits = tl.load(amax_ptr + block * amax_row + across * amax_column, mask=exists, other=0)
        scale = scale_from_bits(bits, MAX)
        tl.store(scale_ptrs, scale, mask=exists)
    else:
        scale = tl.load(scale_ptrs, mask=exists, other=1.0)
    scale = tl.broadcast_to(scale[:, None], x.shape)
    y = scaled_to(x, scale, MAX, quantized_ptr.dtype.element_ty)
    tl.store(quantized_ptr + row * quantized_row + column * quantized_column, y, mask=inside)


@triton.jit(do_not_specialize=["rows", "tall", "amax_row"])
def _largest(
    wide_ptr,
    amax_ptr,
    rows,
    columns,
    tall,
    broad,
    wide_row,
    wide_column,
    amax_row,
    amax_column,
    TALL_1: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Update each block's ``amax`` with that of a tile, in any order of tiles."""
    row, column, inside, block, exists, across = _tile(
        rows, columns, tall, broad, TALL_1, TILE_ROWS, TILE_COLUMNS
    )
    x = tl.load(wide_ptr + row * wide_row + column * wide_column, mask=inside, other=0.0)
    bits = _largest_bits(x.to(tl.float32), TALL_1)
    amax_ptrs = amax_ptr + block * amax_row + across * amax_column
    tl.atomic_max(amax_ptrs, bits, mask=exists, sem="relaxed")


_quantize = operator(quantize_reference, quantize_triton, nothing, ("quantized", "scale"))
_quantize_static = operator(
    quantize_static_reference, quantize_static_triton, nothing, ("quantized",)
)
