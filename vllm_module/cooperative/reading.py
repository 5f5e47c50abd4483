"""From a plan on every rank to a checkpoint that the ranks read together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch.distributed as dist

from vllm_module.cooperative.batches import lay_out
from vllm_module.cooperative.checkpoint import CooperativeCheckpoint
from vllm_module.cooperative.choice import Facts, choose
from vllm_module.cooperative.region import Regions
from vllm_module.cooperative.wants import Wants, shared_regions
from vllm_module.core.module import vLLMModule
from vllm_module.distributed.shared_memory import OfferedMemory
from vllm_module.distributed.shared_ring import RingShape, SharedRing
from vllm_module.weights.pairs import OpenWeights

T = TypeVar("T")
Gather: TypeAlias = Callable[[Callable[[], T]], list[T]]  # every rank's result, by rank

BATCH_BYTES = 32 << 20
BUFFERS = 4


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
            wants, names, regions = Wants.of(model.plan_weights(Regions(checkpoint)))
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
    among = {"rank": rank, "hosts": hosts, "group": group, "tag": facts[0].tag}
    ring = partial(SharedRing, mapped, shape, **among)
    chunks = lay_out(shared_regions(checkpoint, names, wants, shape), size, shape.batch_bytes)
    return CooperativeCheckpoint(checkpoint, chunks, regions, ring, rank, size)
