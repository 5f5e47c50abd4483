"""Weights in codes or floats, as the loops that multiply by them on a CPU read them.

Weights stay as they are stored. :mod:`~vllm_module.kernels.matmul.code_rows_matmul` multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_module.kernels.dtypes import E2M1
from vllm_module.kernels.matmul.compiled_blocks import BLOCKS
from vllm_module.kernels.matmul.compiled_codes import CODES, DOWN, FP8, IN_TABLE, INT8, MXFP4
from vllm_module.kernels.matmul.compiled_floats import BFLOAT16, FLOAT16, FLOAT32
from vllm_module.kernels.matmul.packed_words import Packing
from vllm_module.kernels.once import Once

_FLOATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


class CodeRows(NamedTuple):
    """A weight ``[output, input]`` in groups of bytes that share a scale, or in floats.

    Attributes:
        kind: how numbers are stored in a byte, in a word of 32 bits, or as floats.
        rows: uint8 ``[output, groups, bytes]``, contiguous; or int32 ``[output / 8, groups,
            inputs]`` if eight outputs share a word; or floats ``[output, 1, input]``.
        scales: float32 ``[output, groups]``; without columns for floats and MXFP4, or if the bytes
            hold them.
        zeros: uint8 ``[output, groups]``, subtracted from codes, if ``zero`` is not; of MXFP4 the
            exponents of the scales, plus 127.
        zero: subtracted from all codes.
        table: float32, values of the codes; or ``None``.
        order: the input of each number in the order of rows; ``None`` if that is their order.
        group_of: group of each input, int32, if inputs of a group are not side by side; then
            ``rows`` have one group.
        places: of eight outputs in their word, if they share one.

    """

    kind: int
    rows: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    zero: int = 0
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None
    group_of: torch.Tensor | None = None
    places: Sequence[int] = ()

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return len(self.rows) * (8 if self.kind == DOWN else 1)


def float_rows(weight: torch.Tensor) -> CodeRows | None:
    """Return a weight that is not quantized, or ``None`` if the loops do not take it."""
    if weight.dtype not in _FLOATS:
        return None
    scales = weight.new_empty(len(weight), 0, dtype=torch.float32)
    return CodeRows(_FLOATS[weight.dtype], weight.unsqueeze(1), scales)


def eight_bit_rows(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]
) -> CodeRows | None:
    """Return a weight of ``scaled_matmul``, or ``None`` if the loops do not take it."""
    output, columns = weight.shape
    groups = scale.shape[1]
    if columns % groups or (groups > 1 and columns // groups != block[1]):
        return None
    if block[0] > 1:
        scale = scale.repeat_interleave(block[0], 0)[:output]
    kind = INT8 if weight.dtype == torch.int8 else FP8
    return CodeRows(kind, _grouped(weight, groups), scale)


def packed_rows(
    words: torch.Tensor,
    scales: torch.Tensor,
    packing: Packing,
    group_size: int,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor | None,
    codebook: torch.Tensor | None,
) -> CodeRows | None:
    """Return a weight of ``packed_matmul``, or ``None`` if the loops do not take it."""
    bits, along, order = packing
    in_table = codebook is not None
    if bits not in CODES or (in_table and (bits != 4 or along == 0)):
        return None
    kind, zero = IN_TABLE if in_table else CODES[bits], 0 if in_table else 1 << (bits - 1)
    scales, columns = scales.float(), packing.codes(words.shape, words.dtype.itemsize * 8)[1]
    groups = 1 if group_of is not None else scales.shape[1]
    if columns % groups or (groups > 1 and group_size != columns // groups):
        return None
    if along == 0:
        if bits != 4 or words.dtype != torch.int32 or group_of is not None:
            return None
        rows = words.detach().view(len(words), groups, -1)
        return CodeRows(DOWN, rows, scales, zeros, zero, places=order or range(8))
    size = words.shape[1] * words.dtype.itemsize
    if size % groups or (order is not None and groups > 1 and size // groups % words.itemsize):
        return None  # a group ends inside a byte, or in a word whose codes are in another order
    return CodeRows(
        kind,
        _grouped(words, groups),
        scales,
        zeros,
        zero,
        codebook,
        _order_of(size, bits, words.dtype.itemsize, order),
        group_of,
    )


def mxfp4_rows(blocks: torch.Tensor, exponents: torch.Tensor) -> CodeRows:
    """Return the weight of one expert of ``grouped_matmul_mxfp4``."""
    size = blocks.shape[1:].numel()
    none, order = torch.empty(len(blocks), 0, device="cpu"), _order_of(size, 4, 1, None)
    return CodeRows(MXFP4, blocks.detach(), none, exponents.detach(), table=_e2m1(), order=order)


@Once
def _e2m1() -> torch.Tensor:
    return torch.tensor(E2M1, dtype=torch.float32, device="cpu")


def block_rows(blocks: torch.Tensor, kind: str) -> CodeRows | None:
    """Return a weight in blocks of GGUF files, or ``None`` if the loops do not take it."""
    if kind not in BLOCKS:
        return None
    return CodeRows(BLOCKS[kind], blocks, torch.empty(len(blocks), 0), table=_halves())


@Once
def _halves() -> torch.Tensor:
    """Return all float16 numbers by their bits, float32."""
    return torch.arange(1 << 16, device="cpu").to(torch.uint16).view(torch.float16).float()


def _grouped(weight: torch.Tensor, groups: int) -> torch.Tensor:
    return weight.detach().view(torch.uint8).view(len(weight), groups, -1)


@Once
def _order_of(size: int, bits: int, width: int, order: Sequence[int] | None) -> torch.Tensor | None:
    """Return the input of each code, with the lowest codes of all bytes of a row before the next.

    Args:
        size: bytes of a row.
        bits: of a code.
        width: bytes of a word.
        order: place in its word of each code.

    """
    in_byte, in_word = 8 // bits, width * 8 // bits
    if in_byte == 1 and order is None:
        return None
    codes = torch.arange(in_word, device="cpu")
    if order is not None:
        codes = torch.tensor(order, device="cpu").argsort()
    words = torch.arange(size // width, device="cpu").unsqueeze(1) * in_word + codes
    return words.view(size, in_byte).t().reshape(-1)
