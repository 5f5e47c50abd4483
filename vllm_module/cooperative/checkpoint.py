"""A checkpoint whose handles pass on what the ranks of a group read together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from threading import Lock
from types import TracebackType

import torch

from vllm_module.base.messages import printable_name
from vllm_module.cooperative.batches import Chunk, parts_of
from vllm_module.cooperative.region import Box, Region, Regions, narrowed, overlap, volume
from vllm_module.distributed import failure_of_others
from vllm_module.distributed.shared_ring import SharedRing
from vllm_module.errors import WeightReadError
from vllm_module.weights import Handle, read_into
from vllm_module.weights.handle import read_together as read_regions
from vllm_module.weights.pairs import OpenWeights


class CooperativeCheckpoint(Regions):
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
                wanted[chunk.batch] += volume(box) * chunk.dtype.itemsize
        parts = [parts_of(batch, size) for batch in self._by_batch]
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
        assert self._ring is not None
        try:
            if error is None:
                self._ring.finish()
        finally:
            self._ring.close()
            # What follows reads directly. Without these references, the shared memory is freed now
            # and not when Python collects garbage.
            self._ring = self._reader = None
            del self._make_ring

    def _overlaps(self, region: Region) -> list[tuple[Chunk, Box]]:
        """Return the chunks that make up a region, each with its part of it; none if not all do."""
        found = [
            (chunk, box)
            for chunk in self._of_name.get(region.name, ())
            if (box := overlap(chunk.box, region.box)) is not None
        ]
        whole = sum(volume(box) for _, box in found) == volume(region.box)
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
                        target = narrowed(destination, box, region.box)
                        nbytes += volume(box) * chunk.dtype.itemsize
                        if buffer is not None:
                            _copy(narrowed(chunk.view(buffer), box, chunk.box), target, region)
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

        def jobs() -> Iterator[tuple[Handle, torch.Tensor]]:
            for chunk in own:
                handle = self._checkpoint[chunk.name]
                whole = tuple((0, size) for size in handle.shape)
                yield narrowed(handle, chunk.box, whole), chunk.view(buffer)
                if ring is not None:
                    ring.moved()

        read_regions(jobs())  # a store is asked for all of them at once
        with self._lock:
            self._passed += sum(chunk.end - chunk.begin for chunk in own)


def _copy(source: torch.Tensor, destination: torch.Tensor, region: Region) -> None:
    try:
        read_into(source, destination)
    except WeightReadError as error:  # of a cast that loses a value
        raise WeightReadError(f"{printable_name(region.name)}: {error}") from None
