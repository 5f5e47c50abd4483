"""Reading a layout from JSON: all numbers are checked, and each element is held exactly once."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from pydantic import TypeAdapter, ValidationError

from vllm_module.base.messages import printable, printable_name, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.layout.layout import (
    EXPERT,
    FORMAT,
    VERSION,
    HeldBox,
    Layout,
    RankBoxes,
    StoredTensorLayout,
)
from vllm_module.layout.strided import StridedSet, first_meeting, run_of
from vllm_module.weights import read_file
from vllm_module.weights.strict_json import parse_object

_LAYOUT = TypeAdapter(Layout)
_ADVICE = "Write it again with vllm-module plan --layout."


def layout_json(layout: Layout) -> bytes:
    """Return the layout as JSON in UTF-8: entries with their default value are left out.

    ``sha256`` is of the other entries, as compact ASCII JSON with sorted keys.
    """
    value = _LAYOUT.dump_python(layout, mode="json", exclude_defaults=True)
    return json.dumps(value | {"sha256": _digest(value)}, separators=(",", ":")).encode()


def read_layout(path: Path) -> Layout:
    """Read a layout that ``vllm-module plan --layout`` wrote.

    Raises ``CheckpointFormatError`` for a file of another format or version, for one that is cut
    short or was changed, and for boxes that are outside of their tensor, that overlap, or that
    leave something out.
    """
    return parse_layout(read_file(path, path.parent), printable(path))


def parse_layout(data: bytes, where: str = "the layout") -> Layout:
    """Return the layout in the bytes of a file; :func:`read_layout` says what is refused."""
    value = parse_object(data, where, _ADVICE)
    found = value.get("format"), value.get("version")
    if found != (FORMAT, VERSION):
        raise CheckpointFormatError(
            f"{where}: expected format {FORMAT!r} in version {VERSION}, got "
            f"{shorten(found[0])} in version {shorten(found[1])}. {_ADVICE}"
        )
    digest = value.pop("sha256", None)
    problem = ""
    try:
        layout = _LAYOUT.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        problem = f"{shorten('.'.join(map(str, first['loc'])))}: {first['msg']}"
    if not problem:
        problem = next(problems(layout), "")
    if not problem and digest != _digest(value):
        problem = f"its entries have the SHA-256 {_digest(value)}, and {shorten(digest)} is written"
    if problem:
        raise CheckpointFormatError(f"{where}: {problem}. {_ADVICE}")
    return layout


def _digest(value: dict[str, object]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


_Ints: TypeAlias = tuple[int, ...]
_StoredBox: TypeAlias = tuple[_Ints, _Ints, _Ints | None]


def problems(layout: Layout) -> Iterator[str]:
    """Yield what is wrong with a layout, by the names of tensors, parameters and ranks.

    Every element of every tensor is held by a rank, and once on each rank that holds it. Every
    element of a parameter is filled at most once; what is not filled is padding.
    """
    yield from _references(layout)
    yield from _names(layout)
    by_name: dict[str, list[StoredTensorLayout]] = {}
    for entry in (*layout.tensors, *layout.absent):
        by_name.setdefault(entry.name, []).append(entry)
    checked = set[tuple[object, ...]]()
    for entry in (*layout.tensors, *layout.absent):
        # An override may divide a tensor among several parameters.
        same = by_name[entry.name] if entry.experts is None else [entry]
        partitions = tuple(each.partition for each in same)
        key = (
            entry.partition,
            partitions,
            entry.shape,
            entry.experts,
            layout.parameters[entry.parameter],
        )
        if key not in checked:
            checked.add(key)
            yield from _cover(layout, entry, same)
    yield from _overlaps(layout)


def _references(layout: Layout) -> Iterator[str]:
    for path, parameter in layout.parameters.items():
        if parameter.shapes >= len(layout.shapes):
            yield f"{printable_name(path)} has shapes {parameter.shapes}, which are not there"
            return
    for at, shapes in enumerate(layout.shapes):
        ranks = [rank for each, _ in shapes for rank in each]
        if len(set(ranks)) < len(ranks) or max(ranks, default=0) >= layout.ranks:
            yield f"shapes {at} name a rank twice, or one that is outside of {layout.ranks}"
            return
    for at, cut in enumerate(layout.partitions):
        for held in cut.held:
            if len(set(held.ranks)) < len(held.ranks) or max(held.ranks) >= layout.ranks:
                yield f"partition {at} names a rank twice, or one that is outside of {layout.ranks}"
                return
    for entry in (*layout.tensors, *layout.absent):
        if entry.parameter not in layout.parameters or entry.partition >= len(layout.partitions):
            yield f"{printable_name(entry.name)} has a parameter or partition that is not there"
            return


def _names(layout: Layout) -> Iterator[str]:
    experts: dict[tuple[str, int], int] = {}
    for entry in layout.tensors:
        # A tensor fills several parameters if an override divides it: its boxes are checked.
        name = printable_name(entry.name)
        if entry.experts is None:
            continue
        if EXPERT not in entry.name and entry.experts[1] != 1:
            yield f"{name} stands for {entry.experts[1]} experts and has no {EXPERT}"
        for other, end in experts.items():
            if other[0] == entry.name and other[1] < sum(entry.experts) and entry.experts[0] < end:
                yield f"{name} has expert {max(other[1], entry.experts[0])} twice"
        experts[entry.name, entry.experts[0]] = sum(entry.experts)


def _cover(
    layout: Layout, entry: StoredTensorLayout, same: Sequence[StoredTensorLayout]
) -> Iterator[str]:
    """Check the boxes of one tensor: inside of it, disjoint, and together all of it."""
    name = f"{printable_name(entry.name)} {list(entry.shape)}"
    for held in layout.partitions[entry.partition].held:
        if (held.experts is None) != (entry.experts is None):
            kind = "one expert" if entry.experts else "no expert"
            yield f"{name} is of {kind}, its partition is not"
            return
        for box in held.boxes:
            if problem := _outside(layout, entry, held, box):
                yield f"{name}: {problem}"
                return
    groups: dict[tuple[int, int], set[_StoredBox]] = {}
    for each in same:
        for held in layout.partitions[each.partition].held:
            boxes = groups.setdefault(held.experts or (0, 1), set())
            boxes.update((box.start, box.size, box.view) for box in held.boxes)
    first, count = entry.experts or (0, 1)
    covered = first
    for experts in sorted(groups):
        if experts[0] > covered:
            break
        covered = max(covered, sum(experts))
        if problem := _partition(entry.shape, groups[experts]):
            yield f"{name}: {problem}"
            return
    if covered < first + count and 0 not in entry.shape:
        yield f"{name}: no rank holds " + (f"expert {covered}" if entry.experts else "any of it")


def _outside(
    layout: Layout, entry: StoredTensorLayout, held: RankBoxes, box: HeldBox
) -> str | None:
    view = box.view or entry.shape
    if math.prod(view) != math.prod(entry.shape):
        return f"{list(view)} is no view of {list(entry.shape)}"
    if not len(view) == len(box.start) == len(box.size) or any(
        start + size > whole for start, size, whole in zip(box.start, box.size, view, strict=True)
    ):
        return f"the box at {list(box.start)} of {list(box.size)} is not inside {list(view)}"
    if box.numel not in (1, box.held.numel):
        return f"a box of {list(box.size)} cannot fill {list(box.held.shape)}"
    for rank in held.ranks:
        places = [(entry.parameter, box.held)]
        prefix = entry.parameter.rpartition(".")[0]
        places += [(f"{prefix}.{made.attr}".strip("."), made.held) for made in box.made]
        for path, place in places:
            shape = layout.shape_of(path, rank) if path in layout.parameters else None
            experts = held.experts[1] - 1 if held.experts else 0
            if shape is None:
                return f"rank {rank} has no parameter {printable_name(path)}"
            if len(place.shape) != len(place.strides):
                return f"{len(place.shape)} sizes and {len(place.strides)} strides"
            values = math.prod(shape) * place.packed
            if (end := place.end + experts * place.step) > values:
                return (
                    f"rank {rank} has {list(shape)} of {printable_name(path)}, of which "
                    f"{end} of {values} values are filled"
                )
    return None


def _partition(shape: Sequence[int], boxes: set[_StoredBox]) -> str | None:
    """Say which boxes overlap, or how much of the tensor none of them has."""
    listed = sorted((box for box in boxes if 0 not in box[1]), key=repr)
    try:
        runs = [_stored_run(start, size, view or shape) for start, size, view in listed]
        found = first_meeting(runs)
    except ValueError as error:
        return str(error)
    if found is not None:
        (start, size, _), (begin, count, _) = (listed[at] for at in found)
        return (
            f"the boxes at {list(start)} of {list(size)} and at {list(begin)} of {list(count)} "
            "overlap"
        )
    sizes: list[_Ints] = [size for _, size, _ in listed]
    total, numel = sum(map(math.prod, sizes)), math.prod(shape)
    return f"the boxes have {total} of its {numel} elements" if total < numel else None


def _stored_run(start: Sequence[int], size: Sequence[int], view: Sequence[int]) -> StridedSet:
    strides = [math.prod(view[dim + 1 :]) for dim in range(len(view))]
    offset = sum(first * stride for first, stride in zip(start, strides, strict=True))
    run = run_of(offset, size, strides)
    assert run is not None  # the box has elements
    return run


def _overlaps(layout: Layout) -> Iterator[str]:
    """Check that no value of a parameter is filled twice on a rank."""
    by_parameter: dict[str, list[StoredTensorLayout]] = {}
    for entry in (*layout.tensors, *layout.absent):
        if entry.tied_to is None:
            by_parameter.setdefault(entry.parameter, []).append(entry)
    checked = set[tuple[object, ...]]()
    for path, entries in by_parameter.items():
        key = tuple((entry.partition, entry.experts) for entry in entries)
        if key in checked:
            continue
        checked.add(key)
        of_rank: dict[int, list[tuple[StridedSet, str]]] = {}
        done = set[tuple[object, ...]]()
        try:
            for entry in entries:
                for held in layout.partitions[entry.partition].held:
                    runs = [(run, entry.name) for run in _held_runs(entry, held)]
                    for rank in held.ranks:
                        of_rank.setdefault(rank, []).extend(runs)
            for rank, filled in of_rank.items():
                same = tuple(filled)
                found = None if same in done else first_meeting([run for run, _ in filled])
                done.add(same)
                if found is not None:
                    one, other = (printable_name(filled[at][1]) for at in found)
                    yield (
                        f"{one} and {other} fill the same values of {printable_name(path)} on rank "
                        f"{rank}"
                    )
                    return
        except ValueError as error:
            yield f"{printable_name(path)}: {error}"
            return


def _held_runs(entry: StoredTensorLayout, held: RankBoxes) -> Iterator[StridedSet]:
    first, count = 0, 1
    if held.experts is not None and entry.experts is not None:
        first = max(held.experts[0], entry.experts[0])
        count = max(0, min(sum(held.experts), sum(entry.experts)) - first)
        first -= held.experts[0]
    for box in held.boxes:
        place = box.held
        offset = place.offset + first * place.step
        run = run_of(offset, (count, *place.shape), (place.step, *place.strides))
        if run is not None:
            yield run
