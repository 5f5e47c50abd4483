"""Boxes of tensors that are moved: their values out of parameters, and into them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import torch

from vllm_module.base.messages import printable_name
from vllm_module.errors import WeightReadError
from vllm_module.layout import HeldBox, Hop, Layout, Route
from vllm_module.layout.views import Box, place

_LARGE = 1 << 20  # bytes of zeros that are worth a mapping of their own
HeldValues: TypeAlias = tuple[Box, Sequence[int], torch.Tensor]  # a box, its view, its values

Values: TypeAlias = dict[tuple[str, int], torch.Tensor]  # by a tensor's name and a box's number


class Moved(NamedTuple):
    """A tensor that is moved: its name, its expert's number or that of the first, its route.

    ``parameter`` is the path of the one that it fills.
    """

    name: str
    expert: int
    route: Route
    parameter: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype at the source."""
        dtype: torch.dtype = getattr(torch, self.route.dtype)
        return dtype

    def hops(self, hops: Sequence[Hop]) -> Iterator[Hop]:
        """Return those of a route's hops that this tensor takes."""
        return (hop for hop in hops if hop.experts[0] <= self.expert < sum(hop.experts))

    def box(self, number: int) -> Box:
        """Return a box of the route."""
        return self.route.boxes[number]


def bytes_of(box: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a box."""
    # A single element may have any stride, of which torch makes no bytes: hence unsqueeze.
    return box.detach().contiguous().view(-1).unsqueeze(-1).view(torch.uint8).view(-1)


def nbytes_of(each: Moved, number: int) -> int:
    """Return how many bytes a box of a tensor has."""
    return torch.Size(each.box(number)[1]).numel() * each.route.itemsize


def narrowed(whole: torch.Tensor, box: Box, origin: Sequence[int] | None = None) -> torch.Tensor:
    """Return the part of a tensor that ``box`` is, where the tensor begins at ``origin``."""
    start, size = box
    for dim, (first, count) in enumerate(zip(start, size, strict=True)):
        whole = whole.narrow(dim, first - (origin[dim] if origin is not None else 0), count)
    return whole


def boxes_on(layout: Layout, each: Moved, rank: int) -> list[HeldBox]:
    """Return the boxes of a tensor that a rank holds."""
    entry, expert = layout.find(each.name)
    held = layout.held_by(entry, expert)
    return [box for ranks, box in held if rank in ranks and box.numel]


def _region(
    layout: Layout,
    each: Moved,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    box: HeldBox,
    copies: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the elements of this rank's parameter that a box fills, in its stored order."""
    path = layout.find(each.name)[0].parameter
    tensor, shape = tensors.get(path), layout.shape_of(path, rank)
    if (to_local := getattr(tensor, "to_local", None)) is not None:  # of a DTensor
        tensor = to_local()
    if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != each.dtype:
        got = "nothing" if tensor is None else f"{list(tensor.shape)} in {tensor.dtype}"
        raise ValueError(
            f"{printable_name(path)} on rank {rank}: the layout has {list(shape or ())} in "
            f"{each.dtype}, got {got}"
        )
    if box.held.packed != 1:
        raise WeightReadError(f"{printable_name(each.name)} is packed, and cannot be sent yet")
    flat, held = tensor.detach(), box.held
    if not flat.is_contiguous():
        copies = {} if copies is None else copies
        flat = copies[path] = copies[path] if path in copies else flat.contiguous()
    return flat.as_strided(held.shape, held.strides, flat.storage_offset() + held.offset)


def held_values(
    layout: Layout,
    each: Moved,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    copies: dict[str, torch.Tensor],
) -> list[HeldValues]:
    """Return this rank's boxes of a tensor, each with its values in stored order.

    ``copies`` get those parameters that are not contiguous, each copied once for all its boxes.
    """
    shape = layout.find(each.name)[0].shape
    found: list[HeldValues] = []
    for box in boxes_on(layout, each, rank):
        region = _region(layout, each, rank, tensors, box, copies)
        if box.numel == 1:
            region = region.flatten()[:1]
        values = region.reshape(box.size).contiguous()
        found.append(((box.start, box.size), box.view or shape, values))
    return found


def part_of(each: Moved, number: int, held: Sequence[HeldValues]) -> torch.Tensor:
    """Return the values of a box of the plan, out of what this rank holds of the tensor."""
    part = each.box(number)
    for box, view, values in held:
        if (at := place(box, view, part, each.route.view)) is not None:
            return values.as_strided(at.shape, at.strides, values.storage_offset() + at.offset)
    raise AssertionError(f"{each.name}: the plan takes {part} from a rank that lacks it")


def write_box(
    layout: Layout,
    each: Moved,
    number: int,
    values: torch.Tensor,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Write the values of a box of the plan to where this rank is to hold it.

    It is all of one of the layout's boxes, and parameters are contiguous.
    """
    shape, part = layout.find(each.name)[0].shape, each.box(number)
    for box in boxes_on(layout, each, rank):
        view = box.view or shape
        if place((box.start, box.size), view, part, each.route.view) is not None:
            assert math.prod(part[1]) == box.numel, f"{each.name}: a box arrives in parts"
            region = _region(layout, each, rank, tensors, box)
            region.copy_(values.reshape(() if box.numel == 1 else region.shape))
            return
    raise AssertionError(f"{each.name}: rank {rank} does not keep {part}")


def zeros_of(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on the CPU, which take memory by the page where they are written.

    ``torch.zeros`` writes all of them, and NumPy asks for pages of megabytes.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # of a kernel without pages of megabytes
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


Read: TypeAlias = Callable[[Moved, int], torch.Tensor]  # the values of a box


def packed(boxes: Sequence[tuple[Moved, int]], read: Read) -> torch.Tensor:
    """Return the message of boxes, in host memory, where they are copied one by one."""
    sizes = [nbytes_of(each, number) for each, number in boxes]
    message, at = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu"), 0
    for (each, number), nbytes in zip(boxes, sizes, strict=True):
        message[at : at + nbytes].copy_(bytes_of(read(each, number)))
        at += nbytes
    return message


def unpacked(message: torch.Tensor, boxes: Sequence[tuple[Moved, int]]) -> Values:
    """Return the boxes of a message."""
    values: Values = {}
    at = 0
    for each, number in boxes:
        nbytes = nbytes_of(each, number)
        part = message[at : at + nbytes].clone()  # aligned for its dtype
        values[each.name, number] = part.view(each.dtype).view(each.box(number)[1])
        at += nbytes
    return values
