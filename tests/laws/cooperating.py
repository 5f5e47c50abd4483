"""Ranks that load together where a law loads them side by side: threads, or processes.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vllm_module.cooperative import Cooperation, reading
from vllm_module.core import planner
from vllm_module.core.module import vLLMModule
from vllm_module.core.run import loading
from vllm_module.distributed import groups, tensor_parallel_group, together
from vllm_module.distributed.groups import SimulatedGroup
from vllm_module.weights.pairs import PairsCheckpoint

T = TypeVar("T")
STALL = 60.0


def gather(work: Callable[[], T]) -> list[T]:
    """Do as ``together`` does among the threads of ``run_ranks``."""
    group: Any = tensor_parallel_group()
    data = torch.frombuffer(bytearray(pickle.dumps(work())), dtype=torch.uint8)
    return [pickle.loads(each.numpy().tobytes()) for each in group._exchange(data)]


def failure_of_threads() -> Callable[..., str]:
    meeting: Any = groups._meeting.get()
    return lambda hanging=(), how="": how or "another rank failed" * hasattr(meeting, "failed")


@contextmanager
def telling_threads() -> Iterator[None]:
    """Tell the other threads of ``run_ranks`` if the block fails."""
    meeting: Any = groups._meeting.get()
    try:
        yield
    except BaseException:
        meeting.failed = True
        raise


def load_by_threads(module: vLLMModule, checkpoint: Any, rank: int, size: int) -> None:
    """Load as the threads of ``run_ranks`` do together."""
    cooperation = Cooperation(checkpoint, gather, rank, size, STALL)
    with telling_threads():
        load_by(cooperation, vLLMModule.load_weights, module)


def load_by(cooperation: Cooperation, right: Any, module: vLLMModule) -> Any:
    with loading(module, cooperation.pairs, open_reader=cooperation.open_reader):
        return right(module, cooperation.pairs)


def load_together(right: Any, module: vLLMModule, weights: Any) -> Any:
    """Load as ``right`` does, but together, where ranks run beside each other."""
    group = tensor_parallel_group()
    simulated = isinstance(group, SimulatedGroup)
    alone = groups._meeting.get() is None if simulated else not dist.is_initialized()
    inside = planner._current.get() is not None
    if alone or inside or group.size == 1 or not isinstance(weights, Mapping):
        return right(module, weights)
    pairs = PairsCheckpoint(Path("law"), weights)
    if simulated:
        with telling_threads():
            return load_by(Cooperation(pairs, gather, group.rank, group.size, STALL), right, module)
    among = partial(together, timeout=600.0)
    cooperation = Cooperation(pairs, among, group.rank, group.size, STALL, group.group)
    return among(lambda: load_by(cooperation, right, module))[group.rank]


@contextmanager
def small_batches(nbytes: int = 1024, buffers: int = 2) -> Iterator[None]:
    """Let the ring be so small that tiny models go round it, in threads or in processes."""
    values: dict[str, Any] = {"BATCH_BYTES": nbytes, "BUFFERS": buffers}
    if not dist.is_initialized():
        values["failure_of_others"] = failure_of_threads
    before = {name: getattr(reading, name) for name in values}
    vars(reading).update(values)
    try:
        yield
    finally:
        vars(reading).update(before)


@contextmanager
def cooperating(instead: Any) -> Iterator[None]:
    """Load together in every law; ``instead`` is the function of ``faults.py``."""
    with small_batches(), instead("core.module:vLLMModule.load_weights", load_together)():
        yield
