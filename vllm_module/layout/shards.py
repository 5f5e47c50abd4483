"""The layout of tensors that ranks hold as shards: of DTensor, FSDP, or any boxes of theirs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from vllm_module.layout.layout import (
    FORMAT,
    VERSION,
    HeldBox,
    HeldParameter,
    Layout,
    Partition,
    RankBoxes,
    StoredTensorLayout,
)
from vllm_module.layout.strided import Strided
from vllm_module.layout.views import Box, Ints


def rows(shape: Ints, rank: int, ranks: int) -> Box:
    """Return rank ``rank``'s box of a tensor whose first dimension FSDP2 divides among ``ranks``.

    As by ``torch.chunk``: the first ranks have as many rows as the largest share, the last fewer or
    none.
    """
    share = -(-shape[0] // ranks)
    first = min(shape[0], rank * share)
    return (first, *(0 for _ in shape[1:])), (min(share, shape[0] - first), *shape[1:])


def layout_of_shards(
    tensors: Iterable[StoredTensorLayout],
    ranks: int,
    box_of: Callable[[str, Ints, int], Box | None],
    model: str = "shards",
) -> Layout:
    """Return the layout of ranks that each hold one contiguous box of a tensor, or none.

    Args:
        tensors: names, shapes, dtypes and experts, such as those of another layout.
        ranks: number of ranks.
        box_of: start and size of the box that a rank holds, by name, shape and rank. For a DTensor
            these are its offsets and its local shape.
        model: the name of the layout's model.

    """
    known: dict[object, tuple[int, int]] = {}  # partition and shapes of those cut alike
    partitions: list[Partition] = []
    shapes: list[tuple[tuple[Ints, Ints], ...]] = []
    parameters: dict[str, HeldParameter] = {}
    entries: list[StoredTensorLayout] = []
    for tensor in tensors:
        path, experts = tensor.name, tensor.experts
        if tensor.tied_to is not None or path in parameters:
            continue
        boxes = tuple(box_of(path, tensor.shape, rank) for rank in range(ranks))
        if (found := known.get((boxes, experts))) is None:
            by_box: dict[Box, list[int]] = {}
            for rank, box in enumerate(boxes):
                if box is not None and 0 not in box[1]:
                    by_box.setdefault(box, []).append(rank)
            found = known[boxes, experts] = len(partitions), len(shapes)
            partitions.append(Partition(tuple(_held(*each, experts) for each in by_box.items())))
            more = () if experts is None else experts[1:]
            shapes.append(
                tuple((tuple(holders), (*more, *size)) for (_, size), holders in by_box.items())
            )
        parameters[path] = HeldParameter(tensor.dtype, found[1])
        entries.append(
            StoredTensorLayout(path, tensor.shape, tensor.dtype, path, found[0], None, experts)
        )
    return Layout(
        FORMAT, VERSION, model, ranks, parameters, tuple(shapes), tuple(partitions), tuple(entries)
    )


def _held(box: Box, ranks: list[int], experts: tuple[int, int] | None) -> RankBoxes:
    start, size = box
    strides = tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))
    held = Strided(0, size, strides, 0 if experts is None else math.prod(size))
    return RankBoxes(tuple(ranks), (HeldBox(start, size, held),), experts)
