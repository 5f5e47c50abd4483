"""Weights of two, three, four or eight bits that share words, and what they stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch

WORDS = (torch.int32, torch.uint8)


class Packing(NamedTuple):
    """How codes lie in the words of a weight.

    A row of codes is a stream of bits, and a code of 3 bits may cross the edge of a word: 32 codes
    are 3 words of 32 bits. The first code has the lowest bits of a word, unless ``order`` is given.

    Attributes:
        bits: of a code: 2, 3, 4 or 8.
        along: the dimension in which neighbours share a word: 1 is the input, 0 the output.
        order: where in its word the first code is, the second one, ... AWQ has (0, 4, 1, 5, 2, 6,
            3, 7), bitsandbytes (1, 0) in bytes.

    """

    bits: int
    along: int = 1
    order: tuple[int, ...] | None = None

    def codes(self, words: torch.Size, width: int) -> tuple[int, int]:
        """Return the shape ``[output, input]`` of the codes in words of ``width`` bits."""
        rows, columns = words
        if self.along == 0:
            return rows * width // self.bits, columns
        return rows, columns * width // self.bits


def unpack(words: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Return the codes in ``words``.

    Args:
        words: int32 or uint8, ``[output, input * bits / width]``, or ``[output * bits / width,
            input]`` if the packing goes along the output; ``width`` is that of a word in bits.
        packing: how codes lie in them.

    Returns:
        uint8 ``[output, input]``, contiguous.

    """
    bits, along, order = packing
    if along == 0:
        return unpack(words.T, Packing(bits, 1, order)).T.contiguous()
    rows, width = words.shape[0], words.dtype.itemsize * 8
    if width % bits == 0:
        places = order or range(width // bits)
        shifts = torch.tensor([place * bits for place in places], device=words.device)
        codes = (words.unsqueeze(-1) >> shifts.to(words.dtype)) & ((1 << bits) - 1)
        return codes.to(torch.uint8).flatten(1)  # also of no rows
    # A code may lie in two words, so a period of whole words is taken as one stream of bits.
    bytes_of = words.contiguous().view(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    stream = ((bytes_of.unsqueeze(-1) >> shifts) & 1).reshape(rows, -1, bits)
    weights = (1 << torch.arange(bits, device=words.device)).to(torch.uint8)
    return (stream * weights).sum(-1, dtype=torch.uint8)


def pack(codes: torch.Tensor, packing: Packing, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return the words of ``codes``, uint8 ``[output, input]``: the inverse of :func:`unpack`.

    Raises ``ValueError`` if the codes do not fill whole words.
    """
    bits, along, order = packing
    if along == 0:
        return pack(codes.T, Packing(bits, 1, order), dtype).T.contiguous()
    rows, columns = codes.shape
    width = dtype.itemsize * 8
    if columns * bits % width:
        raise ValueError(f"{columns} codes of {bits} bits do not fill whole words of {width} bits")
    if order is not None:
        inverse = sorted(range(len(order)), key=order.__getitem__)
        codes = codes.reshape(rows, -1, len(order))[..., inverse]
    shifts = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    stream = ((codes.reshape(rows, -1, 1) >> shifts) & 1).reshape(rows, -1, 8)
    weights = (1 << torch.arange(8, device=codes.device)).to(torch.uint8)
    return (stream * weights).sum(-1, dtype=torch.uint8).view(dtype)


def dequantize_packed(
    words: torch.Tensor,
    scales: torch.Tensor,
    packing: Packing,
    group_size: int,
    dtype: torch.dtype,
    zeros: torch.Tensor | None = None,
    group_of: torch.Tensor | None = None,
    codebook: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weight ``[output, input]`` that packed codes stand for, in ``dtype``.

    An element is ``(code - zero) * scale``, or ``codebook[code] * scale``, computed in float32.

    Args:
        words: as for :func:`unpack`.
        scales: ``[output, groups]``, bfloat16, float16 or float32.
        packing: how codes lie in the words.
        group_size: inputs in a row that share a scale; the last group may be smaller.
        dtype: of the result.
        zeros: uint8 ``[output, groups]``; 2^(bits-1) if None.
        group_of: int32 ``[input]``, the group of each input, where they are not in order.
        codebook: float32 ``[2^bits]``, the values of the codes; there are no zeros then.

    """
    codes = unpack(words, packing)
    if group_of is None:
        group_of = torch.arange(codes.shape[1], device=codes.device) // group_size
    values: torch.Tensor
    if codebook is not None:
        values = codebook[codes.int()]
    elif zeros is None:
        values = codes.float() - float(1 << (packing.bits - 1))
    else:
        values = codes.float() - zeros.float()[:, group_of]
    return (values * scales.float()[:, group_of]).to(dtype)
