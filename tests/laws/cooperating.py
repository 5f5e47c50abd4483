"""Ranks that load together where a law loads them side by side: threads, or processes.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vllm_module import cooperative
from vllm_module.cooperative import checkpoint as loading
from vllm_module.cooperative import reading
from vllm_module.core import planner
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import groups, tensor_parallel_group, together
from vllm_module.distributed.groups import SimulatedGroup
from vllm_module.weights.pairs import PairsCheckpoint

T = TypeVar("T")


def gather(work: Callable[[], T]) -> list[T]:
    """Do as ``together`` does among the threads of ``run_ranks``."""
    group: Any = tensor_parallel_group()
    data = torch.frombuffer(bytearray(pickle.dumps(work())), dtype=torch.uint8)
    return [pickle.loads(each.numpy().tobytes()) for each in group._exchange(data)]


def failure_of_threads() -> Callable[[], str]:
    meeting: Any = groups._meeting.get()
    return lambda: "another rank failed" if hasattr(meeting, "failed") else ""


@contextmanager
def telling_threads() -> Iterator[None]:
    """Tell the other threads of ``run_ranks`` if the block fails."""
    meeting: Any = groups._meeting.get()
    try:
        yield
    except BaseException:
        meeting.failed = True
        raise


def read_together(module: vLLMModule, checkpoint: Any, rank: int, size: int) -> Any:
    """Return the checkpoint as the threads of ``run_ranks`` read it together."""
    return cooperative.read_together(module, checkpoint, True, gather, rank, size)


def load_together(right: Any, module: vLLMModule, weights: Any) -> Any:
    """Load as ``right`` does, but together, where ranks run beside each other."""
    group = tensor_parallel_group()
    simulated = isinstance(group, SimulatedGroup)
    alone = groups._meeting.get() is None if simulated else not dist.is_initialized()
    inside = planner._current.get() is not None
    if alone or inside or group.size == 1 or not isinstance(weights, Mapping):
        return right(module, weights)
    pairs = PairsCheckpoint(SimpleNamespace(folder=Path("law")), weights)  # type: ignore[arg-type]
    if simulated:
        opened = read_together(module, pairs, group.rank, group.size)
        with telling_threads(), opened:
            return right(module, opened.items())

    def work() -> Any:
        with opened:
            return right(module, opened.items())

    among = partial(together, timeout=600.0)
    opened = cooperative.read_together(module, pairs, True, among, group.rank, group.size)
    return among(work)[group.rank]


@contextmanager
def small_batches(nbytes: int = 1024, buffers: int = 2, stall: float = 60.0) -> Iterator[None]:
    """Let the ring be so small that tiny models go round it, in threads or in processes."""
    from vllm_module.distributed import shared_ring

    values = {"BATCH_BYTES": nbytes, "BUFFERS": buffers}
    before = {name: getattr(reading, name) for name in values}
    right, stalled = loading.failure_of_others, shared_ring._STALL
    vars(reading).update(values)
    shared_ring._STALL = stall
    if not dist.is_initialized():
        loading.failure_of_others = failure_of_threads
    try:
        yield
    finally:
        vars(reading).update(before)
        loading.failure_of_others, shared_ring._STALL = right, stalled


@contextmanager
def cooperating(instead: Any) -> Iterator[None]:
    """Load together in every law; ``instead`` is the function of ``faults.py``."""
    with small_batches(), instead("core.module:vLLMModule.load_weights", load_together)():
        yield
