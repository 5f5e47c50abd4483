from __future__ import annotations

from typing import Protocol, TypeAlias

import torch

from vllm_module.weights.casting import copy_checked


class Handle(Protocol):
    """A tensor not read yet: it can be looked at and narrowed before a byte is moved."""

    @property
    def shape(self) -> torch.Size:
        """The sizes of what is left after narrowing."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored elements."""

    def narrow(self, dim: int, start: int, length: int) -> Handle:
        """Keep ``length`` entries of ``dim`` from ``start`` on, as ``torch.narrow`` does."""

    def read_into(self, destination: torch.Tensor) -> None:
        """Read into ``destination``: the same shape; any strides, dtype and device."""

    def read(self) -> torch.Tensor:
        """Read into a new tensor in host memory."""


# A tensor in memory is the trivial handle: it has a shape, a dtype and narrow.
Weight: TypeAlias = Handle | torch.Tensor


class Sink(Protocol):
    """A destination that makes something else of a weight than a copy."""

    def receive(self, weight: Weight) -> None:
        """Read ``weight``, all of it at once, and keep what is made of it."""


Destination: TypeAlias = Sink | torch.Tensor


def read_into(weight: Weight, destination: Destination) -> None:
    """Fill ``destination`` with ``weight``, which is read or, if it is in memory, copied.

    Shapes must be equal (MisshapenWeightError). A finite value that the destination's dtype
    cannot hold is refused, as are bytes that cannot be read (WeightReadError).
    """
    if not isinstance(destination, torch.Tensor):
        destination.receive(weight)
    elif isinstance(weight, torch.Tensor):
        copy_checked(weight, destination, "a tensor in memory")
    else:
        weight.read_into(destination)
