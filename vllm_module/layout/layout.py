"""The layout of a checkpoint on ranks: boxes of its tensors, and where each box is held.

Tensors that are cut alike share one :class:`Partition`, and the tensors of all experts of a layer
are one entry, so a layout grows neither with the number of experts nor with that of layers alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field

from vllm_module.base.messages import printable_name, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.layout.strided import Count, Counts, Strided
from vllm_module.weights.region import Region, whole

FORMAT: Final = "vllm-module layout"
VERSION: Final = 1
EXPERT = "{expert}"  # stands in the name of an expert's tensor for the expert's number

_CLOSED = ConfigDict(extra="forbid")
Ranks = Annotated[tuple[Count, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Made:
    """The elements of another parameter that are computed from a box, such as its scales.

    ``attr`` is its attribute name in the module that holds the parameter.
    """

    attr: str
    held: Strided

    __pydantic_config__ = _CLOSED


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of a checkpoint tensor, and the values of a parameter that it fills.

    The elements of the box, in their stored order, are those of ``held`` in the order of its shape.
    A box of one element fills all of ``held``.

    Attributes:
        start, size: of the box in each dimension of the tensor.
        held: where it lies in the parameter.
        view: the shape in which the tensor's elements, in their stored order, are counted; its own
            shape unless given.
        made: what is computed from it, where it is quantized while it is loaded.

    """

    start: Counts
    size: Counts
    held: Strided
    view: Counts | None = None
    made: tuple[Made, ...] = ()

    __pydantic_config__ = _CLOSED

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.size)


@dataclass(frozen=True, slots=True)
class RankBoxes:
    """The boxes that some ranks hold, all of them the same.

    Attributes:
        ranks: numbers of the ranks.
        boxes: what each of them holds of the tensor.
        experts: first and number of the experts that each of them holds; ``None`` if the tensor is
            not that of one expert. The first one is at ``held.offset``, each other one
            ``held.step`` elements after the one before.

    """

    ranks: Ranks
    boxes: tuple[HeldBox, ...]
    experts: tuple[Count, Count] | None = None

    __pydantic_config__ = _CLOSED


@dataclass(frozen=True, slots=True)
class Partition:
    """How tensors that are cut alike are divided among all ranks.

    Attributes:
        held: by ranks that hold the same; ranks that hold nothing are left out.
        conversion: ``None`` if values stay as they are, or are cast to the parameter's dtype.
            ``"exponents"`` if bytes are exponents of two plus 127, else the scheme that quantizes.

    """

    held: tuple[RankBoxes, ...]
    conversion: str | None = None

    __pydantic_config__ = _CLOSED


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A parameter or buffer: its dtype, and the number of its shapes in ``Layout.shapes``."""

    dtype: str
    shapes: Count

    __pydantic_config__ = _CLOSED


@dataclass(frozen=True, slots=True)
class StoredTensorLayout:
    """A checkpoint tensor, or those of some experts, and how ranks hold it.

    Attributes:
        name: in the checkpoint.
        shape, dtype: as stored.
        parameter: the path of the parameter that it fills.
        partition: number of its partition in ``Layout.partitions``.
        slot: of the parameter, without the expert's number; ``None`` if it fills all slots.
        experts: first and number of the experts whose tensors these are; ``{expert}`` in the name
            stands for each expert's number then.
        tied_to: another name that fills the same elements.

    """

    name: str
    shape: Counts
    dtype: str
    parameter: str
    partition: Count
    slot: str | None = None
    experts: tuple[Count, Count] | None = None
    tied_to: str | None = None

    __pydantic_config__ = _CLOSED

    def name_of(self, expert: int) -> str:
        """Return the name of the tensor of one expert."""
        return self.name.replace(EXPERT, str(expert), 1)


class Owner(NamedTuple):
    """A rank that holds an element, and where.

    Attributes:
        rank: its number.
        parameter: the path of the parameter.
        held: the element of the parameter, which may have packed values; several elements if the
            tensor's one number is repeated.

    """

    rank: int
    parameter: str
    held: Strided


@dataclass(frozen=True)
class Layout:
    """Which part of which checkpoint tensor lies where on which rank.

    Attributes:
        format, version: of the file.
        model: the class of the model.
        ranks: number of ranks.
        parameters: every parameter and buffer that a load fills or computes, by path.
        shapes: of parameters; each a tuple of (ranks, shape).
        partitions: of tensors.
        tensors: the checkpoint's tensors, in the order of reading.
        absent: slots that the checkpoint lacks and that the layer fills by itself, with the names
            that they would have.

    """

    format: Literal["vllm-module layout"]
    version: Literal[1]
    model: str
    ranks: Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
    parameters: dict[str, HeldParameter]
    shapes: tuple[tuple[tuple[Ranks, Counts], ...], ...]
    partitions: tuple[Partition, ...]
    tensors: tuple[StoredTensorLayout, ...]
    absent: tuple[StoredTensorLayout, ...] = ()

    __pydantic_config__ = _CLOSED

    def find(self, name: str) -> tuple[StoredTensorLayout, int | None]:
        """Return the entry of a checkpoint tensor, and its expert's number.

        Raises ``KeyError`` for a name that the checkpoint lacks.
        """
        exact, templates = self._by_name
        if (entry := exact.get(name)) is not None:
            return entry, None if entry.experts is None else entry.experts[0]
        parts = name.split(".")
        for at, part in enumerate(parts):
            if part.isdecimal() and str(expert := int(part)) == part:
                template = ".".join((*parts[:at], EXPERT, *parts[at + 1 :]))
                for entry in templates.get(template, ()):
                    assert entry.experts is not None
                    if 0 <= expert - entry.experts[0] < entry.experts[1]:
                        return entry, expert
        raise KeyError(f"the layout of {self.model} has no tensor {shorten(name)}")

    @cached_property
    def _by_name(
        self,
    ) -> tuple[dict[str, StoredTensorLayout], dict[str, list[StoredTensorLayout]]]:
        exact, templates = {}, dict[str, list[StoredTensorLayout]]()
        for entry in self.tensors:
            if entry.experts is None or EXPERT not in entry.name:
                exact[entry.name] = entry
            else:
                templates.setdefault(entry.name, []).append(entry)
        return exact, templates

    def names(self) -> Iterator[tuple[str, StoredTensorLayout, int | None]]:
        """Yield each name of the checkpoint, its entry, and its expert's number."""
        for entry in self.tensors:
            if entry.experts is None:
                yield entry.name, entry, None
                continue
            first, count = entry.experts
            for expert in range(first, first + count):
                yield entry.name_of(expert), entry, expert

    def handles(self) -> dict[str, Region]:
        """Return what stands for each tensor where only a plan is wanted: its shape and dtype.

        ``model.plan_weights(layout.handles()).layout()`` is where the ranks of a model keep the
        tensors of another layout, by the names that they have there.

        Raises ``CheckpointFormatError`` for a dtype that is not torch's.
        """
        handles = {}
        for name, entry, _ in self.names():
            dtype, sizes = getattr(torch, entry.dtype, None), torch.Size(entry.shape)
            if not isinstance(dtype, torch.dtype):
                raise CheckpointFormatError(
                    f"{printable_name(name)} has the dtype {shorten(entry.dtype)}: torch has none"
                )
            handles[name] = Region.within(name, sizes, whole(sizes), dtype)
        return handles

    def held_by(
        self, entry: StoredTensorLayout, expert: int | None = None
    ) -> Iterator[tuple[Sequence[int], HeldBox]]:
        """Yield the ranks that hold a box of a tensor, and the box, for each different box."""
        for held in self.partitions[entry.partition].held:
            number = 0
            if held.experts is not None:
                assert expert is not None
                number = expert - held.experts[0]
                if not 0 <= number < held.experts[1]:
                    continue
            for box in held.boxes:
                yield held.ranks, _moved(box, number)

    def boxes_by_rank(
        self, entry: StoredTensorLayout, expert: int | None = None
    ) -> set[tuple[int, Counts, Counts]]:
        """Return the parts of a tensor that ranks hold: the rank, where it starts, its size."""
        held = self.held_by(entry, expert)
        return {(rank, box.start, box.size) for ranks, box in held for rank in ranks}

    def held_on(self, rank: int) -> Iterator[tuple[str, StoredTensorLayout, list[HeldBox]]]:
        """Yield each tensor that a rank holds a part of, by name, and its boxes there.

        Of a layer's experts only those are looked at that the rank has. A tensor without elements
        has no boxes.
        """
        of_partition: dict[int, list[RankBoxes]] = {}
        for entry in self.tensors:
            here = of_partition.get(entry.partition)
            if here is None:
                cut = self.partitions[entry.partition].held
                here = of_partition[entry.partition] = [each for each in cut if rank in each.ranks]
            if entry.experts is None:
                boxes = [box for held in here for box in held.boxes]
                if boxes or 0 in entry.shape:
                    yield entry.name, entry, boxes
                continue
            first, count = entry.experts
            of_expert: dict[int, list[HeldBox]] = {}
            if 0 in entry.shape:
                of_expert = {expert: [] for expert in range(first, first + count)}
            for held in here:
                begin, number = held.experts or (first, count)
                for expert in range(max(first, begin), min(first + count, begin + number)):
                    moved = (_moved(box, expert - begin) for box in held.boxes)
                    of_expert.setdefault(expert, []).extend(moved)
            for expert, boxes in of_expert.items():
                yield entry.name_of(expert), entry, boxes

    def owners(self, name: str, index: Sequence[int]) -> list[Owner]:
        """Return each rank that holds element ``index`` of the tensor ``name``, and where.

        Raises ``KeyError`` for a name that the checkpoint lacks, ``IndexError`` for an index
        outside of the tensor.
        """
        entry, expert = self.find(name)
        shape = entry.shape
        inside = len(index) == len(shape) and all(
            0 <= at < size for at, size in zip(index, shape, strict=True)
        )
        if not inside:
            raise IndexError(
                f"{printable_name(name)} has shape {list(shape)}, which has no index {list(index)}"
            )
        number = 0
        for at, size in zip(index, shape, strict=True):
            number = number * size + at
        owners = []
        for ranks, box in self.held_by(entry, expert):
            held = _element(box, _unravelled(number, box.view or shape))
            if held is not None:
                owners += [Owner(rank, entry.parameter, held) for rank in ranks]
        return sorted(owners, key=lambda owner: owner.rank)

    def shape_of(self, parameter: str, rank: int) -> tuple[int, ...] | None:
        """Return the shape of a parameter on a rank; ``None`` if the rank lacks it."""
        for ranks, shape in self.shapes[self.parameters[parameter].shapes]:
            if rank in ranks:
                return shape
        return None


def _moved(box: HeldBox, experts: int) -> HeldBox:
    """Return the box of the expert that comes this number after the first one."""
    if not experts:
        return box
    held = _shifted(box.held, experts)
    made = tuple(Made(each.attr, _shifted(each.held, experts)) for each in box.made)
    return HeldBox(box.start, box.size, held, box.view, made)


def _shifted(held: Strided, experts: int) -> Strided:
    offset = held.offset + experts * held.step
    return Strided(offset, held.shape, held.strides, packed=held.packed)


def _unravelled(number: int, shape: Sequence[int]) -> list[int]:
    index = []
    for size in reversed(shape):
        number, at = divmod(number, size)
        index.append(at)
    return index[::-1]


def _element(box: HeldBox, index: Sequence[int]) -> Strided | None:
    """Return where an element of the viewed tensor lies; ``None`` if it is not in the box."""
    held, number = box.held, 0
    for at, start, size in zip(index, box.start, box.size, strict=True):
        if not 0 <= at - start < size:
            return None
        number = number * size + at - start
    if box.numel == 1:
        return Strided(held.offset // held.packed, held.shape, held.strides)
    inside = zip(_unravelled(number, held.shape), held.strides, strict=True)
    offset = held.offset + sum(at * stride for at, stride in inside)
    return Strided(offset // held.packed, (), ())
