"""Tensors, or some elements of them, one after another in a bucket."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vllm_module.base.messages import describe_error, printable_name
from vllm_module.errors import WeightReadError
from vllm_module.kernels.digest.digest import digest_box
from vllm_module.weights.changes import Changes
from vllm_module.weights.handle import read_into

_ALIGNMENT = 16  # bytes: no dtype needs more
_INDEX = torch.int64.itemsize


def aligned(nbytes: int) -> int:
    """Return the first place after ``nbytes`` where any tensor may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class PackedTensor(NamedTuple):
    """The place of a tensor in the bucket, with its name, dtype and shape, and digest if wanted.

    With ``elements``, only so many of them are there: their indices, and then their values.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    digest: str | None = None
    elements: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the bucket."""
        if self.elements is None:
            return torch.Size(self.shape).numel() * self.dtype.itemsize
        return aligned(_INDEX * self.elements) + self.elements * self.dtype.itemsize

    def within(self, memory: torch.Tensor) -> Any:
        """Return what the bucket has there: a tensor, or ``Changes``, that are views of it."""
        begin, end = self.start, self.start + self.nbytes
        if self.elements is None:
            return memory[begin:end].view(self.dtype).view(self.shape)
        middle = begin + _INDEX * self.elements
        indices = memory[begin:middle].view(torch.int64)
        return Changes(indices, memory[aligned(middle) : end].view(self.dtype), self.shape)

    def fill(self, memory: torch.Tensor, weight: Any) -> None:
        """Copy a weight there. Raises ``WeightReadError`` for one that has no dense values."""
        place = self.within(memory)
        try:
            if not isinstance(weight, Changes):
                read_into(weight, place)
            elif problem := weight.problem():
                raise WeightReadError(f"{printable_name(self.name)}: {problem}")
            else:
                place.indices.copy_(weight.indices)
                place.values.copy_(weight.values)
        except RuntimeError as error:  # torch's error, which does not name the tensor
            name, kind = printable_name(self.name), type(weight).__name__
            raise WeightReadError(
                f"{name} ({kind}, {self.dtype}) cannot be packed into a bucket; send a dense "
                f"tensor with data: {describe_error(error)}"
            ) from error


def digest_of(weight: Any) -> str:
    """Return the digest of a tensor, or the sums of some elements in that of the whole."""
    return (weight.digest() if isinstance(weight, Changes) else digest_box(weight)).hex
