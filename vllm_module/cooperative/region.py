"""Handles that know which region of their tensor they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from vllm_module.weights import Handle
from vllm_module.weights.pairs import OpenWeights

Box: TypeAlias = tuple[tuple[int, int], ...]  # start and length in each dimension


def volume(box: Box) -> int:
    """Return how many elements a box has."""
    return math.prod(length for _, length in box)


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


class Region:
    """A handle that knows which region of its tensor it is, and is read by ``reader``."""

    __slots__ = ("_reader", "box", "dtype", "name", "shape", "whole")

    def __init__(
        self,
        name: str,
        whole: Handle,
        box: Box,
        reader: Callable[[Region, torch.Tensor], None] | None,
    ) -> None:
        self.name, self.whole, self.box, self._reader = name, whole, box, reader
        self.dtype = whole.dtype
        self.shape = torch.Size(length for _, length in box)

    @property
    def file(self) -> Path | None:
        """The file that holds the tensor, if one does."""
        return getattr(self.whole, "file", None)

    def narrow(self, dim: int, start: int, length: int) -> Region:
        """Keep ``length`` entries of ``dim`` from ``start`` on, as ``torch.narrow`` does."""
        dim = range(len(self.box))[dim]
        first, size = self.box[dim]
        start += size if start < 0 else 0
        if start < 0 or length < 0 or start + length > size:
            raise ValueError(
                f"{self}: [{start}, {start + length}) is not inside dim {dim} of size {size}"
            )
        box = (*self.box[:dim], (first + start, length), *self.box[dim + 1 :])
        return Region(self.name, self.whole, box, self._reader)

    def directly(self, box: Box | None = None) -> Handle:
        """Return the handle of the region, or of ``box``, that reads for this rank alone."""
        whole = tuple((0, size) for size in self.whole.shape)
        return cast(Handle, narrowed(self.whole, self.box if box is None else box, whole))

    def read_into(self, destination: torch.Tensor) -> None:
        """Read into ``destination``: the same shape; any strides, dtype and device."""
        same = destination.shape == self.shape and not destination.is_meta  # else it is refused
        if self._reader is None or not same:
            self.directly().read_into(destination)
        else:
            self._reader(self, destination)

    def read(self) -> torch.Tensor:
        """Read into a new tensor in host memory."""
        destination = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(destination)
        return destination

    def __repr__(self) -> str:
        return repr(self.whole)


class Regions(Mapping[str, Handle]):
    """The handles of a checkpoint; those of ``names``, by default all, know their region."""

    def __init__(
        self,
        checkpoint: OpenWeights,
        names: Iterable[str] | None = None,
        reader: Callable[[Region, torch.Tensor], None] | None = None,
    ) -> None:
        self._checkpoint, self._names, self._reader = checkpoint, names, reader

    def __getitem__(self, name: str) -> Handle:
        handle: Handle = self._checkpoint[name]
        if self._names is not None and name not in self._names:
            return handle
        return Region(name, handle, tuple((0, size) for size in handle.shape), self._reader)

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __len__(self) -> int:
        return len(self._checkpoint)
