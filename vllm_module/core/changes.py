"""Updates of some elements of a tensor: which of them are this rank's, and where they are held.

The elements follow from the boxes of the same pieces that a whole tensor is cut into, so nothing of
the tensor's size is made, and the time depends on the number of elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

import torch

from vllm_module.core.tensors import is_typed, slots_of
from vllm_module.core.tree import Location
from vllm_module.parameters import Piece
from vllm_module.weights import Weight
from vllm_module.weights.changes import Changes
from vllm_module.weights.handle import Handle

if TYPE_CHECKING:
    from vllm_module.layout import HeldBox

_WHOLE = "send the tensor whole"


def refusal(location: Location, slot: str | None, changes: Changes) -> str | None:
    """Say why some elements of a tensor cannot be updated; ``None`` if they can."""
    tensor = location.tensor
    if changes.shape != changes.region.sizes:
        return f"some elements of a tensor go to one parameter, and an override cut them: {_WHOLE}"
    if location.conversion is not None:
        return f"it is quantized or converted while it is loaded, which needs all of it: {_WHOLE}"
    if changes.dtype != tensor.dtype:
        return f"expected elements of the dtype that is held, {tensor.dtype}, got {changes.dtype}"
    slots = set(slots_of(tensor) if slot is None else (slot,))
    if tensor.is_meta or not slots <= location.node.state.loaded.get(location.local, set()):
        return f"some elements were sent, and nothing was loaded before: {_WHOLE}"
    if problem := changes.problem():
        return problem
    for piece in _pieces(tensor, changes, slot):
        if piece.order is not None and piece.order.exponents:
            return f"it is converted while it is loaded, which needs all of it: {_WHOLE}"
        if piece.source.shape.numel() != piece.target.numel() and piece.order is None:
            return f"its values are packed, which needs all of them: {_WHOLE}"
    return None


def write(tensor: torch.Tensor, slot: str | None, changes: Changes) -> None:
    """Write the elements that this rank keeps into its parameter or buffer, in place."""
    data = tensor.data
    for box in _boxes(tensor, changes, slot):
        places, chosen = _within(box, changes)
        values = changes.values[chosen].to(data.device)
        if box.numel == 1:  # it fills all of the region
            if len(values):
                data.as_strided(box.held.shape, box.held.strides, box.held.offset).fill_(values[0])
            continue
        memory = data.as_strided((data.untyped_storage().nbytes() // data.itemsize,), (1,), 0)
        memory[places.to(data.device)] = values


def _pieces(tensor: torch.Tensor, changes: Changes, slot: str | None) -> Iterable[Piece]:
    if is_typed(tensor):
        return tensor.pieces(_as_weight(changes), slot)
    return (Piece(_as_weight(changes), tensor.data, ()),) if tensor.numel() else ()


def _as_weight(changes: Changes) -> Weight:
    return cast(Handle, changes)


def _boxes(tensor: torch.Tensor, changes: Changes, slot: str | None) -> Iterator[HeldBox]:
    """Yield the boxes that this rank keeps, and where each lies in its memory."""
    from vllm_module.layout import HeldBox, Strided  # its classes take time to import
    from vllm_module.parameters.boxes import boxes_of

    if not is_typed(tensor):
        held = Strided(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
        yield HeldBox((0,) * tensor.dim(), tuple(tensor.shape), held)
        return
    regions = [
        piece._replace(source=cast(Handle, cast(Changes, piece.source).region))
        for piece in _pieces(tensor, changes, slot)
    ]
    yield from boxes_of(regions, tensor, changes.shape, {}, False)


def _within(box: HeldBox, changes: Changes) -> tuple[torch.Tensor, torch.Tensor | slice]:
    """Return the places in memory of the elements in a box, and their numbers in ``changes``.

    Divisions take most of the time, so dimensions are joined where they can be: rows are one.
    """
    dims: list[tuple[int, int, int]] = []  # start, size and length of the view's
    for start, size, length in zip(
        box.start, box.size, box.view or changes.region.sizes, strict=True
    ):
        if dims and (dims[-1][1] == 1 or size == length):
            before, many, of = dims.pop()
            dims.append((before * length + start, (many - 1) * length + size, of * length))
        else:
            dims.append((start, size, length))
    steps = [math.prod(length for *_, length in dims[at:]) for at in range(1, len(dims) + 1)]
    first = sum(start * step for (start, *_), step in zip(dims, steps, strict=True))
    last = first + sum((size - 1) * step for (_, size, _), step in zip(dims, steps, strict=True))
    ends = torch.tensor([first, last + 1], device=changes.indices.device)
    begin, end = torch.searchsorted(changes.indices, ends).tolist()
    chosen: torch.Tensor | slice = slice(begin, end)
    within = changes.indices[begin:end] - first
    if len(dims) > 1:
        rest, inside = changes.indices[begin:end], torch.ones_like(within, dtype=torch.bool)
        within = torch.zeros_like(within)
        for (start, size, _), step in zip(dims, steps, strict=True):
            whole = rest // step if step > 1 else rest
            rest, at = rest - whole * step, whole - start
            inside &= (at >= 0) & (at < size)
            within = within * size + at
        chosen, within = inside.nonzero().squeeze(1) + begin, within[inside]
    held: list[tuple[int, int]] = []  # size and stride
    for size, stride in zip(box.held.shape, box.held.strides, strict=True):
        if held and held[-1][1] == size * stride:
            held.append((held.pop()[0] * size, stride))
        elif size > 1:
            held.append((size, stride))
    places = torch.full_like(within, box.held.offset)
    while held:
        size, stride = held.pop()
        places += (within % size if held else within) * stride
        within = within // size if held else within
    return places, chosen
