"""Quantizing to NF4: a four-bit code for each element, and the absolute maximum of each block."""

from __future__ import annotations

import torch

from vllm_module.kernels.dtypes import WIDE_FLOATS
from vllm_module.kernels.matmul.packed_words import Packing
from vllm_module.kernels.operators import expect, expect_writable

# Quantiles of the normal distribution, as in QLoRA (arXiv:2305.14314, appendix E).
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
PACKING = Packing(4, 1, (1, 0))  # the first of two codes has the high bits of a byte
_TINY = 1e-38  # divisor for blocks of zeros


def quantize_nf4(
    wide: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, blocksize: int
) -> None:
    """Quantize ``wide`` to NF4, in float32, with the bits of bitsandbytes.

    An element is divided by the largest absolute value of its block, and its code is the nearest of
    16; of two equally near ones, the lower. If a number is not finite, neither is the largest
    value.

    Args:
        wide: ``[rows, columns]``, floating point; blocks divide a row.
        packed: uint8 ``[rows, columns / 2]``; written, packed as ``PACKING``.
        absmax: float32 ``[rows, columns / blocksize]``; written.
        blocksize: elements in a row that share a scale, an even number.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.

    """
    expect("wide", wide, (None, None), WIDE_FLOATS)
    rows, columns = wide.shape
    if blocksize < 2 or blocksize % 2 or columns % blocksize:
        raise ValueError(f"blocks of {blocksize} do not divide rows of {columns} into pairs")
    expect("packed", packed, (rows, columns // 2), (torch.uint8,), wide)
    expect("absmax", absmax, (rows, columns // blocksize), (torch.float32,), wide)
    expect_writable("packed", packed)
    expect_writable("absmax", absmax)
    blocks = wide.float().contiguous().view(rows, columns // blocksize, blocksize)
    torch.amax(blocks.abs(), -1, out=absmax)
    # Multiplied by the reciprocal: a quotient would round to another code if two are equally near.
    values = (blocks * (1.0 / absmax.clamp(min=_TINY)).unsqueeze(-1)).clamp_(-1, 1)
    levels = torch.tensor(NF4, dtype=torch.float32, device=wide.device)
    codes = torch.bucketize(values, (levels[:-1] + levels[1:]) / 2, out_int32=True)
    codes = codes.to(torch.uint8).view(rows, columns // 2, 2)
    torch.bitwise_or(codes[..., 0] << 4, codes[..., 1], out=packed)
