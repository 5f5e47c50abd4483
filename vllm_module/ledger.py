"""The books of one load: which tensor fills which slot, checked before a byte is read.

The module tree routes names to locations; everything after that is entered here: whether the
tensor fits, whether the slot is free, what is left to read, and where tied tensors live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import nn

from vllm_module.errors import DuplicateWeightError, WeightReadError
from vllm_module.location import (
    Location,
    expected_shape,
    is_typed,
    materialized,
    slots_of,
)
from vllm_module.messages import shorten
from vllm_module.processing import Processing, early_owner
from vllm_module.report import LoadReport, Problem
from vllm_module.weights import Destination, Readers, Weight, prefer_huge_pages, read_into

Mode = Literal["load", "update", "plan"]


class Filling(NamedTuple):
    """A checkpoint tensor that found its slot (``None``: every slot, stored fused)."""

    name: str
    slot: str | None
    weight: Weight
    location: Location
    tied_to: str | None  # another name that fills the same tensor: the values must agree

    def cut(self) -> Iterator[tuple[Weight, torch.Tensor]]:
        """Yield what is kept of the checkpoint's tensor and the memory it belongs in."""
        tensor = self.location.tensor
        assert tensor is not None
        if is_typed(tensor):
            yield from tensor.cut(self.weight, self.slot)
        elif tensor.numel():
            yield self.weight, tensor.data

    def jobs(self) -> Iterator[tuple[Weight, Destination]]:
        """Yield what is read, and what it is read into."""
        conversion = self.location.conversion
        if conversion is None:
            yield from self.cut()
        else:
            yield from conversion.jobs(self.location.holder, self.weight, self.slot)


@dataclass
class Ledger:
    """The books that one outermost call opens and every call below it keeps.

    Args:
        mode: ``"load"`` and ``"update"`` read; ``"plan"`` only routes.
        list_locations: lists every tensor of the tree.

    """

    mode: Mode
    list_locations: Callable[[], Iterable[Location]]
    report: LoadReport = field(default_factory=LoadReport)
    paths: list[str] = field(default_factory=list)  # of what is filled, in order
    pending: list[Filling] = field(default_factory=list)  # entered and not yet read
    touched: bool = False  # whether anything was written to the model
    processing: Processing = field(default_factory=Processing)
    # (key of a tensor, slot) -> the name that fills it, and the path it took there
    _filled: dict[tuple[int, str], tuple[str, str]] = field(default_factory=dict)
    # (path, slot) -> the name that reaches a tied tensor by another path
    _tied: dict[tuple[str, str], str] = field(default_factory=dict)
    _replaced: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    _misfits: set[str] = field(default_factory=set)  # names that claim a slot and do not fit it
    _copying: str | None = None  # the tensor in memory whose turn it is
    _places: dict[int, list[Location]] | None = None

    def enter(self, name: str, location: Location, slot: str | None, weight: Weight) -> None:
        """Enter that the checkpoint's ``name`` fills ``slot`` at ``location``, or why it cannot."""
        report, path, tensor = self.report, location.path, location.tensor
        if tensor is None or (slot is not None and slot not in slots_of(tensor)):
            what = f"{location.attr!r}" + (f" with a slot {slot!r}" if slot else "")
            detail = f"{type(location.holder).__name__} was built without {what}"
            if location.is_made:
                detail = f"{location.path} is made of full-precision weights while they are loaded"
            report.unexpected.append(Problem(name, detail))
            return
        slots = slots_of(tensor) if slot is None else (slot,)
        key = self._key(tensor)
        tied_to = None
        for filled in slots:
            place = (key, filled)
            if place not in self._filled:
                self._filled[place] = (name, path)
                continue
            first, by = self._filled[place]
            earlier = first if by == path else self._tied.get((path, filled))
            if location.conversion is not None:  # there is nothing left to compare it with
                earlier = first
            if earlier is not None:
                detail = f"{path} is already filled by {shorten(earlier)}"
                report.duplicated.append(Problem(name, detail))
                return
            self._tied[path, filled] = name
            tied_to = first if first not in self._misfits else None
        if problem := _misfit(location, tensor, slot, weight, self.mode):
            report.misshapen.append(Problem(name, problem))
            self._misfits.add(name)
            return
        report.loaded.setdefault(path, []).append(name)
        self.paths.append(path)
        self.pending.append(Filling(name, slot, weight, location, tied_to))

    def demand_completeness(self) -> None:
        """Report every slot of the tree that nothing fills."""
        seen = set()
        for location in self.list_locations():
            tensor = location.tensor
            assert tensor is not None
            key = self._key(tensor)
            for slot in slots_of(tensor):
                if (key, slot) not in self._filled and (key, slot) not in seen:
                    seen.add((key, slot))
                    self.report.missing.append(_missing(location, slot, tensor))

    def fill(self, fillings: list[Filling]) -> None:
        """Read what was entered into the parameters, making them real as their turn comes."""
        self.touched |= bool(fillings)
        with torch.no_grad(), Readers() as readers:
            # Module by module, where one processes its weights: what it then lets go of is gone
            # before the next one takes memory.
            for _, of_owner in groupby(fillings, lambda filling: early_owner(filling.location)):
                group = list(of_owner)
                try:
                    readers.read(self._jobs(group))
                except WeightReadError as error:
                    # A file's handle says what it could not read; a tensor does not know its name.
                    if self._copying is not None:
                        raise WeightReadError(f"{self._copying}: {error}") from None
                    raise
                for filling in group:
                    if filling.tied_to is not None:
                        _check_tied(filling)
                self._mark_filled(group)
                self.processing.process_complete()

    def _mark_filled(self, fillings: list[Filling]) -> None:
        for _, slot, _, location, _ in fillings:
            tensor, owner = location.tensor, location.owner
            assert tensor is not None
            slots = slots_of(tensor) if slot is None else (slot,)
            places = [location]
            # Listing the tree for every bucket of an update would be dear.
            if (
                self.mode == "load"
                or location.local in owner._tied
                or not owner._filled.issuperset((location.local, slot) for slot in slots)
            ):
                places = self._places_of(tensor, location)
            for place in places:
                if len(places) > 1:
                    place.owner._tied.add(place.local)
                filled = [(place.local, slot) for slot in slots]
                place.owner._filled.update(filled)
                self.processing.filled(place, filled)

    def _jobs(self, fillings: list[Filling]) -> Iterator[tuple[Weight, Destination]]:
        for filling in fillings:
            self._copying = filling.name if isinstance(filling.weight, torch.Tensor) else None
            self._materialize(filling.location)
            if filling.tied_to is None:
                yield from filling.jobs()

    def _materialize(self, location: Location) -> None:
        """Make the tensor at ``location`` real if it is meta, in every place it is tied to."""
        tensor = location.tensor
        assert tensor is not None
        if not tensor.is_meta:
            return
        device, conversion = location.owner._device, location.conversion
        for made in conversion.makes if conversion is not None else ():
            there = location.holder._parameters[made]
            assert there is not None
            location.holder._parameters[made] = materialized(there, device)
        real = materialized(tensor, device)
        prefer_huge_pages(real)
        places = self._places_of(tensor, location)
        for place in places:
            # What was filled before, if it was real once, went with its memory.
            place.owner._filled.difference_update((place.local, slot) for slot in slots_of(tensor))
            if isinstance(real, nn.Parameter):
                place.holder._parameters[place.attr] = real
            else:
                place.holder._buffers[place.attr] = real
        assert self._places is not None
        self._places[id(real)] = places
        # The meta tensor is kept, so that no other tensor gets its id while this load lasts.
        self._replaced[id(real)] = (self._key(tensor), tensor)

    def _key(self, tensor: torch.Tensor) -> int:
        """Return the identity of ``tensor``: its own, or that of the meta tensor it was."""
        return self._replaced[id(tensor)][0] if id(tensor) in self._replaced else id(tensor)

    def _places_of(self, tensor: torch.Tensor, location: Location) -> list[Location]:
        """Return every place that holds the tensor at ``location``: several, where it is tied."""
        if self._places is None:
            self._places = {}
            for location in self.list_locations():
                self._places.setdefault(id(location.tensor), []).append(location)
        return self._places.get(id(tensor), [location])


def _misfit(
    location: Location, tensor: torch.Tensor, slot: str | None, weight: Weight, mode: Mode
) -> str | None:
    """Say why ``weight`` cannot fill ``slot`` of ``tensor``; ``None`` if it can."""
    if not isinstance(weight, torch.Tensor) and not hasattr(weight, "read_into"):
        return f"expected a tensor or a handle, got {type(weight).__name__}"
    if is_typed(tensor):
        fits = tensor.accepts(slot, torch.Size(weight.shape))
    else:
        fits = torch.Size(weight.shape) == tensor.shape
    if not fits:
        return f"expected shape {expected_shape(tensor, slot)}, got {list(weight.shape)}"
    dtype = location.stored_dtype
    if weight.dtype != dtype and not (_is_wide(weight.dtype) and _is_wide(dtype)):
        return f"expected dtype {dtype} or one that converts to it, got {weight.dtype}"
    if isinstance(weight, torch.Tensor) and weight.is_meta and mode != "plan":
        return "expected a tensor with data, got one on the meta device"
    return None


def _is_wide(dtype: torch.dtype) -> bool:
    """Whether values convert on loading: floating point of 16 bits and more, never quantized."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _missing(location: Location, slot: str, tensor: torch.Tensor) -> Problem:
    """Name a missing slot as a checkpoint would, and say what it is a part of."""
    expected = f"expected shape {expected_shape(tensor, slot)}"
    if slot:
        *_, layer, attr = ("", "this layer", *location.path.split("."))[-3:]
        expected += f", slot {slot!r} of {layer}.{attr}"
    return Problem(location.stored_name(slot), expected)


def _check_tied(filling: Filling) -> None:
    """Refuse a tied tensor that is stored again with other bits."""
    for source, target in filling.cut():
        for stored, held in _in_pieces(source, target):
            copy = torch.empty_like(held)
            read_into(stored, copy)
            if not torch.equal(_bits(copy), _bits(held)):
                raise DuplicateWeightError(
                    f"{filling.name} and {filling.tied_to} fill one tensor, to which the "
                    "configuration ties both, but their values differ. Set tie_word_embeddings to "
                    "false in config.json if they are meant to, else drop the wrong one from the "
                    "checkpoint"
                )


def _in_pieces(source: Weight, target: torch.Tensor) -> Iterator[tuple[Weight, torch.Tensor]]:
    """Yield a tensor and its place by rows, so that little of it is in memory at a time."""
    if target.dim() == 0:
        yield source, target
        return
    rows = target.shape[0]
    step = max(1, rows * (16 << 20) // target.nbytes)
    for first in range(0, rows, step):
        length = min(step, rows - first)
        yield source.narrow(0, first, length), target.narrow(0, first, length)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
