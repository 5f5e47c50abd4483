"""From the plan of a load on every rank to a reader by which the ranks read together."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from vllm_module.base.shared_memory import OfferedMemory
from vllm_module.cooperative.batches import lay_out, parts_of
from vllm_module.cooperative.reader import SharedReader
from vllm_module.cooperative.wants import Wants, as_read, regions_of, shared_regions
from vllm_module.core.plan import LoadPlan
from vllm_module.core.run import Reader
from vllm_module.core.tree import state_of
from vllm_module.distributed import failure_of_others
from vllm_module.distributed.shared_ring import TAGS, RingShape, SharedRing
from vllm_module.weights import Readers
from vllm_module.weights.pairs import OpenWeights

T = TypeVar("T")
Gather: TypeAlias = Callable[[Callable[[], T]], list[T]]  # every rank's result, by rank

BATCH_BYTES = 32 << 20
BUFFERS = 4


class Cooperation:
    """One load that the ranks of a group carry out together, as this rank sees it.

    Args:
        checkpoint: the same on all ranks.
        gather: is :func:`vllm_module.distributed.together`, or does as it does.
        rank: of this process.
        size: of the group.
        timeout: seconds without progress of any rank after which the ranks that hang are named.
        group: carries bytes between hosts.

    Attributes:
        pairs: names and handles, to load from. Other handles are read by each rank for itself.

    """

    def __init__(
        self,
        checkpoint: OpenWeights,
        gather: Gather[Any],
        rank: int,
        size: int,
        timeout: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._checkpoint, self._gather = checkpoint, gather
        self._rank, self._size, self._timeout, self._group = rank, size, timeout, group
        self.pairs = list(checkpoint.items())
        self._reader: SharedReader | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank's destinations have been filled with."""
        reader, read = self._reader, self._checkpoint.bytes_read
        return read if reader is None else read - reader.passed + reader.taken

    @contextmanager
    def open_reader(self, plan: LoadPlan) -> Iterator[Reader]:
        """Open this rank's reader of its ``plan``. Every rank makes the same call."""
        planned = list(regions_of(plan, {id(handle): name for name, handle in self.pairs}))
        shape = RingShape(self._size, BUFFERS, BATCH_BYTES)
        memory = OfferedMemory(shape.nbytes)

        def join() -> int:
            with suppress(OSError):  # without memory for a ring, every rank reads by itself
                mapped, leader = memory.join(offers, self._rank)
                found.append(mapped)
                return leader
            return -1

        try:
            told = self._gather(lambda: (Wants.of(planned), memory.offer, secrets.choice(TAGS)))
            wants, offers, tags = zip(*told, strict=True)
            found: list[Any] = []
            leaders = self._gather(join)
        finally:
            memory.close()
        with Readers(state_of(plan.module).device) as readers:
            if -1 in leaders or len({each.order for each in wants}) > 1:
                yield readers
                return
            handles = as_read(dict(self.pairs), planned)
            names = list(dict.fromkeys(name for name, _ in planned if name))
            shared = shared_regions(handles, names, wants)
            chunks = list(lay_out(shared, self._size, shape.batch_bytes))
            regions = (region for _, of_fill in planned for region in of_fill)
            ring = SharedRing(
                found.pop(),
                shape,
                rank=self._rank,
                hosts=[
                    [rank for rank in range(self._size) if leaders[rank] == leader]
                    for leader in sorted({*leaders})
                ],
                parts=parts_of(chunks, self._size),
                failure=failure_of_others(),
                timeout=self._timeout,
                group=self._group,
                tag=tags[0],
            )
            reader = SharedReader(regions, chunks, handles, self._rank, ring, readers)
            self._reader = reader
            with ring.reading(reader.read_part):
                yield reader
