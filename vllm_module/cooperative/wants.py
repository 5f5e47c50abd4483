"""What each rank will read, as ranks tell it to each other, and what several of them will."""

from __future__ import annotations

import hashlib
import math
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch

from vllm_module.cooperative.region import Box, Region, volume
from vllm_module.core.plan import LoadPlan
from vllm_module.distributed.shared_ring import RingShape
from vllm_module.weights import Handle

# A region that is cut inside its rows into segments of this length is read well by itself.
_LONG_SEGMENT = 64 << 10
_FAR = 1 << 30  # passes over a tensor that fills two parameters, which may be far apart


class Wants(NamedTuple):
    """What a rank's plan says that it will read of handles, to be sent to the others.

    Attributes:
        order: a digest of the names of tensors in the order in which the load takes them. The
            other entries number tensors by this order.
        rows: number, first row and end of each interval, compressed.
        passes: for tensors that the load reads in several passes over their rows, how many.

    """

    order: str
    rows: bytes
    passes: dict[int, int]

    @staticmethod
    def of(plan: LoadPlan) -> tuple[Wants, list[str], list[Region]]:
        """Return a rank's wants, the names of tensors and all regions it will read, in order."""
        numbers: dict[str, int] = {}
        regions: list[Region] = []
        wanted: dict[int, list[tuple[int, int]]] = {}
        passes: dict[int, int] = {}
        ends: dict[int, int] = {}  # of the region before, in the same tensor
        names = hashlib.sha256()
        for fill in plan.fills:
            weight = fill.weight
            if not isinstance(weight, Region):
                continue  # an override has read it
            names.update(weight.name.encode(errors="surrogatepass") + b"\0")
            number = numbers.get(weight.name)
            if number is None:
                number = numbers[weight.name] = len(numbers)
            else:  # the second time may be long after the first
                passes[number] = _FAR
            if fill.tied_to is not None:
                continue  # it is compared before the others are read
            for piece in fill.pieces():
                region = cast(Region, piece.source)
                if not volume(region.box):
                    continue
                regions.append(region)
                start, length = region.box[0] if region.box else (0, 1)
                if start < ends.get(number, 0):
                    passes[number] = passes.get(number, 1) + 1
                ends[number] = start + length
                if not _in_long_segments(region):
                    wanted.setdefault(number, []).append((start, start + length))
        flat = array("q")
        for number in sorted(wanted):
            for first, end in _merged(wanted[number]):
                flat.extend((number, first, end))
        wants = Wants(names.hexdigest(), zlib.compress(flat.tobytes(), 1), passes)
        return wants, list(numbers), regions

    def intervals(self) -> torch.Tensor:
        """Return ``rows`` as int64, ``[intervals, 3]``."""
        data = bytearray(zlib.decompress(self.rows))
        if not data:
            return torch.empty(0, 3, dtype=torch.int64, device="cpu")
        return torch.frombuffer(data, dtype=torch.int64).view(-1, 3)


def _in_long_segments(region: Region) -> bool:
    run = region.dtype.itemsize
    for (_, length), size in zip(region.box[:0:-1], region.whole.shape[:0:-1], strict=True):
        run *= length
        if length < size:
            return run >= _LONG_SEGMENT
    return False


def _merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, end in sorted(intervals):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((first, end))
    return merged


def shared_rows(wants: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the intervals of rows that two ranks or more want: number, first row and end.

    Each rank's own intervals do not overlap.
    """
    every = torch.cat([*wants])
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
    checkpoint: Mapping[str, Handle], names: Sequence[str], wants: Sequence[Wants], shape: RingShape
) -> Iterator[tuple[str, Box, torch.dtype]]:
    """Yield the regions that go through the ring, in the order of the load."""
    for number, first, end in shared_rows([each.intervals() for each in wants]):
        handle = checkpoint[names[number]]
        sizes, dtype = tuple(handle.shape), handle.dtype
        passes = max(each.passes.get(number, 1) for each in wants)
        # A second pass would find the first batches of the tensor released.
        held = (shape.buffers - 2) * shape.batch_bytes
        if passes == 1 or (passes < _FAR and math.prod(sizes) * dtype.itemsize <= held):
            rows = ((first, end - first), *((0, size) for size in sizes[1:]))
            yield names[number], rows if sizes else (), dtype
