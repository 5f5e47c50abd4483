"""Tensor parallelism in real processes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).with_name("one_rank.py")
torchrun = runpy.run_path(str(SCRIPT.parents[1] / "support.py"))["torchrun"]

# Other families are computed by simulated ranks; here the processes and their group are tried.
CASES = ("llama-yarn-tied-biases-one-kv-head",)
EXPERTS = ("deepseek-v3", "gpt-oss")  # 5 experts on 2 ranks; experts in one tensor


def test_two_processes_compute_what_transformers_does(tiny: Any, tmp_path: Path) -> None:
    """Two gloo processes, which may share experts, compute transformers' logits and tokens."""
    checkpoints = {name: tiny(name) for name in CASES + EXPERTS}
    jobs = {
        name: (str(c.folder), *c.reference.job, "auto", name in EXPERTS)
        for name, c in checkpoints.items()
    }
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    torchrun(2, SCRIPT, tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    for name, checkpoint in checkpoints.items():
        checkpoint.reference.check(first[name])
        assert torch.equal(first[name]["step_logits"], second[name]["step_logits"]), name
        assert first[name]["tokens"] == second[name]["tokens"], name
