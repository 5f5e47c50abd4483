"""Ranks of one group that read a checkpoint together, so that each byte is read once.

A cooperative checkpoint is a mapping of handles, like any other. Rows that one rank alone wants,
it reads itself. Rows that several ranks want are laid out in batches, in the order in which a load
reads them, and go through a ring of buffers: each rank reads its part of a batch, and a handle
copies its region out of the buffers. A handle that is read in another order, or again, reads
directly.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist

from vllm_module.distributed import failure_of_others
from vllm_module.distributed.shared_ring import Offer, OfferedMemory, RingShape, SharedRing
from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.messages import printable_name
from vllm_module.module import vLLMModule
from vllm_module.plan import LoadPlan
from vllm_module.weights import Handle, read_into
from vllm_module.weights.checkpoint import Checkpoint
from vllm_module.weights.pairs import OpenWeights
from vllm_module.weights.regular_file import open_regular

T = TypeVar("T")
Gather: TypeAlias = Callable[[Callable[[], T]], list[T]]  # every rank's result, by rank
Box: TypeAlias = tuple[tuple[int, int], ...]  # start and length in each dimension

BATCH_BYTES = 32 << 20
BUFFERS = 4
# A region that is cut inside its rows into segments of this length is read well by itself.
_LONG_SEGMENT = 64 << 10
_ALIGNMENT = 64  # bytes between tensors in a buffer: any dtype's, and a line of the CPU's cache
_FAR = 1 << 30  # passes over a tensor that fills two parameters, which may be far apart
_SAMPLES = 64  # places of a file that are looked up in the page cache


# Regions


def _volume(box: Box) -> int:
    return math.prod(length for _, length in box)


def _overlap(one: Box, other: Box) -> Box | None:
    common = []
    for (first, length), (start, count) in zip(one, other, strict=True):
        begin, end = max(first, start), min(first + length, start + count)
        if begin >= end:
            return None
        common.append((begin, end - begin))
    return tuple(common)


def _narrowed(weight: Any, box: Box, of: Box) -> Any:
    """Narrow ``weight``, which is the region ``of`` its tensor, to ``box``."""
    for dim, ((start, length), (first, size)) in enumerate(zip(box, of, strict=True)):
        if length != size:
            weight = weight.narrow(dim, start - first, length)
    return weight


class Region:
    """A handle that knows which region of its tensor it is, and is read by ``reader``."""

    __slots__ = ("_reader", "box", "dtype", "name", "shape", "whole")

    def __init__(
        self,
        name: str,
        whole: Handle,
        box: Box,
        reader: Callable[[Region, torch.Tensor], None] | None,
    ) -> None:
        self.name, self.whole, self.box, self._reader = name, whole, box, reader
        self.dtype = whole.dtype
        self.shape = torch.Size(length for _, length in box)

    @property
    def file(self) -> Path | None:
        """The file that holds the tensor, if one does."""
        return getattr(self.whole, "file", None)

    def narrow(self, dim: int, start: int, length: int) -> Region:
        """Keep ``length`` entries of ``dim`` from ``start`` on, as ``torch.narrow`` does."""
        dim = range(len(self.box))[dim]
        first, size = self.box[dim]
        start += size if start < 0 else 0
        if start < 0 or length < 0 or start + length > size:
            raise ValueError(
                f"{self}: [{start}, {start + length}) is not inside dim {dim} of size {size}"
            )
        box = (*self.box[:dim], (first + start, length), *self.box[dim + 1 :])
        return Region(self.name, self.whole, box, self._reader)

    def directly(self, box: Box | None = None) -> Handle:
        """Return the handle of the region, or of ``box``, that reads for this rank alone."""
        whole = tuple((0, size) for size in self.whole.shape)
        return cast(Handle, _narrowed(self.whole, self.box if box is None else box, whole))

    def read_into(self, destination: torch.Tensor) -> None:
        """Read into ``destination``: the same shape; any strides, dtype and device."""
        same = destination.shape == self.shape and not destination.is_meta  # else it is refused
        if self._reader is None or not same:
            self.directly().read_into(destination)
        else:
            self._reader(self, destination)

    def read(self) -> torch.Tensor:
        """Read into a new tensor in host memory."""
        destination = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(destination)
        return destination

    def __repr__(self) -> str:
        return repr(self.whole)


# What each rank wants


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
        for assignment in plan.assignments:
            weight = assignment.weight
            if not isinstance(weight, Region):
                continue  # an override has read it
            names.update(weight.name.encode(errors="surrogatepass") + b"\0")
            number = numbers.get(weight.name)
            if number is None:
                number = numbers[weight.name] = len(numbers)
            else:  # the second time may be long after the first
                passes[number] = _FAR
            if assignment.tied_to is not None:
                continue  # it is compared before the others are read
            for piece in assignment.pieces():
                region = cast(Region, piece.source)
                if not _volume(region.box):
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


def _shared(
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


# Batches


class Chunk(NamedTuple):
    """A contiguous region of a tensor, and its place in a batch."""

    name: str
    box: Box
    dtype: torch.dtype
    batch: int
    begin: int
    owner: int

    @property
    def end(self) -> int:
        """Where the next byte after it is."""
        return self.begin + _volume(self.box) * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the chunk in the buffer that holds its batch."""
        data = buffer[self.begin : self.end].view(self.dtype)
        return data.view([length for _, length in self.box])


def lay_out(
    tensors: Iterable[tuple[str, Box, torch.dtype]], size: int, batch_bytes: int
) -> list[Chunk]:
    """Cut regions into chunks, put these into batches, and divide each batch among the ranks.

    A chunk of more than ``batch_bytes`` is never made. Each rank's part of a batch is contiguous.
    """
    most = max(16, batch_bytes // (4 * size))  # no dtype is wider
    batches: list[list[Chunk]] = [[]]
    end = 0
    for name, whole, dtype in tensors:
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
        for box in _cut(whole, dtype.itemsize, most):
            nbytes = _volume(box) * dtype.itemsize
            if end + nbytes > batch_bytes:
                batches.append([])
                end = 0
            batches[-1].append(Chunk(name, box, dtype, len(batches) - 1, end, 0))
            end += nbytes
    chunks: list[Chunk] = []
    for batch in batches:
        total = batch[-1].end if batch else 1
        for chunk in batch:
            middle = (chunk.begin + chunk.end) // 2
            owned = chunk._replace(owner=min(middle * size // total, size - 1))
            joined = _joined(chunks[-1], owned) if chunks else None
            if joined is None:
                chunks.append(owned)
            else:
                chunks[-1] = joined
    return chunks


def _cut(box: Box, itemsize: int, most: int) -> Iterator[Box]:
    """Cut a contiguous box into contiguous ones of at most ``most`` bytes, in order."""
    nbytes = _volume(box) * itemsize
    if nbytes <= most:
        yield box
        return
    dim = next(dim for dim, (_, length) in enumerate(box) if length > 1)
    start, length = box[dim]
    step = max(1, length * most // nbytes)
    for first in range(start, start + length, step):
        count = min(step, start + length - first)
        yield from _cut((*box[:dim], (first, count), *box[dim + 1 :]), itemsize, most)


def _joined(one: Chunk, other: Chunk) -> Chunk | None:
    """Return two chunks of one owner as one, if that is a box and ``other`` follows ``one``."""
    if (one.name, one.batch, one.owner) != (other.name, other.batch, other.owner):
        return None
    if one.end != other.begin:
        return None
    differing = [dim for dim, (a, b) in enumerate(zip(one.box, other.box, strict=True)) if a != b]
    if len(differing) != 1:
        return None
    (dim,) = differing
    (start, length), (following, count) = one.box[dim], other.box[dim]
    if start + length != following:
        return None
    return one._replace(box=(*one.box[:dim], (start, length + count), *one.box[dim + 1 :]))


# Loading


class _Regions(Mapping[str, Handle]):
    """The handles of a checkpoint; those of ``names``, by default all, know their region."""

    def __init__(
        self,
        checkpoint: OpenWeights,
        names: Iterable[str] | None = None,
        reader: Callable[[Region, torch.Tensor], None] | None = None,
    ) -> None:
        self._checkpoint, self._names, self._reader = checkpoint, names, reader

    def __getitem__(self, name: str) -> Handle:
        handle: Handle = self._checkpoint[name]
        if self._names is not None and name not in self._names:
            return handle
        return Region(name, handle, tuple((0, size) for size in handle.shape), self._reader)

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __len__(self) -> int:
        return len(self._checkpoint)


class CooperativeCheckpoint(_Regions):
    """The handles of a checkpoint that the ranks of a group read together, in a ``with`` block.

    Args:
        checkpoint: whose handles read directly.
        chunks: what the ranks pass to each other.
        regions: what this rank's load will read, in order.
        ring: makes the ring of its ``parts``, ``wanted`` and ``read``.
        size: of the group.

    """

    def __init__(
        self,
        checkpoint: OpenWeights,
        chunks: Sequence[Chunk],
        regions: Iterable[Region],
        ring: Callable[..., SharedRing],
        rank: int,
        size: int,
    ) -> None:
        self._of_name: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            self._of_name.setdefault(chunk.name, []).append(chunk)
        super().__init__(checkpoint, self._of_name, self._read)
        self._by_batch = [list(group) for _, group in groupby(chunks, attrgetter("batch"))]
        self._rank = rank
        wanted = [0] * len(self._by_batch)
        for region in regions:
            for chunk, box in self._overlaps(region):
                wanted[chunk.batch] += _volume(box) * chunk.dtype.itemsize
        parts = [_parts(batch, size) for batch in self._by_batch]
        self._make_ring = partial(ring, parts=parts, wanted=wanted, read=self._read_part)
        self._ring: SharedRing | None = None
        self._lock = Lock()
        self._taken = self._passed = 0

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank's destinations have been filled with."""
        return self._checkpoint.bytes_read - self._passed + self._taken

    def __enter__(self) -> CooperativeCheckpoint:
        self._ring = self._make_ring(failure=failure_of_others())
        self._ring.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ring, self._ring = self._ring, None
        assert ring is not None
        try:
            if error is None:
                ring.finish()
        finally:
            ring.close()

    def _overlaps(self, region: Region) -> list[tuple[Chunk, Box]]:
        """Return the chunks that make up a region, each with its part of it; none if not all do."""
        found = [
            (chunk, box)
            for chunk in self._of_name.get(region.name, ())
            if (box := _overlap(chunk.box, region.box)) is not None
        ]
        whole = sum(_volume(box) for _, box in found) == _volume(region.box)
        return found if whole else []

    def _read(self, region: Region, destination: torch.Tensor) -> None:
        ring = self._ring
        overlaps = [] if ring is None else self._overlaps(region)
        if not overlaps:
            region.directly().read_into(destination)
            return
        assert ring is not None
        try:
            for number, group in groupby(overlaps, lambda each: each[0].batch):
                taken = nbytes = 0
                with ring.taking(number) as buffer:
                    for chunk, box in group:
                        target = _narrowed(destination, box, region.box)
                        nbytes += _volume(box) * chunk.dtype.itemsize
                        if buffer is not None:
                            _copy(_narrowed(chunk.view(buffer), box, chunk.box), target, region)
                            taken = nbytes
                        else:
                            region.directly(box).read_into(target)
                ring.took(number, nbytes)
                with self._lock:
                    self._taken += taken
        except BaseException:
            ring.go_alone()  # other threads of this rank need not wait for what they stop reading
            raise

    def _read_part(self, batch: int, buffer: torch.Tensor) -> None:
        """Read this rank's part of a batch into its buffer."""
        ring = self._ring
        own = [chunk for chunk in self._by_batch[batch] if chunk.owner == self._rank]
        for chunk in own:
            handle = self._checkpoint[chunk.name]
            whole = tuple((0, size) for size in handle.shape)
            read_into(_narrowed(handle, chunk.box, whole), chunk.view(buffer))
            if ring is not None:
                ring.moved()
        with self._lock:
            self._passed += sum(chunk.end - chunk.begin for chunk in own)


def _copy(source: torch.Tensor, destination: torch.Tensor, region: Region) -> None:
    try:
        read_into(source, destination)
    except WeightReadError as error:  # of a cast that loses a value
        raise WeightReadError(f"{printable_name(region.name)}: {error}") from None


def _parts(batch: Iterable[Chunk], size: int) -> list[tuple[int, int]]:
    parts = [(0, 0)] * size
    for owner, group in groupby(batch, attrgetter("owner")):
        chunks = list(group)
        parts[owner] = chunks[0].begin, chunks[-1].end
    return parts


# Choosing


class Facts(NamedTuple):
    """What a rank tells the others before they choose.

    Attributes:
        host: differs between hosts, and may between containers on one.
        offer: of memory for the buffers.
        files: what tells copies of the local files apart; ``None`` if there are no local files.
        cached: whether this host's page cache has them.

    """

    host: str
    offer: Offer | None
    files: tuple[tuple[int, int], ...] | None
    cached: bool

    @staticmethod
    def of(checkpoint: OpenWeights, offer: Offer | None) -> Facts:
        """Find out about a checkpoint that this rank has opened."""
        host = platform.node() if offer is None else offer.host
        if not isinstance(checkpoint, Checkpoint):
            return Facts(host, offer, None, cached=False)
        try:
            status = [os.stat(path) for path in checkpoint.files]
            cached = is_cached(checkpoint.files)
        except (OSError, CheckpointFormatError):  # deleted since, which open files outlive
            return Facts(host, offer, (), cached=False)
        return Facts(host, offer, tuple((s.st_ino, s.st_mtime_ns) for s in status), cached)


def is_cached(files: Sequence[Path]) -> bool:
    """Tell whether the page cache has samples of all ``files``; elsewhere than on Linux, say no."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    byte = bytearray(1)
    for path in files:
        descriptor = open_regular(path, None)
        try:
            nbytes = os.fstat(descriptor).st_size
            for sample in range(1, 2 * _SAMPLES, 2):
                os.preadv(descriptor, [byte], nbytes * sample // (2 * _SAMPLES), os.RWF_NOWAIT)
        except OSError:  # it is not there, or the file system cannot tell
            return False
        finally:
            os.close(descriptor)
    return True


def choose(choice: Literal["auto"] | bool, facts: Sequence[Facts]) -> bool:
    """Tell whether ranks with these facts read together.

    ``"auto"`` does so where it reads less: from a source without local files, and from a file
    system that several hosts share. The page cache of a host passes local files to all its ranks.
    """
    if choice != "auto":
        return choice
    if any(each.files is None for each in facts):
        return True
    hosts, copies = {each.host for each in facts}, {each.files for each in facts}
    return len(hosts) > 1 and len(copies) == 1 and not all(each.cached for each in facts)


def read_together(
    model: vLLMModule,
    checkpoint: OpenWeights,
    choice: Literal["auto"] | bool,
    gather: Gather[Any],
    rank: int,
    size: int,
    group: dist.ProcessGroup | None = None,
) -> OpenWeights | CooperativeCheckpoint:
    """Return the checkpoint for this rank to load ``model`` from, as the ranks choose to read it.

    Every rank makes the same call. ``gather`` is :func:`vllm_module.distributed.together`, or does
    as it does; ``group`` carries bytes between hosts.
    """
    shape = RingShape(size, BUFFERS, BATCH_BYTES)
    memory = OfferedMemory(shape.nbytes)
    try:
        facts = gather(lambda: Facts.of(checkpoint, memory.offer))
        if not choose(choice, facts):
            return checkpoint
        found: list[Any] = []

        def plan() -> tuple[int, Wants]:
            wants, names, regions = Wants.of(model.plan_weights(_Regions(checkpoint)))
            mapped, leader = None, -1
            with suppress(OSError):  # without memory for a ring, every rank reads by itself
                mapped, leader = memory.join([each.offer for each in facts], rank)
            found.extend((mapped, names, regions))
            return leader, wants

        leaders, wants = zip(*gather(plan), strict=True)
    finally:
        memory.close()
    if -1 in leaders or len({each.order for each in wants}) > 1:
        return checkpoint
    mapped, names, regions = found
    hosts = [[r for r in range(size) if leaders[r] == leader] for leader in sorted({*leaders})]
    ring = partial(SharedRing, mapped, shape, rank=rank, hosts=hosts, group=group)
    chunks = lay_out(_shared(checkpoint, names, wants, shape), size, shape.batch_bytes)
    return CooperativeCheckpoint(checkpoint, chunks, regions, ring, rank, size)
