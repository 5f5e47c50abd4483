"""The layout of all stages of a pipeline, from the layouts of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

from vllm_module.base.messages import printable_name
from vllm_module.layout.layout import (
    FORMAT,
    VERSION,
    HeldParameter,
    Layout,
    Partition,
    RankBoxes,
    StoredTensorLayout,
)
from vllm_module.layout.views import meeting

_Shapes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
T = TypeVar("T")


def layout_of_stages(stages: Sequence[Layout]) -> Layout:
    """Return which part of which tensor lies where on the ranks of all stages.

    Ranks are counted stage by stage: rank ``r`` of stage ``s`` is ``r`` plus the ranks of the
    stages before it. What several stages hold, such as a tied embedding, has the boxes of each.

    Raises ``ValueError`` for no stages, for those of different models, and for a tensor of which
    two stages hold boxes that overlap and are not the same.
    """
    if not stages:
        raise ValueError("a pipeline has one stage or more, got no layout")
    models = sorted({each.model for each in stages})
    if len(models) > 1:
        raise ValueError(f"stages of one model are put together, got those of {models}")
    shapes = dict[str, tuple[str, _Shapes]]()
    tensors = dict[StoredTensorLayout, Partition]()
    absent = dict[StoredTensorLayout, Partition]()
    first = 0
    for layout in stages:
        for path, parameter in layout.parameters.items():
            own = _later(layout.shapes[parameter.shapes], first)
            shapes[path] = parameter.dtype, (*shapes.get(path, ("", ()))[1], *own)
        for entries, found in ((layout.tensors, tensors), (layout.absent, absent)):
            for entry in entries:
                held = _moved(layout.partitions[entry.partition], first)
                key = replace(entry, partition=0)
                before = found.get(key)
                found[key] = held if before is None else _joined(entry.name, before, held)
        first += layout.ranks
    all_shapes, all_cuts = dict[_Shapes, int](), dict[Partition, int]()
    parameters = {
        path: HeldParameter(dtype, _numbered(all_shapes, held))
        for path, (dtype, held) in shapes.items()
    }
    of_tensors, of_absent = (
        tuple(replace(entry, partition=_numbered(all_cuts, cut)) for entry, cut in found.items())
        for found in (tensors, absent)
    )
    return Layout(
        FORMAT,
        VERSION,
        stages[0].model,
        first,
        parameters,
        tuple(all_shapes),
        tuple(all_cuts),
        of_tensors,
        of_absent,
    )


def _numbered(table: dict[T, int], value: T) -> int:
    return table.setdefault(value, len(table))


def _later(shapes: Iterable[tuple[Sequence[int], tuple[int, ...]]], first: int) -> _Shapes:
    return tuple((tuple(rank + first for rank in ranks), shape) for ranks, shape in shapes)


def _moved(cut: Partition, first: int) -> Partition:
    held = (replace(each, ranks=tuple(rank + first for rank in each.ranks)) for each in cut.held)
    return Partition(tuple(held), cut.conversion)


def _joined(name: str, cut: Partition, other: Partition) -> Partition:
    """Return what two stages hold of one tensor; ranks that hold the same are listed together."""
    one, two = (
        {(held.experts, box.view, box.start, box.size) for held in each.held for box in held.boxes}
        for each in (cut, other)
    )
    for (*of, start, size), (*of_other, begin, count) in product(one, two - one):
        if of == of_other and meeting((start, size), (begin, count)):
            raise ValueError(
                f"two stages cut {printable_name(name)}, which both hold, in different ways: give "
                "these stages the same number of ranks"
            )
    by_boxes: dict[RankBoxes, tuple[int, ...]] = {}
    for each in (*cut.held, *other.held):
        key = replace(each, ranks=(0,))
        by_boxes[key] = (*by_boxes.get(key, ()), *each.ranks)
    held = (replace(boxes, ranks=ranks) for boxes, ranks in by_boxes.items())
    return Partition(tuple(held), cut.conversion)
