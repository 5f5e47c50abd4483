"""Packing and unpacking weights of two, three, four or eight bits, and dequantizing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.operators import expect

WORDS = (torch.int32, torch.uint8)

_CHUNK = 1 << 19  # elements dequantized at once on a CPU, in 2 MiB: as many as fit its cache
_CHUNK_OF_DEVICE = 1 << 24  # elements dequantized at once elsewhere, in 64 MiB: enough for a GPU
_WHOLE = 32  # number of rows that fill whole words, with any number of bits
# Dtype with as many bytes as float32 values of the codes in one byte.
_SEVERAL = {8: torch.float32, 4: torch.int64, 2: torch.complex128}


class Packing(NamedTuple):
    """The layout of codes in the words of a weight.

    A row of codes is a stream of bits, and a code of 3 bits may cross a word boundary: 32 codes are
    3 words of 32 bits. The first code has the lowest bits of a word, unless ``order`` is given.

    Attributes:
        bits: number of bits of a code: 2, 3, 4 or 8.
        along: the dimension in which neighbours share a word: 1 is the input, 0 the output.
        order: place in its word of the first code, the second one, ... AWQ has (0, 4, 1, 5, 2, 6,
            3, 7), bitsandbytes (1, 0) in bytes.

    """

    bits: int
    along: int = 1
    order: tuple[int, ...] | None = None

    @classmethod
    def of(cls, bits: int, along: int, order: Sequence[int] | None) -> Packing:
        """Return the packing of an operator's arguments, which have any sequence for a tuple."""
        return cls(bits, along, None if order is None else tuple(order))

    def codes(self, words: torch.Size, width: int) -> tuple[int, int]:
        """Return the shape ``[output, input]`` of the codes in words of ``width`` bits."""
        rows, columns = words
        if self.along == 0:
            return rows * width // self.bits, columns
        return rows, columns * width // self.bits

    def check(self, words: torch.Tensor) -> None:
        """Raise ``ValueError`` unless ``words [..., rows, columns]`` can have this packing."""
        width = words.dtype.itemsize * 8
        if self.bits not in (2, 3, 4, 8) or self.along not in (0, 1):
            raise ValueError(f"a packing must be of 2, 3, 4 or 8 bits along 0 or 1, got {self}")
        packed = words.shape[self.along - 2]
        if packed * width % self.bits:
            raise ValueError(f"{packed} words of {width} bits hold no whole codes of {self.bits}")
        if self.order is not None and (
            width % self.bits or sorted(self.order) != list(range(width // self.bits))
        ):
            raise ValueError(
                f"an order must have each place of a word of {width} bits once, got {self}"
            )


def check_packed(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    packing: Packing,
    group_size: int,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor | None,
) -> tuple[int, int]:
    """Return the outputs and inputs of a weight, or of weights ``[experts, ...]``.

    Raises ``ValueError`` if tensors, beside ``x``, do not fit each other.
    """
    expect("words", words, None, WORDS, x)
    packing.check(words)
    experts, width = words.shape[:-2], words.dtype.itemsize * 8
    output, columns = packing.codes(words.shape[-2:], width)
    expect("scales", scales, (*experts, output, None), FLOATS, x)
    if zeros is not None:
        expect("zeros", zeros, scales.shape, (torch.uint8,), x)
    if group_size < 1:
        raise ValueError(f"a group must have one input or more, got {group_size}")
    if group_of is not None:
        expect("group_of", group_of, (*experts, columns), (torch.int32,), x)
    elif scales.shape[-1] != -(-columns // group_size):
        raise ValueError(
            f"scales must have one column for each group of {group_size} of {columns} inputs, got "
            f"{list(scales.shape)}"
        )
    return output, columns


def unpack(words: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Return the codes in ``words``.

    Args:
        words: int32 or uint8, ``[output, input * bits / width]``, or ``[output * bits / width,
            input]`` if the packing goes along the output; ``width`` is that of a word in bits.
        packing: layout of the codes in the words.

    Returns:
        uint8 ``[output, input]``, contiguous.

    """
    bits, along, order = packing
    if along == 0:
        return unpack(words.T, Packing(bits, 1, order)).T.contiguous()
    rows, width = words.shape[0], words.dtype.itemsize * 8
    if width % bits == 0:
        shifts = torch.arange(0, width, bits, dtype=words.dtype, device=words.device)
        codes = (_in_plain_order(words, packing).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        return codes.to(torch.uint8).flatten(1)
    # A code may lie in two words, so a period of whole words is read as one stream of bits.
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    stream = (_bytes_of(words).unsqueeze(-1) >> shifts) & 1
    stream = stream.view(rows, words.shape[1] * width // bits, bits)
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
        codes = codes.reshape(rows, columns // len(order), len(order))[..., inverse]
    shifts = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    stream = (codes.reshape(rows, columns, 1) >> shifts) & 1
    stream = stream.reshape(rows, columns * bits // 8, 8)
    weights = (1 << torch.arange(8, device=codes.device)).to(torch.uint8)
    stream = (stream * weights).sum(-1, dtype=torch.uint8)
    return stream.contiguous().view(-1).view(dtype).view(rows, columns * bits // width)


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
    """Return the dequantized weight ``[output, input]`` of packed codes, in ``dtype``.

    An element is ``(code - zero) * scale``, or ``codebook[code] * scale``, computed in float32.

    Args:
        words: as for :func:`unpack`.
        scales: ``[output, groups]``, bfloat16, float16 or float32.
        packing: layout of the codes in the words.
        group_size: number of consecutive inputs that share a scale; the last group may be smaller.
        dtype: dtype of the result.
        zeros: zero points, uint8 ``[output, groups]``; 2^(bits-1) if None.
        group_of: group of each input, int32 ``[input]``, if groups are not in order.
        codebook: values of the codes, float32 ``[2^bits]``; then there are no zeros.

    """
    shape = packing.codes(words.shape, words.dtype.itemsize * 8)
    weight, first = torch.empty(shape, dtype=dtype, device=words.device), 0
    for rows in dequantized_rows(
        words, scales, packing, group_size, dtype, zeros, group_of, codebook
    ):
        weight[first : first + len(rows)] = rows
        first += len(rows)
    return weight


def dequantized_rows(
    words: torch.Tensor,
    scales: torch.Tensor,
    packing: Packing,
    group_size: int,
    dtype: torch.dtype,
    zeros: torch.Tensor | None = None,
    group_of: torch.Tensor | None = None,
    codebook: torch.Tensor | None = None,
) -> Iterator[torch.Tensor]:
    """Yield rows of the weight of :func:`dequantize_packed`, some at a time.

    On a CPU each part is 2 MiB in float32, or 32 rows if those are more, so that it fits a cache.
    Rows may be a transposed view.
    """
    width = words.dtype.itemsize * 8
    output, columns = packing.codes(words.shape, width)
    if group_of is None and columns % group_size:
        group_of = torch.arange(columns, device=words.device) // group_size
    midpoint = 0 if zeros is not None else 1 << (packing.bits - 1)
    chunk = _CHUNK if words.is_cpu else _CHUNK_OF_DEVICE
    count = max(1, chunk // max(1, columns * _WHOLE)) * _WHOLE
    for first in range(0, output, count):
        some = slice(first, min(first + count, output))
        held = some
        if packing.along == 0:
            held = slice(some.start * packing.bits // width, some.stop * packing.bits // width)
        values = _elements(words[held], packing, codebook, midpoint)
        if zeros is not None and codebook is None:
            _by_group(torch.Tensor.sub_, values, zeros[some], group_size, group_of)
        _by_group(torch.Tensor.mul_, values, scales[some], group_size, group_of)
        yield values.to(dtype)


def _elements(
    words: torch.Tensor, packing: Packing, codebook: torch.Tensor | None, midpoint: int
) -> torch.Tensor:
    """Return the codebook's values of codes, or codes minus ``midpoint``, float32 in new memory.

    A table for all values of a byte gives several codes at once, which on a CPU is several times as
    fast as shifting each code.
    """
    bits, along, order = packing
    if along == 0:
        return _elements(words.T, Packing(bits, 1, order), codebook, midpoint).T
    if words.dtype != torch.uint8:  # a table of bytes supports only the order of bytes
        words, order = _in_plain_order(words, packing), None
    stream = _bytes_of(words)
    if bits == 8 and codebook is None:
        return stream.float().sub_(midpoint)
    values = codebook
    if values is None:
        values = torch.arange(1 << bits, dtype=torch.float32, device=words.device) - midpoint
    if bits == 3:
        return values[unpack(words, packing).int()]
    every = torch.arange(256, dtype=torch.uint8, device=words.device).view(-1, 1)
    of_bytes = values[unpack(every, Packing(bits, 1, order)).int()].view(_SEVERAL[bits])
    found = of_bytes.flatten().index_select(0, stream.int().flatten())
    return found.view(torch.float32).view(len(words), stream.shape[1] * 8 // bits)


def _bytes_of(words: torch.Tensor) -> torch.Tensor:
    """Return the bytes of words, uint8 ``[rows, bytes of a row]``."""
    # A dimension of size one or zero may have any stride, which a view as bytes refuses.
    stream = words.contiguous().view(-1).view(torch.uint8)
    return stream.view(len(words), words.shape[1] * words.dtype.itemsize)


def _in_plain_order(words: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Return words in which the first code has the lowest bits.

    No index tensor is copied to a device, so a CUDA graph can capture this.
    """
    bits, _, order = packing
    if order is None:
        return words
    plain = torch.zeros_like(words)
    for place, given in enumerate(order):
        plain |= ((words >> (given * bits)) & ((1 << bits) - 1)) << (place * bits)
    return plain


def _by_group(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    values: torch.Tensor,
    groups: torch.Tensor,
    group_size: int,
    group_of: torch.Tensor | None,
) -> None:
    """Apply ``change`` in place to ``values [output, input]`` and their ``groups``.

    ``groups`` is ``[output, groups]``, with an entry for each group of inputs.
    """
    groups = groups.float()
    if values.stride(0) == 1:  # equal memory orders are several times as fast
        groups = groups.T.contiguous().T
    if group_of is None:
        change(values.unflatten(1, (groups.shape[1], group_size)), groups.unsqueeze(2))
    else:
        change(values, groups.index_select(1, group_of))
