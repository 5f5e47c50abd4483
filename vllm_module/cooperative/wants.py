"""The rows that each rank will read, as ranks tell each other, and those of several ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch

from vllm_module.core.plan import LoadPlan
from vllm_module.weights import Handle, TensorHandle, Weight
from vllm_module.weights.region import Box, Region, ViewableRegion, whole

# A region that is cut inside its rows into segments of this length is read well by itself.
_LONG_SEGMENT = 64 << 10


class Wants(NamedTuple):
    """What a rank will read of a checkpoint, to be sent to the others.

    Attributes:
        order: a digest of the names of tensors in the order in which the rank reads them. The
            other entries number tensors by this order.
        rows: number, first row and end of each interval, in order.
        again: tensors that the rank does not read from front to back at once.

    """

    order: str
    rows: list[tuple[int, int, int]]
    again: list[int]

    @staticmethod
    def of(planned: Iterable[tuple[str, Sequence[Region]]]) -> Wants:
        """Return the wants of a rank from the regions that it will read, in order."""
        numbers: dict[str, int] = {}
        rows: list[tuple[int, int, int]] = []
        again = set[int]()
        names = hashlib.sha256()
        for name, regions in planned:
            if not name:
                continue
            names.update(name.encode(errors="surrogatepass") + b"\0")
            if name in numbers:  # the second time may be long after the first
                again.add(numbers[name])
            number, before = numbers.setdefault(name, len(numbers)), -1
            for region in regions:
                if not region.shape.numel():
                    continue
                first, last = region.ends
                if first <= before:
                    again.add(number)
                before = last
                start, length = region.box[0] if region.box else (0, 1)
                if number in again or _in_long_segments(region):
                    continue
                if rows and rows[-1][0] == number and start <= rows[-1][2]:
                    start, length = rows[-1][1], start + length - rows.pop()[1]
                rows.append((number, start, start + length))
        return Wants(names.hexdigest(), rows, sorted(again))


def _in_long_segments(region: Region) -> bool:
    run = region.dtype.itemsize
    for (_, length), size in zip(region.box[:0:-1], region.sizes[:0:-1], strict=True):
        run *= length
        if length < size:
            return run >= _LONG_SEGMENT
    return False


def shared_rows(wants: Sequence[Sequence[tuple[int, int, int]]]) -> list[list[int]]:
    """Return the intervals of rows that two ranks or more want: number, first row and end.

    Each rank's own intervals do not overlap.
    """
    every = torch.tensor([*chain(*wants)], dtype=torch.int64, device="cpu").view(-1, 3)
    most = int(every[:, 1:].max()) + 1 if len(every) else 1
    keys = torch.cat([every[:, 0] * most + every[:, 1], every[:, 0] * most + every[:, 2]])
    change = torch.ones_like(keys)
    change[len(every) :] = -1
    keys, order = keys.sort()
    last = torch.ones_like(keys, dtype=torch.bool)  # of equal keys
    last[:-1] = keys[1:] != keys[:-1]
    places = keys[last]
    shared = change[order].cumsum(0)[last] > 1  # whether several ranks want what follows
    before = torch.zeros_like(shared)
    before[1:] = shared[:-1]
    begins, ends = places[shared & ~before], places[~shared & before]
    return torch.stack([begins // most, begins % most, ends % most], 1).tolist()


def shared_regions(
    handles: Mapping[str, Handle], names: Sequence[str], wants: Sequence[Wants]
) -> Iterator[tuple[str, Box, torch.dtype]]:
    """Yield the regions that go through the ring, in the order of the load.

    ``names`` are those that ``wants`` number. What a rank reads again would find the ring further.
    """
    again = {number for each in wants for number in each.again}
    for number, first, end in shared_rows([each.rows for each in wants]):
        if number not in again:
            handle = handles[names[number]]
            rows = ((first, end - first), *((0, size) for size in handle.shape[1:]))
            yield names[number], rows if handle.shape else (), handle.dtype


def regions_of(plan: LoadPlan, names: Mapping[int, str]) -> Iterator[tuple[str, list[Region]]]:
    """Yield for each fill of a plan the name of its tensor, and the regions that will be read.

    There is one for each handle that a reader gets. ``names`` has the names of the checkpoint's
    handles, by their ``id``. Of another handle, which an override made, name and regions are empty.
    """
    for fill in plan.fills:
        weight = fill.weight
        if isinstance(weight, torch.Tensor | TensorHandle):
            continue
        name = names.get(id(weight), "")
        box = whole(weight.shape) if name else ()
        kind = ViewableRegion if hasattr(weight, "view") else Region
        region = kind.within(name, weight.shape, box, weight.dtype)
        if fill.tied_to is not None:  # it is compared before the others are read
            yield name, []
        elif name:
            standing_in = fill._replace(weight=cast(Weight, cast(Handle, region)))
            yield name, [cast(Region, source) for source, _ in standing_in.jobs()]
        else:
            yield name, [region for _ in fill.jobs()]


def as_read(
    handles: Mapping[str, Handle], planned: Iterable[tuple[str, Sequence[Region]]]
) -> dict[str, Handle]:
    """Return the handles in the shapes that planned regions are boxes of.

    A matrix that is stored as a vector is read as a matrix where its handle can be viewed.
    """
    shaped: dict[str, Any] = dict(handles)
    for name, regions in planned:
        if name and regions and regions[0].sizes != shaped[name].shape:
            shaped[name] = shaped[name].view(regions[0].sizes)
    return shaped
