"""Which regions of which tensors a plan will read, in its order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from vllm_module.core.plan import LoadPlan
from vllm_module.weights import Handle, TensorHandle, Weight

Box: TypeAlias = tuple[tuple[int, int], ...]  # start and length in each dimension


def volume(box: Box) -> int:
    """Return how many elements a box has."""
    return math.prod(length for _, length in box)


def whole(shape: torch.Size) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def overlap(one: Box, other: Box) -> Box | None:
    """Return what two boxes have in common, ``None`` if nothing."""
    common = []
    for (first, length), (start, count) in zip(one, other, strict=True):
        begin, end = max(first, start), min(first + length, start + count)
        if begin >= end:
            return None
        common.append((begin, end - begin))
    return tuple(common)


def narrowed(weight: Any, box: Box, of: Box) -> Any:
    """Narrow ``weight``, which is the region ``of`` its tensor, to ``box``."""
    for dim, ((start, length), (first, size)) in enumerate(zip(box, of, strict=True)):
        if length != size:
            weight = weight.narrow(dim, start - first, length)
    return weight


class Region(NamedTuple):
    """What stands for a handle where a plan is asked what it will read: a box of a tensor.

    Attributes:
        name: of the tensor in the checkpoint.
        sizes: of the whole tensor.
        box: the region of it.
        dtype: of the stored elements.

    """

    name: str
    sizes: torch.Size
    box: Box
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape after narrowing."""
        return torch.Size(length for _, length in self.box)

    def narrow(self, dim: int, start: int, length: int) -> Region:
        """Keep ``length`` entries of ``dim`` from ``start`` on, as ``torch.narrow`` does."""
        dim %= len(self.box)
        kept = self.box[dim][0] + start, length
        return self._replace(box=(*self.box[:dim], kept, *self.box[dim + 1 :]))

    @property
    def ends(self) -> tuple[int, int]:
        """The numbers of the first and the last element, as the whole tensor stores them."""
        first = last = 0
        for (start, length), size in zip(self.box, self.sizes, strict=True):
            first, last = first * size + start, last * size + start + length - 1
        return first, last


def regions_of(plan: LoadPlan, names: Mapping[int, str]) -> Iterator[tuple[str, list[Region]]]:
    """Yield for each fill of a plan the name of its tensor, and the regions that will be read.

    There is one for each handle that a reader gets. ``names`` has the names of the checkpoint's
    handles, by their ``id``. Of another handle, which an override made, name and regions are empty.
    """
    for fill in plan.fills:
        weight = fill.weight
        if isinstance(weight, torch.Tensor | TensorHandle):
            continue
        name = names.get(id(weight), "")
        region = Region(name, weight.shape, whole(weight.shape) if name else (), weight.dtype)
        if fill.tied_to is not None:  # it is compared before the others are read
            yield name, []
        elif name:
            standing_in = fill._replace(weight=cast(Weight, cast(Handle, region)))
            yield name, [cast(Region, source) for source, _ in standing_in.jobs()]
        else:
            yield name, [region for _ in fill.jobs()]
