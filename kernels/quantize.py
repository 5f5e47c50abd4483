"""Eight-bit weights: numbers that share a scale, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

# Elements converted at a time: on the CPU what fits a cache, elsewhere what fills the device.
_CPU_CHUNK, _CHUNK = 1 << 19, 1 << 23
_TINY = torch.finfo(torch.float32).tiny


def greatest(dtype: torch.dtype) -> float:
    """Return the greatest number of a quantized ``dtype``: 448 for float8_e4m3fn, 127 for int8."""
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return float(info.max)


def quantize_reference(
    wide: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]
) -> None:
    """Quantize ``wide`` symmetrically, in float32, in plain torch.

    A block's scale is its largest absolute value over the greatest of ``quantized.dtype`` (at least
    the smallest normal float32, so that zeros stay zeros); an element is ``wide / scale``, rounded
    to even. A number that is not finite makes its block's scale so.

    Args:
        wide: ``[rows, columns]``, floating point.
        quantized: ``[rows, columns]``, float8_e4m3fn or int8; written.
        scale: float32 ``[ceil(rows / block[0]), ceil(columns / block[1])]``; written.
        block: rows and columns that share a scale.

    """
    most = greatest(quantized.dtype)
    for first, count, pieces in _stripes(wide, block):
        amax = wide.new_zeros((count, scale.shape[1]), dtype=torch.float32)
        values = None
        for top, rows in pieces:
            values = None  # or two copies would be held at a time
            values = _in_blocks(wide[top : top + rows], block)
            amax = torch.maximum(amax, _amax(values))
        stripe = scale[first : first + count]
        stripe.copy_((amax / most).clamp_(min=_TINY))
        divisor = stripe[:, None, :, None].float()
        for top, rows in pieces:
            if values is None or len(pieces) > 1:
                values = None
                values = _in_blocks(wide[top : top + rows], block)
            values.div_(divisor)
            if not quantized.dtype.is_floating_point:
                values.round_()
            values.clamp_(-most, most)
            flat = values.view(-1, values.shape[2] * values.shape[3])
            quantized[top : top + rows].copy_(flat[:rows, : wide.shape[1]])


def dequantize_reference(
    quantized: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return ``quantized * scale``, multiplied in float32, as ``dtype [rows, columns]``.

    Shapes as for :func:`quantize_reference`.
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
    """Yield rows of blocks that are worked on together: the first, how many, and their rows.

    The rows come in pieces (first row, rows) small enough to be converted at a time.
    """
    rows, columns = matrix.shape
    chunk = _CPU_CHUNK if matrix.is_cpu else _CHUNK
    fitting = max(1, chunk // max(columns, 1))
    together = max(1, fitting // block[0])
    for first in range(0, -(-rows // block[0]), together):
        begin, end = first * block[0], min((first + together) * block[0], rows)
        step = max(fitting, 1) if together == 1 and block[0] > fitting else end - begin
        pieces = [(top, min(step, end - top)) for top in range(begin, end, step)]
        yield first, -(-(end - begin) // block[0]), pieces


def _in_blocks(rows: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return a float32 copy as ``[blocks, rows of one, blocks, columns of one]``, padded by zero.

    Rows that are part of a single block are all of its rows.
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
    """Return the largest absolute value of each block; of its numbers, no second copy is made."""
    if values.shape[0] == values.shape[2] == 1:  # several times faster
        least, most = values.aminmax()
        return torch.maximum(most, -least).view(1, 1)
    return torch.maximum(values.amax((1, 3)), values.amin((1, 3)).neg_())


# One public function an operation; the Triton kernel will take the CUDA device's calls.
quantize = quantize_reference
dequantize = dequantize_reference
