"""A checkpoint tensor and the slot it fills: whether it fits, and what is read of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from vllm_module.errors import DuplicateWeightError
from vllm_module.report import Problem
from vllm_module.tree import Location, expected_shape, is_typed, slots_of
from vllm_module.weights import Destination, Weight, read_into

_COMPARED_BYTES = 16 << 20  # of a tied tensor at a time, so that no second copy is held whole


class Assignment(NamedTuple):
    """One checkpoint tensor and the slot that it fills.

    Attributes:
        name: the checkpoint's full name.
        slot: of the tensor at ``location``; ``None`` where the checkpoint stores all slots as one.
        weight: the tensor or handle.
        location: the parameter or buffer.
        tied_to: another name that fills the same tensor. Nothing is read then but to compare.

    """

    name: str
    slot: str | None
    weight: Weight
    location: Location
    tied_to: str | None

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that it fills."""
        return slots_of(self.location.tensor) if self.slot is None else (self.slot,)

    def cut(self) -> Iterator[tuple[Weight, torch.Tensor]]:
        """Yield each piece that this rank keeps, and the view of the parameter it belongs in."""
        tensor = self.location.tensor
        if is_typed(tensor):
            yield from tensor.cut(self.weight, self.slot)
        elif tensor.numel():
            yield self.weight, tensor.data

    def jobs(self) -> Iterator[tuple[Weight, Destination]]:
        """Yield each piece to read, and what it is read into: memory, or a conversion's sink."""
        conversion = self.location.conversion
        if conversion is None:
            yield from self.cut()
        else:
            yield from conversion.jobs(self.location.node.module, self.weight, self.slot)

    def check_tied(self) -> None:
        """Raise ``DuplicateWeightError`` where the tied tensor holds other bits."""
        for source, target in self.cut():
            for stored, held in _in_rows(source, target):
                copy = torch.empty_like(held)
                read_into(stored, copy)
                if not torch.equal(_bits(copy), _bits(held)):
                    raise DuplicateWeightError(
                        f"{self.name} and {self.tied_to} fill one tensor, to which the "
                        "configuration ties both, but their values differ. Set tie_word_embeddings "
                        "to false in config.json if they are meant to, else drop the wrong one "
                        "from the checkpoint"
                    )


def misfit(
    location: Location, tensor: torch.Tensor, slot: str | None, weight: Weight, *, needs_data: bool
) -> str | None:
    """Say why ``weight`` cannot fill ``slot`` of ``tensor``; ``None`` if it can."""
    if not isinstance(weight, torch.Tensor) and not hasattr(weight, "read_into"):
        return f"expected a tensor or a handle, got {type(weight).__name__}"
    shape = torch.Size(weight.shape)
    if not (tensor.accepts(slot, shape) if is_typed(tensor) else shape == tensor.shape):
        return f"expected shape {expected_shape(tensor, slot)}, got {list(weight.shape)}"
    conversion = location.conversion
    dtype = tensor.dtype if conversion is None else conversion.dtype
    if weight.dtype != dtype and not (_converts(weight.dtype) and _converts(dtype)):
        return f"expected dtype {dtype} or one that converts to it, got {weight.dtype}"
    if needs_data and isinstance(weight, torch.Tensor) and weight.is_meta:
        return "expected a tensor with data, got one on the meta device"
    return None


def missing(location: Location, slot: str) -> Problem:
    """Name a slot that nothing fills as a checkpoint would, and say what it is a slot of."""
    expected = f"expected shape {expected_shape(location.tensor, slot)}"
    if slot:
        *_, layer, attr = ("", "this layer", *location.path.split("."))[-3:]
        expected += f", slot {slot!r} of {layer}.{attr}"
    return Problem(location.stored_name(slot), expected)


def _converts(dtype: torch.dtype) -> bool:
    """Tell whether loading converts values: floating point of 16 bits and more, never quantized."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _in_rows(source: Weight, target: torch.Tensor) -> Iterator[tuple[Weight, torch.Tensor]]:
    if target.dim() == 0:
        yield source, target
        return
    rows = target.shape[0]
    step = max(1, rows * _COMPARED_BYTES // target.nbytes)
    for first in range(0, rows, step):
        length = min(step, rows - first)
        yield source.narrow(0, first, length), target.narrow(0, first, length)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
