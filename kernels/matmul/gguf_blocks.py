"""Weights in the blocks of GGUF files: dequantizing them, and matmuls with them.

Formulas: ``dequantize_row_*`` in ggml-quants.c of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from vllm_module.kernels.dtypes import E2M1, FLOATS
from vllm_module.kernels.matmul.code_rows import block_rows
from vllm_module.kernels.matmul.code_rows_matmul import multiplied_by_codes
from vllm_module.kernels.matmul.gguf_codebooks import codebook
from vllm_module.kernels.matmul.gguf_types import BLOCK_TYPES
from vllm_module.kernels.matmul.linear import linear
from vllm_module.kernels.once import Once
from vllm_module.kernels.operators import expect

_CHUNK = 1 << 22  # values dequantized at once: 16 MiB in float32


def dequantize_blocks(
    blocks: torch.Tensor, kind: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Dequantize blocks in float32.

    Args:
        blocks: uint8 ``[..., count, bytes]``, with the bytes of a block of this kind.
        kind: a name of ``BLOCK_TYPES``.
        dtype: dtype of the result, floating point.

    Returns:
        ``[..., count * values]``.

    Raises:
        ValueError: the kind has no formula here, or blocks have another shape or dtype.

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
        out.copy_(_KINDS[kind].values(flat[first : first + step]).view(out.shape))
    return values.view(*blocks.shape[:-2], blocks.shape[-2] * block.values)


def block_scales(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the floats of each block from which its values are computed: scale and offset.

    Args:
        blocks: uint8 ``[..., bytes]``, with the bytes of a block of this kind.
        kind: a name of ``BLOCK_TYPES``.

    Returns:
        float32 ``[..., 1]``, or ``[..., 2]`` if a block also has an offset.

    """
    scales = _KINDS[kind].scales(blocks.reshape(-1, blocks.shape[-1]))
    return scales.view(*blocks.shape[:-1], scales.shape[-1])


def blocks_matmul(
    x: torch.Tensor, blocks: torch.Tensor, kind: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply by a weight in blocks; a few million values are dequantized at a time.

    Args:
        x: ``[..., input]``, bfloat16, float16 or float32.
        blocks: uint8 ``[output, input / values, bytes]``, as for :func:`dequantize_blocks`.
        kind: a name of ``BLOCK_TYPES``.
        bias: ``[output]``, of the dtype of ``x``.

    Returns:
        ``[..., output]``, of the dtype of ``x``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.

    """
    expect("x", x, None, FLOATS)
    expect("blocks", blocks, (None, None, None), (torch.uint8,), x)
    output, count = blocks.shape[:2]
    columns = count * BLOCK_TYPES[kind].values
    if x.dim() < 1 or x.shape[-1] != columns:
        raise ValueError(f"x must have {columns} features, as the weight, got {list(x.shape)}")
    if bias is not None:
        expect("bias", bias, (output,), (x.dtype,), x)
    product = multiplied_by_codes(x, block_rows, blocks, kind, bias=bias)
    if product is not None:
        return product
    step = max(1, _CHUNK // max(1, columns))
    parts = []
    for first in range(0, output, step):
        rows = min(step, output - first)
        weight = dequantize_blocks(blocks.narrow(0, first, rows), kind, x.dtype)
        parts.append(linear(x, weight, None if bias is None else bias.narrow(0, first, rows)))
    return torch.cat(parts, -1) if len(parts) != 1 else parts[0]


def _numbers(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return numbers, float32, that stay on the device: a CUDA graph copies none from the host."""
    return _kept(values, device)


vars(_numbers)["_dynamo_marked_constant"] = True  # as of a codebook


@Once
def _kept(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 number at byte ``at`` of each block, float32 ``[blocks, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(packed: torch.Tensor, run: int, bits: int) -> torch.Tensor:
    """Return the ``bits``-bit fields of bytes ``[blocks, n]``, uint8 ``[blocks, n * 8 / bits]``.

    The lowest fields of ``run`` bytes come first, then the next fields of the same bytes.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    runs = packed.reshape(len(packed), -1, 1, run)
    return ((runs >> shifts) & ((1 << bits) - 1)).flatten(1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_fields(blocks[:, 2:], 16, 4).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _fields(blocks[:, 4:], 16, 4).float() + _half(blocks, 2)


def _five_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return five-bit codes: fifth bits in four bytes from ``at`` on, the others after them."""
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
    return _mxfp4_scale(blocks) * _numbers(E2M1, blocks.device)[_fields(blocks[:, 1:], 16, 4).int()]


def _scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the offset of each run of 32 values, float32 ``[blocks, 8, 1]``.

    Twelve bytes hold eight scales and eight offsets of six bits each. The first four of both are in
    the low bits of bytes 0 to 7. The low bits of the others are in bytes 8 to 11, and their high
    bits in the high bits of bytes 0 to 7.
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


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scale = _half(blocks, 80) * (blocks[:, :16] & 15).float()
    offset = _half(blocks, 82) * (blocks[:, :16] >> 4).float()
    codes = _fields(blocks[:, 16:80], 32, 2).view(-1, 16, 16).float()
    return scale.unsqueeze(-1) * codes - offset.unsqueeze(-1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    scale = _fields(blocks[:, 96:104], 8, 4) | _fields(blocks[:, 104:108], 4, 2) << 4
    scales = _half(blocks, 108) * (scale.float() - 32)
    codes = _fields(blocks[:, 32:96], 32, 2) | _fields(blocks[:, :32], 32, 1) << 2
    return scales.unsqueeze(-1) * (codes.view(-1, 16, 16).float() - 4)


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    """Return values -1, 0 and 1: a byte, as a fraction of 256, has five digits in base 3."""
    runs = (blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)
    powers = _numbers((1, 3, 9, 27, 81), blocks.device).byte()
    rest = torch.cat([(run[:, None] * powers[:n, None]).flatten(1) for run, n in runs], -1)
    return _half(blocks, 52) * ((rest.short() * 3 >> 8).float() - 1)


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 64) * (_fields(blocks[:, :64], 32, 2).float() - 1)


# Values of the codes of IQ4: kvalues_iq4nl in ggml-common.h.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4(packed: torch.Tensor) -> torch.Tensor:
    return _numbers(_IQ4, packed.device)[_fields(packed, 16, 4).int()]


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _iq4(blocks[:, 2:])


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    scale = _fields(blocks[:, 4:8], 1, 4) | _fields(blocks[:, 2:4], 1, 2) << 4
    scales = _half(blocks, 0) * (scale.float() - 32)
    return scales.unsqueeze(-1) * _iq4(blocks[:, 8:]).view(-1, 8, 32)


def _words(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return little-endian words of two or four bytes, int32 ``[blocks, words]``.

    Words of four bytes may be negative, and words of two are not.
    """
    # A copy, because bytes at an odd address cannot be viewed as words.
    words = packed.clone(memory_format=torch.contiguous_format).view(dtype).int()
    return words & 0xFFFF if dtype == torch.int16 else words


def _signs(bits: torch.Tensor) -> torch.Tensor:
    """Return -1 for each set bit and 1 for each other: float32 ``[blocks, n * 8]``."""
    return 1 - 2 * _fields(bits.flatten(1), 1, 1).float()


def _even_signs(codes: torch.Tensor) -> torch.Tensor:
    """Return signs of runs of eight values from the first seven; the number of -1 is even."""
    bits = (codes.unsqueeze(-1) >> torch.arange(7, device=codes.device)) & 1
    return _signs((codes | (bits.sum(-1) & 1) << 7).byte())


def _runs(
    scales: torch.Tensor, name: str, vectors: torch.Tensor, signs: torch.Tensor
) -> torch.Tensor:
    """Return codebook vectors times their runs' scales and their values' signs."""
    values = codebook(name, vectors.device)[vectors.flatten(1).int()]
    scaled = scales.unsqueeze(-1) * values.view(*scales.shape, -1)
    return scaled.flatten(1) * signs


def _iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    runs = blocks[:, 2:].reshape(-1, 8, 8)  # four vectors, then a word with their signs and scale
    word = _words(runs[..., 4:].flatten(1), torch.int32)
    scales = _half(blocks, 0) * (0.5 + (word >> 28 & 15).float()) * 0.25
    return _runs(scales, "IQ2_XXS", runs[..., :4], _even_signs(_sevens(word)))


def _sevens(word: torch.Tensor) -> torch.Tensor:
    """Return four seven-bit numbers of each word, int32 ``[blocks, words * 4]``."""
    shifts = torch.arange(0, 28, 7, dtype=torch.int32, device=word.device)
    return (word.unsqueeze(-1) >> shifts & 127).flatten(1)


def _iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    word = _words(blocks[:, 2:66], torch.int16)
    scales = _half(blocks, 0) * (0.5 + _fields(blocks[:, 66:], 1, 4).float()) * 0.25
    return _runs(scales, "IQ2_XS", word & 511, _even_signs(word >> 9))


def _iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    vectors = blocks[:, 2:34].int() | _fields(blocks[:, 66:74], 1, 2).int() << 8
    scales = _half(blocks, 0) * (0.5 + _fields(blocks[:, 74:], 1, 4).float()) * 0.25
    return _runs(scales, "IQ2_S", vectors, _signs(blocks[:, 34:66]))


def _iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    word = _words(blocks[:, 66:], torch.int32)
    scales = _half(blocks, 0) * (0.5 + (word >> 28 & 15).float()) * 0.5
    return _runs(scales, "IQ3_XXS", blocks[:, 2:66], _even_signs(_sevens(word)))


def _iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    vectors = blocks[:, 2:66].int() | _fields(blocks[:, 66:74], 1, 1).int() << 8
    scales = _half(blocks, 0) * (1 + 2 * _fields(blocks[:, 106:], 1, 4).float())
    return _runs(scales, "IQ3_S", vectors, _signs(blocks[:, 74:106]))


def _threes(word: torch.Tensor) -> torch.Tensor:
    """Return four three-bit numbers of each word, int32 ``[blocks, words * 4]``."""
    shifts = torch.arange(0, 12, 3, dtype=torch.int32, device=word.device)
    return (word.unsqueeze(-1) >> shifts & 7).flatten(1)


def _iq1(scales: torch.Tensor, vectors: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Return vectors of -1, 0 and 1, shifted by an eighth for each run, times its scale."""
    values = codebook("IQ1_S", vectors.device)[vectors].view(*negative.shape, -1)
    moved = values + (0.125 - 0.25 * negative.float()).unsqueeze(-1)
    return scales.unsqueeze(-1) * moved.view(*scales.shape, -1)


def _iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    word = _words(blocks[:, 34:], torch.int16)
    scales = _half(blocks, 0) * (2 * (word >> 12 & 7) + 1).float()
    return _iq1(scales, blocks[:, 2:34].int() | _threes(word) << 8, word >> 15)


def _iq1_m_scale(blocks: torch.Tensor) -> torch.Tensor:
    """Return the scale of each block, float32; four words have four of its bits each."""
    high = blocks[:, 49::2] >> 4  # the lowest bits first
    return _half(torch.stack((high[:, 0] | high[:, 1] << 4, high[:, 2] | high[:, 3] << 4), -1), 0)


def _iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    scale = _threes(_words(blocks[:, 48:], torch.int16))
    scales = _iq1_m_scale(blocks) * (2 * scale + 1).float()
    high = _fields(blocks[:, 32:48], 1, 4).int()
    return _iq1(scales, blocks[:, :32].int() | (high & 7) << 8, high >> 3)


class _Kind(NamedTuple):
    """Functions from blocks to their values, and to the floats that these are computed from."""

    values: Callable[[torch.Tensor], torch.Tensor]
    scales: Callable[[torch.Tensor], torch.Tensor]


def _at(place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: _half(blocks, place)


def _two_at(place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: torch.cat((_half(blocks, place), _half(blocks, place + 2)), -1)


_KINDS: Mapping[str, _Kind] = {
    "Q4_0": _Kind(_q4_0, _at(0)),
    "Q4_1": _Kind(_q4_1, _two_at(0)),
    "Q5_0": _Kind(_q5_0, _at(0)),
    "Q5_1": _Kind(_q5_1, _two_at(0)),
    "Q8_0": _Kind(_q8_0, _at(0)),
    "Q2_K": _Kind(_q2_k, _two_at(80)),
    "Q3_K": _Kind(_q3_k, _at(108)),
    "Q4_K": _Kind(_q4_k, _two_at(0)),
    "Q5_K": _Kind(_q5_k, _two_at(0)),
    "Q6_K": _Kind(_q6_k, _at(208)),
    "TQ1_0": _Kind(_tq1_0, _at(52)),
    "TQ2_0": _Kind(_tq2_0, _at(64)),
    "IQ1_S": _Kind(_iq1_s, _at(0)),
    "IQ1_M": _Kind(_iq1_m, _iq1_m_scale),
    "IQ2_XXS": _Kind(_iq2_xxs, _at(0)),
    "IQ2_XS": _Kind(_iq2_xs, _at(0)),
    "IQ2_S": _Kind(_iq2_s, _at(0)),
    "IQ3_XXS": _Kind(_iq3_xxs, _at(0)),
    "IQ3_S": _Kind(_iq3_s, _at(0)),
    "IQ4_NL": _Kind(_iq4_nl, _at(0)),
    "IQ4_XS": _Kind(_iq4_xs, _at(0)),
    "MXFP4": _Kind(_mxfp4, _mxfp4_scale),
}
