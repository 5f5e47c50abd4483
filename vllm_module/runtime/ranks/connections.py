"""How the ranks of an engine find each other, in groups of their own."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import defaultdict
from datetime import timedelta
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vllm_module.base import process_groups
from vllm_module.base.process_groups import private_group, rank_and_size, sends_between_cpus
from vllm_module.base.waiting import interruptibly
from vllm_module.config import EngineConfig
from vllm_module.distributed import PipelineStage
from vllm_module.runtime.devices import current

_stores: Any = dist  # torch.distributed has the stores; its type hints lack them
_CUT_TAG = (1 << 18) + 1  # tag of a receive that is posted only to notice a closed connection
_TIMEOUT = timedelta(minutes=30)  # of a collective, as torch has it
_FOREVER = timedelta(days=365)  # timeout of a wait: an engine may wait for requests for any time
# Engines of the same processes of a launcher are numbered, because these share one store.
_engines: dict[range, itertools.count[int]] = defaultdict(itertools.count)


class Connections(NamedTuple):
    """What connects a rank to the other ranks of its engine.

    ``group`` is the tensor-parallel group, ``None`` for a pipeline stage of one rank. ``control``
    has the ranks of all stages, carries messages between CPUs and has no timeout. ``pipe`` connects
    the ranks that have one number in their stages, by stage; ``None`` without stages.
    """

    group: dist.ProcessGroup | None
    control: dist.ProcessGroup
    pipe: dist.ProcessGroup | None = None


def stage_of(rank: int, size: int, stages: int) -> tuple[PipelineStage, int]:
    """Return the pipeline stage of an engine's rank, and its number among the stage's ranks.

    The first ranks have the last stage: rank 0 samples, from logits that it computes itself.
    """
    place, number = divmod(rank, size // stages)
    return PipelineStage(stages - 1 - place, stages), number


def connect(store: Any, rank: int, size: int, device: torch.device, stages: int = 1) -> Connections:
    """Connect this process, as rank ``rank`` of ``size``, to those that share ``store``."""

    def join(name: str, rank: int, size: int) -> dist.ProcessGroup:
        return private_group(_stores.PrefixStore(name, store), rank, size, device, _TIMEOUT)

    def create() -> Connections:
        stage, number = stage_of(rank, size, stages)
        control = _stores.PrefixStore("control", store)
        with current(device):  # a new thread's device is the first one
            return Connections(
                join(f"group {stage.rank}", number, size // stages) if size > stages else None,
                private_group(control, rank, size, torch.device("cpu"), _FOREVER),
                join(f"pipe {number}", stage.rank, stages) if stages > 1 else None,
            )

    return interruptibly(create)


def cut_off(*groups: dist.ProcessGroup | None) -> None:
    """Close the connections to other ranks.

    The others then stop waiting for this rank. NCCL's connections end with the process.
    """
    for group in groups:
        if group is None or not sends_between_cpus(group):
            continue
        rank, size = rank_and_size(group)
        process_groups.cut_off(set(range(size)) - {rank}, group, _CUT_TAG)
        # Never destroyed: that waits for all sends, and gloo does not end one to a rank that has
        # ended. So a process would hang when it exits.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def meeting_place(size: int, address: tuple[str, int] = ("127.0.0.1", 0)) -> Any:
    """Connect to the TCP store at an address, where ranks meet; port 0 creates one on this host."""
    host, port = address
    return _stores.TCPStore(host, port, size, is_master=not port, wait_for_workers=False)


def under_torchrun() -> bool:
    """Tell whether a launcher has started this process as one of several, as torchrun does."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def world() -> tuple[int, int]:
    """Return this process's rank in the launcher's or the program's world, and the world's size."""
    if under_torchrun():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def store_of_world(ranks: range) -> Any:
    """Return a store for an engine of the processes of the world with these numbers."""
    _, size = world()
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    else:
        store = interruptibly(partial(_launcher_store, os.getpid()))
    name = f"engine {next(_engines[ranks])} of ranks {ranks.start} to {ranks.stop - 1} of {size}"
    return _stores.PrefixStore(name, store)


@cache  # rank 0 may be the store's server, which the others use for as long as they run
def _launcher_store(pid: int) -> Any:
    del pid  # a fork's connection would be its parent's
    store, _, _ = next(_stores.rendezvous("env://"))
    return store


def processes_of_world(config: EngineConfig) -> range | None:
    """Return the processes of the world that are ranks of this engine.

    It is ``None`` for an engine that has this process only, or starts the others.

    Raises ``ValueError`` if the world has not as many processes as the engine needs.
    """
    backend, size = config.distributed_executor_backend, config.tensor_parallel_size
    rank, processes = world()
    if config.data_parallel_size > 1:  # each engine starts its own
        return None
    if config.pipeline_parallel_size > 1:
        return _processes_of_stages(config, processes)
    if backend == "uni" and size > 1:
        raise ValueError(
            f"tensor_parallel_size is {size}, and distributed_executor_backend 'uni' is an engine "
            "of one process: expected 1, or 'mp', which starts the others"
        )
    if backend == "external_launcher":
        if processes % size:
            raise ValueError(
                f"tensor_parallel_size is {size}, and distributed_executor_backend is "
                f"'external_launcher': engines of {size} ranks do not divide the {processes} "
                "processes that were launched. Launch a multiple, or take 'mp', which starts ranks"
            )
        first = rank - rank % size
        return range(first, first + size) if size > 1 else None
    asked = "tensor_parallel_size" in config.model_fields_set
    if backend is not None or not under_torchrun() or (asked and size == 1):
        return None
    if asked and size != processes:
        raise ValueError(
            f"tensor_parallel_size is {size}, and torchrun has started {processes} ranks: leave it "
            f"out, start {size}, or say which is meant: distributed_executor_backend "
            "'external_launcher' makes several engines of these processes, 'mp' starts ranks"
        )
    return range(processes)


def _processes_of_stages(config: EngineConfig, processes: int) -> range | None:
    """Do the same for an engine of several pipeline stages."""
    backend, stages = config.distributed_executor_backend, config.pipeline_parallel_size
    if backend in ("uni", "external_launcher"):
        raise ValueError(
            f"pipeline_parallel_size is {stages}, and distributed_executor_backend is {backend!r}: "
            "only rank 0 of a pipeline gets tokens, and the other ranks do what it says. Leave the "
            "backend out, or take 'mp', which starts the ranks"
        )
    if backend is not None or not under_torchrun():
        return None
    asked = "tensor_parallel_size" in config.model_fields_set
    size = config.tensor_parallel_size
    if processes % stages or (asked and processes != size * stages):
        ranks = f" of {size} tensor-parallel ranks each" if asked else ""
        raise ValueError(
            f"pipeline_parallel_size is {stages}, and torchrun has started {processes} processes, "
            f"which are not {stages} stages{ranks}: start a process for each rank of each stage, "
            "or give distributed_executor_backend='mp', which starts them"
        )
    return range(processes)
