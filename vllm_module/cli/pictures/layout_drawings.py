"""The layout of a plan as drawings: parameters whose tensors are cut alike share one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch

from vllm_module.base.messages import printable_name
from vllm_module.core.plan import LoadPlan
from vllm_module.core.report import fold
from vllm_module.layout import HeldBox, Layout, Partition, StoredTensorLayout, Strided
from vllm_module.layout.layout import EXPERT
from vllm_module.weights.handle import FileHandle

MOST_RECTANGLES = 512  # of the drawing of one tensor; a box can be many stripes of it

Ints = tuple[int, ...]
Key = tuple[tuple[Any, ...], ...]
# A parameter, and the tensors that fill its slots in the order in which it holds them.
Member = tuple[str, Sequence[StoredTensorLayout]]


class Sheet(NamedTuple):
    """How a tensor is drawn, in the units of its elements.

    Attributes:
        rows, columns: of the rectangle.
        boxes: each with its rectangles as (row, column, rows, columns); some boxes of stripes have
            only their first ones.
        drawn: the share of the rectangles that are there.

    """

    rows: int
    columns: int
    boxes: Sequence[tuple[HeldBox, Sequence[Ints]]]
    drawn: float


def layout_drawings(load: LoadPlan, layout: Layout) -> dict[str, Any]:
    """Return what the page's script draws of the layout of a plan."""
    return _Drawings(layout, _positions(load)).data()


def sheet_of(shape: Sequence[int], boxes: Sequence[HeldBox]) -> Sheet:
    """Return the drawing of a tensor.

    Its last dimension is across and the others are down. Boxes that would be too many stripes are
    drawn with more dimensions across.
    """
    shape = tuple(shape)
    views = {box.view or shape for box in boxes} or {shape}
    usual = shape[-1] if shape else 1
    widths = dict.fromkeys([usual, *(prod(view[k:]) for view in views for k in range(len(view)))])
    best: tuple[int, int] | None = None
    for width in widths:
        if any(_split(view, width) is None for view in views):
            continue
        total = sum(_count(box, box.view or shape, width) for box in boxes)
        if best is None or total < best[0]:
            best = total, width
        if total <= MOST_RECTANGLES:
            break
    assert best is not None  # one row of all elements fits every view
    total, width = best
    each = MOST_RECTANGLES // max(1, len(boxes)) or 1
    drawn = [
        (
            box,
            _rectangles(box, box.view or shape, width, each if total > MOST_RECTANGLES else total),
        )
        for box in boxes
    ]
    share = sum(len(rectangles) for _, rectangles in drawn) / max(1, total)
    return Sheet(max(1, prod(shape) // max(1, width)), max(1, width), drawn, share)


def _split(view: Ints, width: int) -> int | None:
    """Return the first dimension that is across, if the last ones have ``width`` elements."""
    across = 1
    for k in range(len(view), -1, -1):
        if k < len(view):
            across *= view[k]
        if across == width:
            return k
    return None


def _count(box: HeldBox, view: Ints, width: int) -> int:
    k = _split(view, width)
    assert k is not None
    down = _num_runs(box.size[:k], view[:k])
    return down * _num_runs(box.size[k:], view[k:])


def _num_runs(size: Ints, shape: Ints) -> int:
    return prod(size[: _last_cut(size, shape)])


def _last_cut(size: Ints, shape: Ints) -> int:
    """Return the last dimension of which the box has a part; 0 if it has all of each."""
    cut = [dim for dim in range(len(size)) if size[dim] != shape[dim]]
    return cut[-1] if cut else 0


def _runs(start: Ints, size: Ints, shape: Ints) -> Iterator[tuple[int, int]]:
    """Yield first and number of the elements that follow each other."""
    if not shape:
        yield 0, 1
        return
    last = _last_cut(size, shape)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    outer = (range(first, first + n) for first, n in zip(start[:last], size[:last], strict=True))
    for index in product(*outer):
        first = sum(at * stride for at, stride in zip(index, strides, strict=False))
        yield first + start[last] * strides[last], size[last] * strides[last]


def _rectangles(box: HeldBox, view: Ints, width: int, most: int) -> list[Ints]:
    k = _split(view, width)
    found: list[Ints] = []
    for row, rows in _runs(box.start[:k], box.size[:k], view[:k]):
        for column, columns in _runs(box.start[k:], box.size[k:], view[k:]):
            if len(found) == most:
                return found
            found.append((row, column, rows, columns))
    return found


def span_of(box: HeldBox, shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the first element of a box, the one after its last, and how many runs they are."""
    view = box.view or tuple(shape)
    if not box.numel:
        return 0, 0, 0
    strides = [prod(view[dim + 1 :]) for dim in range(len(view))]
    first = sum(at * stride for at, stride in zip(box.start, strides, strict=True))
    last = sum((n - 1) * stride for n, stride in zip(box.size, strides, strict=True))
    return first, first + last + 1, _num_runs(box.size, view)


def _positions(load: LoadPlan) -> dict[str, tuple[str, int]]:
    """Return the file of each tensor, and the position of its first byte."""
    found = {}
    for fill in load.fills:
        weight = fill.weight
        if isinstance(weight, FileHandle):
            whole = weight.whole or weight
            name = weight.name if weight.whole is not None else fill.name
            found[name] = weight.file.name, whole.byte_range[0]
    return found


class _Drawings:
    """Collects what drawings have in common once: rank lists, sheets and the order of experts."""

    def __init__(self, layout: Layout, positions: dict[str, tuple[str, int]]) -> None:
        self._layout, self._positions = layout, positions
        self._absent = {*layout.absent}
        self._ranks: dict[Ints, int] = {}
        self._sheets: dict[tuple[int, Ints], int] = {}
        self._files: dict[str, int] = {}
        self._experts: dict[tuple[int, ...], int] = {}
        self._data: list[dict[str, Any]] = []

    def data(self) -> dict[str, Any]:
        drawings = [self._drawing(members) for members in self._alike()]
        return {
            "numRanks": self._layout.ranks,
            "drawings": drawings,
            "sheets": self._data,
            "rankLists": list(self._ranks),
            "files": [printable_name(file) for file in self._files],
            "expertPlaces": list(self._experts),
        }

    def _alike(self) -> list[list[Member]]:
        """Return parameters in groups: the tensors of all in one are cut alike."""
        filling: dict[tuple[str, bool], list[StoredTensorLayout]] = {}
        for entry in (*self._layout.tensors, *self._layout.absent):
            filling.setdefault((entry.parameter, entry.tied_to is not None), []).append(entry)
        groups: dict[Key, list[Member]] = {}
        for path, held in self._layout.parameters.items():
            for tied in (False, True):
                entries = sorted(filling.get((path, tied), ()), key=self._offset)
                if entries:
                    cut = (
                        (
                            e.slot,
                            e.partition,
                            e.shape,
                            e.dtype,
                            e.experts,
                            e.tied_to is None,
                            e in self._absent,
                        )
                        for e in entries
                    )
                    groups.setdefault(((held.dtype,), *cut), []).append((path, entries))
        return list(groups.values())

    def _offset(self, entry: StoredTensorLayout) -> int:
        held = self._layout.partitions[entry.partition].held
        return min((box.held.offset for each in held for box in each.boxes), default=0)

    def _drawing(self, members: list[Member]) -> dict[str, Any]:
        first, entries = members[0]
        slots = [
            {
                "slot": printable_name(entry.slot or ""),
                "names": _folded(of[at].name for _, of in members),
                "shape": entry.shape,
                "dtype": entry.dtype,
                "itemsize": getattr(torch, entry.dtype).itemsize,
                "experts": entry.experts,
                "tied": entry.tied_to is not None,
                "absent": entry in self._absent,
                "sheet": self._sheet(entry),
            }
            for at, entry in enumerate(entries)
        ]
        return {
            "names": _folded(path for path, _ in members),
            "dtype": self._layout.parameters[first].dtype,
            "slots": slots,
            "members": [
                [printable_name(path), [self._stored(entry, path) for entry in of]]
                for path, of in members
            ],
        }

    def _stored(self, entry: StoredTensorLayout, path: str) -> list[Any]:
        """Return the name of a tensor, its file and the position of its first byte there.

        The name is ``None`` if it is the parameter's. Of experts it is the first one's place, and
        then the number of a list with each one's distance in files and bytes from there.
        """
        name = None if entry.name == path else printable_name(entry.name)
        if entry.experts is None:
            place = self._positions.get(entry.name)
            return [name] if place is None else [name, self._file(place[0]), place[1]]
        first, count = entry.experts
        places = [
            self._positions.get(entry.name.replace(EXPERT, str(expert), 1))
            for expert in range(first, first + count)
        ]
        if None in places:
            return [name]
        numbers = [(self._file(place[0]), place[1]) for place in places if place is not None]
        file, begin = numbers[0]
        apart = tuple(n for f, b in numbers for n in (f - file, b - begin))
        return [name, file, begin, self._experts.setdefault(apart, len(self._experts))]

    def _file(self, name: str) -> int:
        return self._files.setdefault(name, len(self._files))

    def _sheet(self, entry: StoredTensorLayout) -> int:
        key = entry.partition, entry.shape
        number = self._sheets.setdefault(key, len(self._sheets))
        if number == len(self._data):
            partition = self._layout.partitions[entry.partition]
            self._data.append(self._sheet_data(partition, entry.shape))
        return number

    def _sheet_data(self, partition: Partition, shape: Ints) -> dict[str, Any]:
        # A box that several ranks hold is drawn once, though it may lie elsewhere on each.
        holders: dict[tuple[Any, ...], list[list[Any]]] = {}
        boxes: dict[tuple[Any, ...], HeldBox] = {}
        for held in partition.held:
            ranks = self._ranks.setdefault(held.ranks, len(self._ranks))
            for box in held.boxes:
                key = held.experts, box.start, box.size, box.view
                boxes.setdefault(key, box)
                made = [[printable_name(m.attr), *_strided(m.held)] for m in box.made]
                holders.setdefault(key, []).append([ranks, *_strided(box.held), made])
        alone = {box_key[1:]: box for box_key, box in boxes.items()}  # of one expert
        sheet = sheet_of(shape, list(alone.values()))
        rectangles = {(box.start, box.size, box.view): of_box for box, of_box in sheet.boxes}
        return {
            "rows": sheet.rows,
            "columns": sheet.columns,
            "drawn": round(sheet.drawn, 4),
            "conversion": partition.conversion,
            "boxes": [
                {
                    "start": box.start,
                    "size": box.size,
                    "view": box.view,
                    "span": span_of(box, shape),
                    "experts": key[0],
                    "holders": holders[key],
                    "rectangles": rectangles[key[1:]],
                }
                for key, box in boxes.items()
            ],
        }


def _strided(held: Strided) -> list[Any]:
    return [held.offset, held.shape, held.strides, held.step, held.packed]


def _folded(names: Iterable[str]) -> list[str]:
    return [printable_name(name) for name in fold(names)]
