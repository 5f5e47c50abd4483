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
# Dtypes of the steps from an index to the next.
GAPS = torch.uint8, torch.uint16, torch.int32, torch.int64


def gaps_of(weight: Any) -> torch.dtype:
    """Return the smallest dtype into which all steps from an index to the next fit."""
    if not isinstance(weight, Changes) or weight.problem() is not None:  # refused when it is copied
        return torch.int64
    most = int(gaps(weight.indices).max()) if len(weight.indices) else 0
    return next(each for each in GAPS if most <= torch.iinfo(each).max)


def gaps(indices: torch.Tensor) -> torch.Tensor:
    """Return the steps from one index to the next; the first is from 0."""
    return indices.diff(prepend=indices.new_zeros(1))


def indices_of(steps: torch.Tensor) -> torch.Tensor:
    """Return the indices, int64, between which there are these steps."""
    return steps.to(torch.int64).cumsum(0)


def aligned(nbytes: int) -> int:
    """Return the first place after ``nbytes`` where any tensor may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class PackedTensor(NamedTuple):
    """The place of a tensor in the bucket, with its name, dtype and shape, and digest if wanted.

    With ``elements``, only so many of them are there: the steps from one index to the next, of the
    dtype ``gaps``, and then their values. Versions before 0.3 have no ``gaps``, but indices.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    digest: str | None = None
    elements: int | None = None
    gaps: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the bucket."""
        if self.elements is None:
            return torch.Size(self.shape).numel() * self.dtype.itemsize
        return aligned(self._width * self.elements) + self.elements * self.dtype.itemsize

    @property
    def _width(self) -> int:
        return (self.gaps or torch.int64).itemsize

    def within(self, memory: torch.Tensor) -> Any:
        """Return what the bucket has there: a tensor, or ``Changes``; values are views of it."""
        if self.elements is None:
            end = self.start + self.nbytes
            return memory[self.start : end].view(self.dtype).view(self.shape)
        indices, values = self._changes(memory, self.elements)
        if self.gaps is not None:
            indices = indices_of(indices)
        return Changes(indices, values, self.shape)

    def _changes(self, memory: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the steps and the values of some elements are."""
        middle, end = self.start + self._width * elements, self.start + self.nbytes
        values = memory[aligned(middle) : end].view(self.dtype)
        return memory[self.start : middle].view(self.gaps or torch.int64), values

    def fill(self, memory: torch.Tensor, weight: Any) -> None:
        """Copy a weight there. Raises ``WeightReadError`` for one that has no dense values."""
        try:
            if self.elements is None:
                read_into(weight, self.within(memory))
            elif problem := weight.problem():
                raise WeightReadError(f"{printable_name(self.name)}: {problem}")
            else:
                steps, values = self._changes(memory, self.elements)
                steps.copy_(weight.indices if self.gaps is None else gaps(weight.indices))
                values.copy_(weight.values)
        except RuntimeError as error:  # torch's error, which does not name the tensor
            name, kind = printable_name(self.name), type(weight).__name__
            raise WeightReadError(
                f"{name} ({kind}, {self.dtype}) cannot be packed into a bucket; send a dense "
                f"tensor with data, such as a DTensor's full_tensor(): {describe_error(error)}"
            ) from error


def digest_of(weight: Any) -> str:
    """Return the digest of a tensor, or the sums of some elements in that of the whole."""
    return (weight.digest() if isinstance(weight, Changes) else digest_box(weight)).hex
