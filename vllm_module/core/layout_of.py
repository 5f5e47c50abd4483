"""The layout of a plan, or of a module: which box of each tensor lies where on which rank.

Boxes come from the parameters' own pieces, cut from a region that stands for the tensor. Of tensors
that are cut alike, one is cut for each rank that differs; the experts of a layer are one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from vllm_module.core.fill import Fill
from vllm_module.core.report import LoadReport
from vllm_module.core.tensors import is_typed, kind_of, slots_of
from vllm_module.core.tree import Location, Node, held_locations
from vllm_module.errors import WeightLoadError
from vllm_module.layout import (
    HeldBox,
    HeldParameter,
    Layout,
    Partition,
    RankBoxes,
    StoredTensorLayout,
    Strided,
)
from vllm_module.layout.layout import EXPERT, FORMAT, VERSION
from vllm_module.parameters import BasevLLMParameter
from vllm_module.parameters.boxes import boxes_of
from vllm_module.parameters.division import Division
from vllm_module.weights import Handle, Weight
from vllm_module.weights.chunked_handle import ChunkedHandle
from vllm_module.weights.handle import FileHandle
from vllm_module.weights.region import Box, Region, ViewableRegion, whole

_Shapes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class _Part(NamedTuple):
    """A checkpoint tensor, or a box of one, and the slot that it fills.

    ``expert`` is the number of the expert that it is of, and ``slot`` lacks the number then.
    """

    name: str
    slot: str | None
    expert: int | None
    sizes: torch.Size
    box: Box | None
    dtype: torch.dtype
    location: Location
    tied_to: str | None = None


def stored_part(fill: Fill) -> Region:
    """Return what stands for the weight of a fill where only its place in a tensor is wanted."""
    name, sizes, box = _placed(fill.name, fill.weight)
    return ViewableRegion.within(name, sizes, box or whole(sizes), fill.weight.dtype)


def _placed(name: str, weight: Weight) -> tuple[str, torch.Size, Box | None]:
    """Return name and sizes of the tensor that a weight is a box of; no box if it is all of it."""
    if isinstance(weight, ChunkedHandle):
        weight = weight.region
    if isinstance(weight, Region):  # an override may have given it another name
        return weight.name, weight.sizes, None if weight.shape == weight.sizes else weight.box
    if isinstance(weight, FileHandle) and weight.whole is not None:
        return weight.region[:3]
    return name, weight.shape, None


def layout_of_fills(
    module: nn.Module, fills: Iterable[Fill], report: LoadReport, ranks: int | None = None
) -> Layout:
    """Return the layout of a plan's fills; see :meth:`LoadPlan.layout`."""
    layouts, absent = _Layouts(module, ranks), []
    in_memory = set[str]()
    for name, slot, weight, location, tied_to, held in fills:
        if held:
            raise WeightLoadError(
                "a sharded state stores what each rank holds, so it has no layout: plan the "
                "checkpoint that it was made of, or take the layout of the module"
            )
        name, sizes, box = _placed(name, weight)
        if isinstance(weight, torch.Tensor) and name not in report.loaded[location.path]:
            absent.append((name, slot, weight, location))  # the layer fills it by itself
            continue
        if not isinstance(weight, Region | FileHandle | ChunkedHandle) and tied_to is None:
            if name in in_memory:
                raise WeightLoadError(
                    f"{name} fills several parameters, and what an override has made of a tensor "
                    "in memory is not known: plan with handles of files, as open_checkpoint "
                    "yields them"
                )
            in_memory.add(name)
        layouts.add(name, slot, sizes, box, weight.dtype, location, tied_to)
    tensors = layouts.entries()
    for name, slot, weight, location in absent:
        layouts.add(name, slot, weight.shape, None, weight.dtype, location, None)
    return layouts.layout(tensors, layouts.entries())


def layout_of_module(module: nn.Module, ranks: int | None = None) -> Layout:
    """Return the layout of what ``module`` holds, under the names of its tree.

    Parameters that a conversion computes are among them, each as a checkpoint would store it.
    """
    layouts = _Layouts(module, ranks)
    for location in layouts.locations:
        tensor = location.tensor
        for slot in slots_of(tensor):
            shape = tensor.checkpoint_shape(slot) if is_typed(tensor) else tensor.shape
            name = location.stored_name(slot)
            layouts.add(name, slot, shape, None, tensor.dtype, location, None)
    return layouts.layout(layouts.entries(), ())


class _Place:
    """A location: what its partitions depend on, and the tensors of experts that fill it."""

    def __init__(self, location: Location, kind: int) -> None:
        self.location, self.kind = location, kind
        tensor = location.tensor
        self.experts: dict[str, tuple[int, str]] = {}  # by slot, the expert and its slot
        if is_typed(tensor) and tensor.experts is not None:
            self.experts = _slots_of_experts(tensor.division)
        # By slot, shape and dtype, the first such tensor and the names of all by expert.
        self.waiting: dict[Hashable, tuple[_Part, dict[int, str]]] = {}


@lru_cache(maxsize=64)
def _slots_of_experts(division: Division) -> dict[str, tuple[int, str]]:
    return {
        name: (index[0], name.partition(".")[2])
        for name, index in division.slots.items()
        if index[0] is not None
    }


class _Layouts:
    """Collects the partitions of a module's tensors; partitions and shapes that are alike once."""

    def __init__(self, module: nn.Module, ranks: int | None) -> None:
        self._module, self._top = module, Node(module)
        self.locations = list(held_locations(self._top))
        self._paths = {location.tensor: location.path for location in self.locations}
        sizes = {size for tensor in self._paths for size in _period(tensor)}
        self._ranks = math.lcm(*sizes) if ranks is None else ranks
        if self._ranks < 1:
            raise ValueError(f"a layout needs one rank or more, got {ranks}")
        self._shapes: dict[_Shapes, int] = {}
        self._cuts: dict[Partition, int] = {}
        self._cut_of: dict[Hashable, int] = {}
        self._kinds: dict[Hashable, int] = {}
        self._places: dict[Location, _Place] = {}
        self._parts: list[_Part] = []  # since the last entries were made

    def add(
        self,
        name: str,
        slot: str | None,
        sizes: torch.Size,
        box: Box | None,
        dtype: torch.dtype,
        location: Location,
        tied_to: str | None,
    ) -> None:
        """Add a tensor and the slot that it fills."""
        place = self._places.get(location)
        if place is None:
            kind = self._numbered(self._kinds, _kind_at(location))
            place = self._places[location] = _Place(location, kind)
        expert = place.experts.get(slot) if slot is not None else None
        if expert is None:
            self._parts.append(_Part(name, slot, None, sizes, box, dtype, location, tied_to))
            return
        number, slot = expert
        key = slot, sizes, dtype, box
        waiting = place.waiting.get(key)
        if waiting is None:
            part = _Part(name, slot, number, sizes, box, dtype, location, tied_to)
            place.waiting[key] = part, {number: name}
        else:
            waiting[1][number] = name

    def layout(
        self, tensors: Iterable[StoredTensorLayout], absent: Iterable[StoredTensorLayout]
    ) -> Layout:
        of_kind: dict[Hashable, int] = {}
        parameters = {}
        for location in self.locations:
            tensor = location.tensor
            kind = kind_of(tensor)
            if kind not in of_kind:
                of_kind[kind] = self._numbered(self._shapes, self._shapes_of(tensor))
            dtype = _dtype_name(tensor.dtype)
            parameters[location.path] = HeldParameter(dtype, of_kind[kind])
        layout = Layout(
            FORMAT,
            VERSION,
            type(self._module).__name__,
            self._ranks,
            parameters,
            tuple(self._shapes),
            tuple(self._cuts),
            tuple(tensors),
            tuple(absent),
        )
        self._top.forget_below()  # break a cycle that would keep the model alive
        return layout

    @staticmethod
    def _numbered(table: dict[Any, int], value: Any) -> int:
        return table.setdefault(value, len(table))

    def _classes(self, tensor: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield ranks for which the tensor is the same, and the tensor as they hold it."""
        period = math.lcm(*_period(tensor))
        for rank in range(min(period, self._ranks)):
            ranks = tuple(range(rank, self._ranks, period))
            yield ranks, tensor.of_rank(rank) if is_typed(tensor) else tensor

    def _shapes_of(self, tensor: torch.Tensor) -> _Shapes:
        shapes: dict[tuple[int, ...], list[int]] = {}
        for ranks, held in self._classes(tensor):
            shapes.setdefault(tuple(held.shape), []).extend(ranks)
        return tuple((tuple(sorted(ranks)), shape) for shape, ranks in shapes.items())

    def entries(self) -> list[StoredTensorLayout]:
        """Return an entry for each tensor added since the last call; one for experts alike."""
        entries = [self._entry(part, part.name) for part in self._parts]
        self._parts.clear()
        for place in self._places.values():
            for part, names in place.waiting.values():
                for experts in _consecutive(sorted(names)):
                    template = _template({each: names[each] for each in experts})
                    if template is not None:
                        entries.append(self._entry(part, template, experts))
                        continue
                    for each in experts:  # their names do not differ by the number alone
                        entries.append(self._entry(part, names[each], range(each, each + 1)))
            place.waiting.clear()
        return entries

    def _entry(self, part: _Part, name: str, experts: range | None = None) -> StoredTensorLayout:
        key = self._places[part.location].kind, part.slot, experts is None, *part[3:6]
        cut = self._cut_of.get(key)
        if cut is None:
            cut = self._cut_of[key] = self._numbered(self._cuts, self._cut(part))
        return StoredTensorLayout(
            name=name,
            shape=tuple(part.sizes),
            dtype=_dtype_name(part.dtype),
            parameter=self._paths[part.location.tensor],
            partition=cut,
            slot=part.slot or None,
            experts=None if experts is None else (experts.start, len(experts)),
            tied_to=part.tied_to,
        )

    def _cut(self, part: _Part) -> Partition:
        """Return the boxes of a part on all ranks; for an expert, those of its like together."""
        slot, of_expert, location = part.slot, part.expert is not None, part.location
        tensor = location.tensor
        conversion = location.conversion
        siblings = location.node.module
        stored = ViewableRegion.within(
            part.name, part.sizes, part.box or whole(part.sizes), part.dtype
        )
        if not is_typed(tensor):
            held = Strided(0, tuple(tensor.shape), tuple(tensor.stride()))
            start, size = zip(*stored.box, strict=True) if stored.box else ((), ())
            every = RankBoxes(tuple(range(self._ranks)), (HeldBox(start, size, held),))
            return Partition((every,) if tensor.numel() else ())
        scheme = None if conversion is None else _scheme_name(conversion)
        by_boxes: dict[tuple[Any, ...], list[int]] = {}
        for ranks, of_rank in self._classes(tensor):
            parameter = cast(BasevLLMParameter, of_rank)
            made = {
                attr: cast(BasevLLMParameter, getattr(siblings, attr)).of_rank(ranks[0])
                for attr in (() if conversion is None else conversion.makes)
            }
            runs: Iterable[range | None] = (None,)
            if of_expert:
                assert parameter.experts is not None
                runs = _consecutive(parameter.experts.kept)
            for run in runs:
                name = slot
                if run is not None:
                    name = f"{run.start}.{slot}" if slot else str(run.start)
                pieces = list(parameter.pieces(cast(Weight, cast(Handle, stored)), name))
                if any(piece.order is not None and piece.order.exponents for piece in pieces):
                    scheme = "exponents"
                boxes = tuple(boxes_of(pieces, parameter, part.sizes, made, of_expert))
                experts = None if run is None else (run.start, len(run))
                if boxes:
                    by_boxes.setdefault((boxes, experts), []).extend(ranks)
        held_by = (
            RankBoxes(tuple(sorted(ranks)), boxes, experts)
            for (boxes, experts), ranks in by_boxes.items()
        )
        return Partition(tuple(held_by), scheme)


def _period(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes of the groups of ranks that a tensor is cut for."""
    if not is_typed(tensor):
        return (1,)
    return tensor.tp_size, 1 if tensor.experts is None else tensor.experts.size


def _kind_at(location: Location) -> Hashable:
    """Return what the cut of the tensor at a location depends on."""
    conversion = location.conversion
    if conversion is None:
        return kind_of(location.tensor)
    made = (getattr(location.node.module, attr) for attr in conversion.makes)
    return kind_of(location.tensor), id(conversion), *map(kind_of, made)


def _scheme_name(conversion: object) -> str:
    return str(getattr(conversion, "scheme", None) or type(conversion).__name__)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _consecutive(numbers: Sequence[int]) -> Iterator[range]:
    first = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield range(numbers[first], numbers[at - 1] + 1)
            first = at


def _template(names: Mapping[int, str]) -> str | None:
    """Return the names of experts with a placeholder for the number; ``None`` if there is none."""
    expert, name = next(iter(names.items()))
    if EXPERT in name:
        return None
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part != str(expert):
            continue
        before = ".".join((*parts[:at], ""))
        after = ".".join(("", *parts[at + 1 :]))
        if all(name == f"{before}{expert}{after}" for expert, name in names.items()):
            return f"{before}{EXPERT}{after}"
    return None
