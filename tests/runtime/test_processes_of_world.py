"""Which processes of a launcher are the ranks of an engine, counted out."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_module.base.process_groups import private_group
from vllm_module.config import EngineConfig
from vllm_module.runtime.ranks import connections
from vllm_module.runtime.ranks.connections import processes_of_world
from vllm_module.runtime.ranks.group import Ranks


def in_world(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("engines", [1, 2, 3])
def test_each_engine_of_a_launcher_has_ranks_of_its_own(
    monkeypatch: pytest.MonkeyPatch, size: int, engines: int
) -> None:
    """Neighbours make an engine, and every process is in exactly one."""
    config = EngineConfig(
        tensor_parallel_size=size, distributed_executor_backend="external_launcher"
    )
    members: dict[range, list[int]] = {}
    for rank in range(engines * size):
        in_world(monkeypatch, rank, engines * size)
        ranks = processes_of_world(config)
        assert (ranks is None) == (size == 1)
        members.setdefault(ranks or range(rank, rank + 1), []).append(rank)
    assert len(members) == engines
    assert all(list(ranks) == found for ranks, found in members.items())


@pytest.mark.parametrize(("size", "processes"), [(2, 3), (3, 4), (4, 2)])
def test_engines_that_do_not_divide_the_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch, size: int, processes: int
) -> None:
    in_world(monkeypatch, 0, processes)
    config = EngineConfig(
        tensor_parallel_size=size, distributed_executor_backend="external_launcher"
    )
    with pytest.raises(ValueError, match=f"engines of {size} ranks do not divide the {processes}"):
        processes_of_world(config)


@pytest.mark.parametrize(
    ("given", "world", "expected"),
    [
        ({}, 1, None),
        ({}, 4, range(4)),
        ({"tensor_parallel_size": 1}, 4, None),  # asked for: an engine of this process alone
        ({"tensor_parallel_size": 4}, 4, range(4)),
        ({"tensor_parallel_size": 4}, 1, None),  # starts the others
        ({"distributed_executor_backend": "mp"}, 4, None),
        ({"distributed_executor_backend": "mp", "tensor_parallel_size": 4}, 4, None),
        ({"distributed_executor_backend": "uni"}, 4, None),
        ({"tensor_parallel_size": 2}, 4, "tensor_parallel_size is 2, and torchrun has started 4"),
        (
            {"distributed_executor_backend": "uni", "tensor_parallel_size": 2},
            1,
            "'uni' is an engine of one process",
        ),
    ],
)
def test_an_engine_takes_the_launchers_processes_or_its_own(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], world: int, expected: Any
) -> None:
    """By the backend, the size and whether that was asked for."""
    in_world(monkeypatch, 0, world)
    assert connections.under_torchrun() == (world > 1)
    if not isinstance(expected, str):
        assert processes_of_world(EngineConfig(**given)) == expected
        return
    with pytest.raises(ValueError, match=expected):
        processes_of_world(EngineConfig(**given))


def test_what_ray_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra, where Ray is not installed, and within seconds a cluster that is not there."""
    config = EngineConfig(tensor_parallel_size=2, distributed_executor_backend="ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"Ray is not installed: pip .*vllm-module\[ray\]"):
        Ranks(config, torch.device("cpu"), lambda: None, tuple)
    absent = SimpleNamespace(is_initialized=lambda: False, init=None)
    monkeypatch.setitem(sys.modules, "ray", absent)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ConnectionError, match=r"'127\.0\.0\.1:9'; ConnectionRefusedError"):
        Ranks(config, torch.device("cpu"), lambda: None, tuple)


@pytest.mark.parametrize("missing", [[0], [1], [0, 2], []])
def test_each_group_is_cut_off_whichever_is_missing(missing: list[int]) -> None:
    """Two ranks of up to three groups: the other one's receive ends with an error in each."""
    store, both = dist.HashStore(), threading.Barrier(2)
    forever, cpu = timedelta(days=1), torch.device("cpu")

    def work(rank: int) -> int:
        groups = [
            None
            if number in missing
            else private_group(dist.PrefixStore(str(number), store), rank, 2, cpu, forever)
            for number in range(3)
        ]
        both.wait()
        if rank == 0:
            connections.cut_off(*groups)
            both.wait()
            return 0
        try:
            for group in filter(None, groups):
                receiving = dist.irecv(torch.empty(1), group=group, group_src=0)
                with pytest.raises(RuntimeError, match=r"(?i)closed|reset"):
                    receiving.wait(timedelta(seconds=5))
        finally:
            both.wait()  # a group that is freed closes its connections, too
        return len([*filter(None, groups)])

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(work, range(2))] == [0, 3 - len(missing)]
