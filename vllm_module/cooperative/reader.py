"""The reader of one rank: it copies what ranks share out of a ring, and reads the rest directly."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import torch

from vllm_module.base.messages import printable_name
from vllm_module.cooperative.batches import Chunk
from vllm_module.distributed.shared_ring import SharedRing
from vllm_module.errors import WeightReadError
from vllm_module.weights import Destination, Handle, Readers, TensorHandle, read_into
from vllm_module.weights.handle import read_together
from vllm_module.weights.region import Box, Region, narrow_to, overlap, volume, whole


class SharedReader:
    """Reads the pieces of a plan in its order, as ``core.run.Reader`` says.

    The calling thread waits for batches and copies out of them; other threads read meanwhile what
    this rank alone wants.

    Args:
        regions: that are read, in the order of the plan.
        chunks: what the ranks pass to each other, in that order.
        handles: of the checkpoint, by name.
        rank: whose chunks :meth:`read_part` reads.
        ring: passes batches between the ranks.
        readers: read directly.

    Attributes:
        taken: bytes that were copied out of the ring.
        passed: bytes that this rank read for the ring.

    """

    def __init__(
        self,
        regions: Iterable[Region],
        chunks: Sequence[Chunk],
        handles: Mapping[str, Handle],
        rank: int,
        ring: SharedRing,
        readers: Readers,
    ) -> None:
        self._handles, self._ring, self._readers = handles, ring, readers
        self._own: dict[int, list[Chunk]] = {}  # by batch, what this rank reads for all
        of_name: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            of_name.setdefault(chunk.name, []).append(chunk)
            if chunk.owner == rank:
                self._own.setdefault(chunk.batch, []).append(chunk)
        self._planned = deque((each, _overlaps(each, of_name)) for each in regions)
        # The batches that are taken from, once for each region: the order is known from the plan.
        self._batches = deque(
            batch for _, overlaps in self._planned for batch, _ in groupby(overlaps, _batch_of)
        )
        self.taken = self.passed = 0
        self._release()

    def stages(self, weight: torch.Tensor, destination: Destination) -> bool:
        """Tell whether a tensor in host memory goes to the device as a handle does."""
        return self._readers.stages(weight, destination)

    def read(self, jobs: Iterable[tuple[Handle, Destination]]) -> None:
        """Fill each destination; return when all are filled."""
        self._readers.read(self._unshared(jobs))

    def _unshared(
        self, jobs: Iterable[tuple[Handle, Destination]]
    ) -> Iterator[tuple[Handle, Destination]]:
        """Fill the destinations of what ranks share, and yield the jobs of the rest."""
        for handle, destination in jobs:
            if isinstance(handle, TensorHandle):
                yield handle, destination
                continue
            region, overlaps = self._planned.popleft()
            assert region.shape == handle.shape or not region.name, "not in the plan's order"
            if overlaps:
                self._copy(region, overlaps, destination)
            else:
                self._ring.moved()
                yield handle, destination

    def _copy(
        self, region: Region, overlaps: list[tuple[Chunk, Box]], destination: Destination
    ) -> None:
        target = destination
        if not isinstance(target, torch.Tensor):  # which receives a tensor whole
            target = torch.empty(region.shape, dtype=region.dtype, device=destination.device)
        for batch, group in groupby(overlaps, _batch_of):
            buffer = self._ring.take(batch)
            for chunk, box in group:
                source = narrow_to(chunk.view(buffer), box, chunk.box)
                try:
                    read_into(source, narrow_to(target, box, region.box))
                except WeightReadError as error:  # of a cast that loses a value
                    raise WeightReadError(f"{printable_name(region.name)}: {error}") from None
                self.taken += source.nbytes
            self._batches.popleft()
            self._release()
        if target is not destination:
            read_into(target, destination)

    def _release(self) -> None:
        """Release the batches before the next that this rank takes from."""
        self._ring.release(self._batches[0] if self._batches else None)

    def read_part(self, batch: int, buffer: torch.Tensor) -> None:
        """Read this rank's part of a batch into its buffer; called by a thread of the ring."""
        own = self._own[batch]

        def jobs() -> Iterator[tuple[Handle, torch.Tensor]]:
            for chunk in own:
                handle = self._handles[chunk.name]
                yield narrow_to(handle, chunk.box, whole(handle.shape)), chunk.view(buffer)
                self._ring.moved()

        read_together(jobs())  # a store is asked for all of them at once
        # Without what lies between chunks, which are aligned.
        self.passed += sum(chunk.end - chunk.begin for chunk in own)


def _batch_of(each: tuple[Chunk, Box]) -> int:
    return each[0].batch


def _overlaps(region: Region, of_name: Mapping[str, list[Chunk]]) -> list[tuple[Chunk, Box]]:
    """Return the chunks that make up a region, each with its part of it; none if not all do."""
    found = [
        (chunk, box)
        for chunk in of_name.get(region.name, ())
        if (box := overlap(chunk.box, region.box)) is not None
    ]
    complete = sum(volume(box) for _, box in found) == volume(region.box)
    return found if complete else []
