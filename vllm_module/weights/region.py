"""A box of a tensor, and what stands for a handle where only the box is wanted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import torch

if TYPE_CHECKING:
    from typing_extensions import Self

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


def narrow_to(weight: Any, box: Box, of: Box) -> Any:
    """Narrow ``weight``, which is the region ``of`` its tensor, to ``box``."""
    for dim, ((start, length), (first, size)) in enumerate(zip(box, of, strict=True)):
        if length != size:
            weight = weight.narrow(dim, start - first, length)
    return weight


class Region(NamedTuple):
    """What stands for a handle where only a plan is wanted: a box of a tensor.

    Attributes:
        name: of the tensor in the checkpoint.
        sizes: of the whole tensor.
        box: the region of it.
        dtype: of the stored elements.
        shape: of the region. It is asked for several times a name, so it is no property.

    """

    name: str
    sizes: torch.Size
    box: Box
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, name: str, weight: Any) -> Region:
        """Return the region that is all of a tensor or handle."""
        return cls(name, weight.shape, whole(weight.shape), weight.dtype, weight.shape)

    @classmethod
    def within(cls, name: str, sizes: torch.Size, box: Box, dtype: torch.dtype) -> Self:
        """Return the region ``box`` of a tensor of ``sizes``."""
        return cls(name, sizes, box, dtype, torch.Size([length for _, length in box]))

    def narrow(self, dim: int, start: int, length: int) -> Region:
        """Keep ``length`` entries of ``dim`` from ``start`` on, as ``torch.narrow`` does."""
        dim %= len(self.box)
        kept = self.box[dim][0] + start, length
        return self._replace(
            box=(*self.box[:dim], kept, *self.box[dim + 1 :]),
            shape=torch.Size((*self.shape[:dim], length, *self.shape[dim + 1 :])),
        )

    def read_into(self, destination: torch.Tensor) -> NoReturn:
        """Raise ``TypeError``: a plan can be made with regions, and a load needs handles."""
        raise TypeError(f"{self.name} has no bytes here: load with handles or tensors")

    def read(self) -> NoReturn:
        """Raise ``TypeError``, as :meth:`read_into` does."""
        self.read_into(torch.empty(0))

    @property
    def ends(self) -> tuple[int, int]:
        """The numbers of the first and the last element, as the whole tensor stores them."""
        first = last = 0
        for (start, length), size in zip(self.box, self.sizes, strict=True):
            first, last = first * size + start, last * size + start + length - 1
        return first, last


class ViewableRegion(Region):
    """A region that stands for a handle whose tensor can be viewed in another shape."""

    def view(self, shape: torch.Size) -> ViewableRegion:
        """Return the region that is all of the tensor, in another shape."""
        return ViewableRegion(self.name, shape, whole(shape), self.dtype, shape)
