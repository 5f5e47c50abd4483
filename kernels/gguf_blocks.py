"""Weights in the blocks of GGUF files: the values they stand for, and products with them.

Formulas: ``dequantize_row_*`` in ggml-quants.c of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.gguf_types import BLOCK_TYPES
from vllm_module.kernels.grouped_matmul_mxfp4 import E2M1
from vllm_module.kernels.linear import linear
from vllm_module.kernels.operators import expect

_CHUNK = 1 << 22  # values that are dequantized at a time: 16 MiB in float32


def dequantize_blocks(
    blocks: torch.Tensor, kind: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the values of blocks, computed in float32.

    Args:
        blocks: uint8 ``[..., count, bytes]``, with the bytes of a block of this kind.
        kind: a name of ``BLOCK_TYPES``.
        dtype: of the result, floating point.

    Returns:
        ``[..., count * values]``.

    Raises:
        ValueError: a kind without a formula here, or blocks of another shape or dtype.

    """
    if kind not in BLOCK_TYPES:
        raise ValueError(f"blocks of type {kind!r}: expected one of {', '.join(BLOCK_TYPES)}")
    block = BLOCK_TYPES[kind]
    if blocks.dim() < 2 or blocks.shape[-1] != block.nbytes or blocks.dtype != torch.uint8:
        raise ValueError(
            f"{kind} blocks must be uint8 [..., count, {block.nbytes}], got {blocks.dtype} "
            f"{list(blocks.shape)}"
        )
    flat = blocks.reshape(-1, block.nbytes)
    values = torch.empty(len(flat), block.values, dtype=dtype, device=blocks.device)
    step = _CHUNK // block.values
    for first in range(0, len(flat), step):
        out = values[first : first + step]
        out.copy_(_FORMULAS[kind](flat[first : first + step]).view(out.shape))
    return values.view(*blocks.shape[:-2], blocks.shape[-2] * block.values)


def block_scales(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the floats of each block, which its values are products and sums with.

    Args:
        blocks: uint8 ``[..., bytes]``, with the bytes of a block of this kind.
        kind: a name of ``BLOCK_TYPES``.

    Returns:
        float32 ``[..., 1]``, or ``[..., 2]`` where a block has an offset too.

    """
    scales = _SCALES[kind](blocks.reshape(-1, blocks.shape[-1]))
    return scales.view(*blocks.shape[:-1], scales.shape[-1])


def blocks_matmul(
    x: torch.Tensor, blocks: torch.Tensor, kind: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply by a weight in blocks, of which a few million values are dequantized at a time.

    Args:
        x: ``[..., input]``, bfloat16, float16 or float32.
        blocks: uint8 ``[output, input / values, bytes]``, as for :func:`dequantize_blocks`.
        kind: a name of ``BLOCK_TYPES``.
        bias: ``[output]``, of the dtype of ``x``.

    Returns:
        ``[..., output]``, of the dtype of ``x``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other.

    """
    expect("x", x, None, FLOATS)
    expect("blocks", blocks, (None, None, None), (torch.uint8,), x)
    output, count = blocks.shape[:2]
    columns = count * BLOCK_TYPES[kind].values
    if x.dim() < 1 or x.shape[-1] != columns:
        raise ValueError(f"x must have {columns} features, as the weight, got {list(x.shape)}")
    if bias is not None:
        expect("bias", bias, (output,), (x.dtype,), x)
    step = max(1, _CHUNK // max(1, columns))
    parts = []
    for first in range(0, output, step):
        rows = min(step, output - first)
        weight = dequantize_blocks(blocks.narrow(0, first, rows), kind, x.dtype)
        parts.append(linear(x, weight, None if bias is None else bias.narrow(0, first, rows)))
    return torch.cat(parts, -1) if len(parts) != 1 else parts[0]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 number at byte ``at`` of each block, float32 ``[blocks, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _two_halves(blocks: torch.Tensor) -> torch.Tensor:
    """Return the scale and the offset at the beginning of each block, float32 ``[blocks, 2]``."""
    return torch.cat((_half(blocks, 0), _half(blocks, 2)), -1)


def _fields(packed: torch.Tensor, run: int, bits: int) -> torch.Tensor:
    """Return the fields of ``bits`` in bytes ``[blocks, n]``: uint8 ``[blocks, n * 8 / bits]``.

    The lowest fields of ``run`` bytes come first, then the next ones of the same bytes.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    runs = packed.reshape(len(packed), -1, 1, run)
    return ((runs >> shifts) & ((1 << bits) - 1)).flatten(1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_fields(blocks[:, 2:], 16, 4).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _fields(blocks[:, 4:], 16, 4).float() + _half(blocks, 2)


def _five_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return codes whose fifth bits are in four bytes from ``at`` on, and the others behind."""
    high = _fields(blocks[:, at : at + 4], 1, 1)
    return (_fields(blocks[:, at + 4 :], 16, 4) | high << 4).float()


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_five_bits(blocks, 2) - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _five_bits(blocks, 4) + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _mxfp4_scale(blocks: torch.Tensor) -> torch.Tensor:
    """Return the power of two of each block, float32 ``[blocks, 1]``; NaN for 255."""
    return blocks[:, :1].contiguous().view(torch.float8_e8m0fnu).float()


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(E2M1, device=blocks.device)
    return _mxfp4_scale(blocks) * values[_fields(blocks[:, 1:], 16, 4).int()]


def _scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the offset of each run of 32 values, float32 ``[blocks, 8, 1]``.

    Twelve bytes have eight numbers of six bits each of both. The first four are in the low bits of
    bytes 0 to 7. The low bits of the others are in bytes 8 to 11, the rest on top of bytes 0 to 7.
    """
    first, second, third = blocks[:, 4:16].split(4, -1)
    scale = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), -1)
    offset = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), -1)
    scales = _half(blocks, 0) * scale.float(), _half(blocks, 2) * offset.float()
    return scales[0].unsqueeze(-1), scales[1].unsqueeze(-1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, offset = _scales(blocks)
    return scale * _fields(blocks[:, 16:], 32, 4).view(-1, 8, 32).float() - offset


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, offset = _scales(blocks)
    codes = _fields(blocks[:, 48:], 32, 4) | _fields(blocks[:, 16:48], 32, 1) << 4
    return scale * codes.view(-1, 8, 32).float() - offset


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    codes = _fields(blocks[:, :128], 64, 4) | _fields(blocks[:, 128:192], 32, 2) << 4
    return scale.unsqueeze(-1) * (codes.view(-1, 16, 16).float() - 32)


_FORMULAS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}

_SCALES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": lambda blocks: _half(blocks, 0),
    "Q4_1": _two_halves,
    "Q5_0": lambda blocks: _half(blocks, 0),
    "Q5_1": _two_halves,
    "Q8_0": lambda blocks: _half(blocks, 0),
    "Q4_K": _two_halves,
    "Q5_K": _two_halves,
    "Q6_K": lambda blocks: _half(blocks, 208),
    "MXFP4": _mxfp4_scale,
}
