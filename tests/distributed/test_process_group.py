"""Ranks in processes of their own."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vllm_module.base.process_groups import private_group
from vllm_module.distributed import run_ranks

SCRIPT = Path(__file__).with_name("one_rank.py")
SUPPORT = runpy.run_path(str(SCRIPT.parents[1] / "support.py"))
Ranks = list[dict[str, torch.Tensor]]


def by_torchrun(size: int, hosts: int) -> Callable[[Path], object]:
    return lambda directory: SUPPORT["torchrun"](size, SCRIPT, directory, hosts=hosts)


STARTS = {
    "2 on 2 hosts": (2, by_torchrun(2, 2)),
    "3 on one host": (3, by_torchrun(3, 1)),
    "4 on one host": (4, by_torchrun(4, 1)),
}


@pytest.fixture(scope="module", params=STARTS)
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What the script computes in several processes."""
    size, run = STARTS[request.param]
    folder = SUPPORT["fill_once"](tmp_path_factory.getbasetemp(), request.param, run)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


def test_processes_compute_what_simulated_ranks_do(processes: Ranks) -> None:
    """Collectives, and the layers that use them, give a process what they give a simulated rank."""
    compute = runpy.run_path(str(SCRIPT))["compute"]
    size = len(processes)
    simulated = run_ranks(size, lambda rank: compute())
    for rank, (real, expected) in enumerate(zip(processes, simulated, strict=True)):
        assert real["place"].tolist() == [rank, size]
        assert real.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(real[name], tensor), (rank, name)


def test_processes_compute_what_one_rank_does(processes: Ranks) -> None:
    """The layers give each of the processes the exact numbers of the unsharded layer."""
    alone = runpy.run_path(str(SCRIPT))["compute"]()
    for real in processes:
        for name in ("hidden", "up", "down", "logits", "experts"):
            assert torch.equal(real[name], alone[name]), name
        assert torch.equal(real["own experts"], alone["experts"][real["own tokens"]])


def test_private_groups_have_names_of_their_own() -> None:
    """Groups are made after others were freed, whose ids Python gives to new objects."""
    names = set()
    for _ in range(50):
        cpu, second = torch.device("cpu"), timedelta(seconds=1)
        names.add(private_group(dist.HashStore(), 0, 1, cpu, second).group_name)
    assert len(names) == 50
