"""A box of a tensor as matrices of integers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_module.kernels.digest.keys import CHUNK_BYTES

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Matrix(NamedTuple):
    """Rows of a tensor that have a step between their numbers, or a part of each of them."""

    values: torch.Tensor  # [rows, columns] of integers that have the bits of the elements
    first_row: int
    step: int
    first_column: int
    chunks: int  # of a row of the tensor


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of elements as integers; a complex element becomes two columns."""
    if tensor.dim() == 0:
        tensor = tensor.unsqueeze(0)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj()).flatten(-2)
    return tensor.resolve_neg().view(INTEGERS[tensor.dtype.itemsize])


def check_box(tensor: torch.Tensor, starts: Sequence[int], shape: Sequence[int]) -> None:
    """Raise ``ValueError`` unless a tensor is a box within a tensor of ``shape``."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError(
            "a digest needs the values of a dense tensor, got a tensor of "
            f"{tensor.dtype} and {tensor.layout} on {tensor.device}"
        )
    sizes = tuple(tensor.shape)
    fits = len(starts) == len(shape) == len(sizes) and all(
        start >= 0 and start + size <= whole
        for start, size, whole in zip(starts, sizes, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"a box of {list(sizes)} that starts at {list(starts)} is not within a tensor of "
            f"{list(shape)}; pass one start for each dimension, and the shape of the whole tensor"
        )


def matrices(tensor: torch.Tensor, starts: Sequence[int], shape: Sequence[int]) -> Iterator[Matrix]:
    """Yield the box as few matrices, copying nothing but complex numbers with strides."""
    columns, first_column = (shape[-1], starts[-1]) if shape else (1, 0)
    if tensor.is_complex():
        columns, first_column = 2 * columns, 2 * first_column
    values = as_integers(tensor)
    chunks = -(-columns * values.dtype.itemsize // CHUNK_BYTES)
    dims: list[tuple[int, int, int]] = [(1, 0, 0)]  # size, stride, step between numbers of rows
    step, first_row = 1, 0
    for size, stride, start, whole in reversed(
        [*zip(values.shape[:-1], values.stride()[:-1], starts, shape, strict=False)]
    ):
        first_row += start * step
        inner = dims[0]
        if inner[0] == 1:
            dims[0] = size, stride, step
        elif size > 1 and (stride, step) == (inner[0] * inner[1], inner[0] * inner[2]):
            dims[0] = size * inner[0], *inner[1:]
        elif size > 1:
            dims.insert(0, (size, stride, step))
        step *= whole
    *outer, (rows, row_stride, row_step) = dims
    for index in itertools.product(*(range(size) for size, *_ in outer)):
        offset, row = values.storage_offset(), first_row
        for i, (_, stride, between) in zip(index, outer, strict=True):
            offset, row = offset + i * stride, row + i * between
        part = values.as_strided((rows, values.shape[-1]), (row_stride, values.stride(-1)), offset)
        yield Matrix(part, row, row_step, first_column, chunks)
