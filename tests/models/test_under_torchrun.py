"""Tensor parallelism over real processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

CASES = ("llama-yarn-tied-biases-one-kv-head", "mistral-window", "qwen2", "qwen3")


def torchrun(size: int, *command: str) -> None:
    """Run a script as ``size`` processes; show what they printed if they fail."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    address = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    result = subprocess.run(
        [*launcher, "--nproc-per-node", str(size), *address, *command],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_two_processes_compute_what_transformers_does(tiny: Any, tmp_path: Path) -> None:
    """Two gloo processes both compute transformers' logits and greedy tokens."""
    checkpoints = {name: tiny(name) for name in CASES}
    jobs = {name: (str(c.folder), *c.reference.job) for name, c in checkpoints.items()}
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    torchrun(2, str(Path(__file__).with_name("one_rank.py")), str(tmp_path))
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    for name, checkpoint in checkpoints.items():
        checkpoint.reference.check(first[name])
        assert torch.equal(first[name]["step_logits"], second[name]["step_logits"]), name
        assert first[name]["tokens"] == second[name]["tokens"], name
