"""Ranks in processes of their own."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from vllm_module.distributed import run_ranks

SCRIPT = Path(__file__).with_name("one_rank.py")
SIZE = 3
torchrun = runpy.run_path(str(SCRIPT.parents[1] / "support.py"))["torchrun"]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """What the script computes in processes that torchrun starts."""
    folder = tmp_path_factory.mktemp("processes")
    torchrun(SIZE, SCRIPT, folder)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(SIZE)]


def test_processes_compute_what_simulated_ranks_do(
    processes: list[dict[str, torch.Tensor]],
) -> None:
    """Collectives, and the layers that use them, give a process what they give a simulated rank."""
    compute = runpy.run_path(str(SCRIPT))["compute"]
    simulated = run_ranks(SIZE, lambda rank: compute())
    for rank, (real, expected) in enumerate(zip(processes, simulated, strict=True)):
        assert real["place"].tolist() == [rank, SIZE]
        assert real.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(real[name], tensor), (rank, name)


def test_processes_compute_what_one_rank_does(processes: list[dict[str, torch.Tensor]]) -> None:
    """The layers give each of three processes the exact numbers of the unsharded layer."""
    alone = runpy.run_path(str(SCRIPT))["compute"]()
    for real in processes:
        for name in ("hidden", "up", "down", "logits"):
            assert torch.equal(real[name], alone[name]), name
