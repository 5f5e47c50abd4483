"""The ranks over which the experts of layers are spread, and whose tokens these compute.

A layer calls :func:`expert_parallel_group` once, when it is built, and keeps the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch.distributed as dist

from vllm_module.distributed.groups import (
    ProcessGroup,
    TensorParallelGroup,
    tensor_parallel,
    tensor_parallel_group,
)


@dataclass
class OwnTokens:
    """Ranks that have tokens of their own, which the ranks with the experts compute together.

    Attributes:
        ranks: the group of these ranks; they are some or all of those with the experts.
        most: the largest number of rows of a rank in this step, to which all pad theirs. ``None``
            if it is not known: each layer then exchanges it, and the host waits for that.

    """

    ranks: TensorParallelGroup
    most: int | None = None


@dataclass(frozen=True)
class ExpertParallelGroup:
    """The ranks over which the experts of a layer are spread.

    Attributes:
        ranks: the group of these ranks.
        own_tokens: those whose tokens this rank's experts are given; ``None`` if all have the same.
        redundant: number of second, third … places that a layer has for its experts.

    """

    ranks: TensorParallelGroup
    own_tokens: OwnTokens | None = None
    redundant: int = 0


_group: ContextVar[ExpertParallelGroup | None] = ContextVar("expert_parallel_group", default=None)
# The ranks of all engines, where several share their experts.
_engines: ContextVar[ExpertParallelGroup | None] = ContextVar("data_parallel_engines", default=None)


def expert_parallel_group() -> ExpertParallelGroup | None:
    """Return the group over which layers that are built here spread their experts.

    It is the group of the surrounding :func:`expert_parallel`. Without one it is ``None``, and
    every rank holds its tensor-parallel part of all experts.
    """
    group = _group.get()
    # The block was opened for whatever ranks share a model here.
    if group is not None and group.own_tokens is None:
        return replace(group, ranks=tensor_parallel_group())
    return group


@contextmanager
def expert_parallel(
    *,
    rank: int | None = None,
    size: int | None = None,
    group: dist.ProcessGroup | None = None,
    redundant: int = 0,
) -> Iterator[None]:
    """Build layers that hold whole experts, spread over ranks, instead of a part of each.

    Without arguments they are spread over the tensor-parallel ranks, which have the same tokens, or
    as a surrounding :func:`data_parallel` says. With ``rank`` and ``size``, or a ``group``, they
    are spread over other ranks, each of which has tokens of its own. With ``redundant``, a layer
    keeps so many experts a second time, or more often, each time on another rank.

    Raises ``ValueError`` as :func:`tensor_parallel` does.
    """
    spread = _engines.get() or ExpertParallelGroup(tensor_parallel_group())
    if rank is not None or size is not None or group is not None:
        with tensor_parallel(rank=rank, size=size, group=group) as ranks:
            spread = ExpertParallelGroup(ranks, OwnTokens(ranks))
    token = _group.set(replace(spread, redundant=redundant))
    try:
        yield
    finally:
        _group.reset(token)


@contextmanager
def data_parallel(*, ranks: dist.ProcessGroup, group: dist.ProcessGroup) -> Iterator[OwnTokens]:
    """Have :func:`expert_parallel` spread experts over the ranks of several engines.

    Args:
        ranks: all ranks of all engines, engine by engine.
        group: the ranks that have this one's number in their engines.

    """
    own_tokens = OwnTokens(ProcessGroup(group))
    token = _engines.set(ExpertParallelGroup(ProcessGroup(ranks), own_tokens))
    try:
        yield own_tokens
    finally:
        _engines.reset(token)
