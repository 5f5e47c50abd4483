"""Groups of ranks: real (torch.distributed), simulated in one process, or a single rank.

A layer calls :func:`tensor_parallel_group` once, when it is built, and keeps the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from vllm_module.base.process_groups import rank_and_size, sends_between_cpus
from vllm_module.base.waiting import finish
from vllm_module.errors import ShardingError

T = TypeVar("T")


class TensorParallelGroup(Protocol):
    """The ranks that share one model, or the experts of one. ``rank`` is in ``range(size)``."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``tensor`` (same shape and dtype on all)."""

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return every rank's ``tensor`` (same shape on all) joined along ``dim`` in rank order."""


class ProcessGroup:
    """Ranks that are processes, connected by torch.distributed (gloo on CPU, NCCL on GPU)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = rank_and_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a rank of the given process group")

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        if _blocks(tensor):
            finish(dist.all_reduce(tensor, group=self.group, async_op=True))
        else:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        parts = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for _ in range(self.size)
        ]
        tensor = tensor.contiguous()
        if _blocks(tensor):
            finish(dist.all_gather(parts, tensor, group=self.group, async_op=True))
        else:
            dist.all_gather(parts, tensor, group=self.group)
        return torch.cat(parts, dim)


def _blocks(tensor: torch.Tensor) -> bool:
    """Return whether a collective on ``tensor`` blocks this thread until the other ranks join.

    On a GPU it is queued. torch.compile supports only collectives that are not asynchronous.
    """
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


class _Meeting:
    """The exchange of tensors between the threads of :func:`run_ranks`, in rounds."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._tensors: dict[int, torch.Tensor] = {}  # tensors of this round, by rank
        self._ended: list[int] = []

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        with self._changed:
            tensors = self._tensors
            tensors[rank] = tensor.clone()  # the owner may overwrite it before the others read it
            if len(tensors) == self.size:
                self._tensors = {}
                self._changed.notify_all()
            else:
                self._changed.wait_for(lambda: len(tensors) == self.size or self._ended)
            if len(tensors) < self.size:
                raise RuntimeError(
                    f"rank {self._ended[0]} of {self.size} has ended without taking part in a "
                    f"collective that rank {rank} waits in: every rank must make the same calls"
                )
        return [tensors[rank] for rank in range(self.size)]

    def end(self, rank: int) -> None:
        """Record that ``rank`` takes part in no further round."""
        with self._changed:
            self._ended.append(rank)
            self._changed.notify_all()


# Context variables, not globals: each thread of run_ranks is another rank.
_group: ContextVar[TensorParallelGroup | None] = ContextVar("tensor_parallel_group", default=None)
_meeting: ContextVar[_Meeting | None] = ContextVar("tensor_parallel_meeting", default=None)


class SimulatedGroup:
    """One rank without a process of its own; its collectives work inside :func:`run_ranks`."""

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"tensor-parallel rank {rank} is outside of range({size})")
        self.rank = rank
        self.size = size

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [tensor]
        meeting = _meeting.get()
        if meeting is None:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} was built by tensor_parallel() and needs the "
                "other ranks to reduce with: run all of them with "
                "vllm_module.distributed.run_ranks(size, fn)"
            )
        if meeting.size != self.size:
            raise RuntimeError(
                f"a module of tensor-parallel size {self.size} runs among {meeting.size} ranks"
            )
        return meeting.exchange(self.rank, tensor)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        first, *others = self._exchange(tensor)
        total = first.clone() if others else first
        for other in others:  # rank order, so that every rank computes the same bits
            if other.shape != first.shape:
                shapes = f"{list(first.shape)} and {list(other.shape)}"
                raise RuntimeError(f"ranks reduce tensors of different shapes: {shapes}")
            total += other
        return total

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        parts = self._exchange(tensor)
        return torch.cat(parts, dim) if len(parts) > 1 else tensor


def tensor_parallel_group() -> TensorParallelGroup:
    """Return the tensor-parallel group for modules that are built here.

    It is the group of the surrounding :func:`tensor_parallel`, else the initialized process group
    of torch.distributed, else a single rank.
    """
    group = _group.get()
    if group is not None:
        return group
    if dist.is_available() and dist.is_initialized():
        return ProcessGroup()
    return SimulatedGroup(0, 1)


def surrounding_group() -> TensorParallelGroup | None:
    """Return the group of the surrounding :func:`tensor_parallel`; ``None`` outside of one."""
    return _group.get()


@contextmanager
def tensor_parallel(
    *, rank: int | None = None, size: int | None = None, group: dist.ProcessGroup | None = None
) -> Iterator[TensorParallelGroup]:
    """Build modules as rank ``rank`` of ``size`` without a process group, or as one of ``group``.

    ``group`` is a torch.distributed group of some of the world's processes. With one group for
    each replica of a model, the replicas are data parallel.

    Raises ``ValueError`` unless ``0 <= rank < size``, or this process is one of ``group``.
    """
    current: TensorParallelGroup
    if group is not None and rank is None and size is None:
        current = ProcessGroup(group)
    elif group is None and rank is not None and size is not None:
        current = SimulatedGroup(rank, size)
    else:
        raise ValueError("tensor_parallel takes either rank= and size=, or group=")
    token = _group.set(current)
    try:
        yield current
    finally:
        _group.reset(token)


@dataclass(frozen=True)
class PipelineStage:
    """A stage of a pipeline: one of ``size`` parts of a model, each some layers that follow.

    Attributes:
        rank: the stage's number; the tokens of a step come to stage 0 first.
        size: how many stages there are.

    """

    rank: int
    size: int

    def layers(self, count: int) -> range:
        """Return the numbers of the layers, of ``count``, that this stage holds.

        If they cannot be divided evenly, some have one more, but not the last, which has the head.

        Raises ``ShardingError`` if there are more stages than layers.
        """
        if self.size > count:
            raise ShardingError(
                f"{self.size} pipeline stages cannot share {count} layers: each stage needs one "
                f"layer or more, so take {count} stages or fewer"
            )
        begin, end = (-(-count * rank // self.size) for rank in (self.rank, self.rank + 1))
        return range(begin, end)


# The stage of the surrounding pipeline_parallel; None outside of one.
surrounding_stage: ContextVar[PipelineStage | None] = ContextVar("pipeline_stage", default=None)


@contextmanager
def pipeline_parallel(*, rank: int, size: int) -> Iterator[PipelineStage]:
    """Have :func:`get_model` build stage ``rank`` of ``size`` of a model.

    The ranks that share each layer of the stage are those of :func:`tensor_parallel`. Stages have
    no collectives, so no group connects them.

    Raises ``ValueError`` unless ``0 <= rank < size``.
    """
    if not 0 <= rank < size:
        raise ValueError(f"pipeline stage {rank} is outside of range({size})")
    token = surrounding_stage.set(stage := PipelineStage(rank, size))
    try:
        yield stage
    finally:
        surrounding_stage.reset(token)


@contextmanager
def message_group(timeout: float) -> Iterator[ProcessGroup | None]:
    """Yield the tensor-parallel group of processes, with a backend that sends between CPUs.

    Yields ``None`` for a single or a simulated rank. If the world has NCCL only, yields a new gloo
    group of the same ranks, with ``timeout`` in seconds, which is destroyed at the block's end.
    """
    group = tensor_parallel_group()
    if not isinstance(group, ProcessGroup) or group.size == 1:
        yield None
        return
    is_world = group.group in (None, dist.group.WORLD)
    if not is_world or sends_between_cpus(group.group):
        yield group
        return
    # Only for the world, because all of its processes must take part in creating a group.
    messages = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    try:
        yield ProcessGroup(messages)
    finally:
        dist.destroy_process_group(messages)


def run_ranks(size: int, fn: Callable[[int], T]) -> list[T]:
    """Run ``fn(rank)`` in a thread for each rank of a simulated group and return the results.

    Each call runs inside ``tensor_parallel(rank=rank, size=size)``, and collectives exchange
    tensors, so all ranks of a model can be built and run in one process. If ranks fail, the
    exception of the first one is raised, after all threads have ended.
    """
    meeting = _Meeting(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    # In PyTorch each thread has its own grad mode and default device: ranks get the caller's.
    grad, device = torch.is_grad_enabled(), torch.get_default_device()

    def work(rank: int) -> None:
        _meeting.set(meeting)
        try:
            with tensor_parallel(rank=rank, size=size), torch.set_grad_enabled(grad), device:
                results[rank] = fn(rank)
        except BaseException as error:
            errors.append(error)  # later errors are caused by the end of the first failed rank
        finally:
            meeting.end(rank)

    threads = [
        threading.Thread(target=copy_context().run, args=(work, rank), name=f"rank {rank}")
        for rank in range(size)
    ]
    # Each rank's operations use torch's threads; with more threads than cores, they would wait.
    cores = torch.get_num_threads()
    torch.set_num_threads(max(1, cores // size))
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        meeting.end(-1)  # after an interrupt here, the ranks stop at their next collective
        raise
    finally:
        torch.set_num_threads(cores)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
