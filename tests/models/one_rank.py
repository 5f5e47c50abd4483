"""What one rank computes of a checkpoint: called in a simulated rank, or run under torchrun.

As a script, ``one_rank.py DIRECTORY`` computes each of ``DIRECTORY/jobs.json`` (the arguments of
:func:`compute` by name) and saves ``DIRECTORY/rank<R>.pt``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vllm_module import ModelConfig, get_model
from vllm_module.runtime.generate import stream


@torch.inference_mode()
def compute(
    folder: str | Path, prompts: list[list[int]], steps: int, dtype: str = "auto"
) -> dict[str, Any]:
    """Load ``folder`` through the public API; return logits of prompts and of ``steps`` steps."""
    model = get_model(model_config=ModelConfig(model=str(folder), dtype=dtype))
    prompt_logits = [
        model.compute_logits(model(torch.tensor(prompt), torch.arange(len(prompt))))
        for prompt in prompts
    ]
    step_logits: list[torch.Tensor] = []
    compute_logits = model.compute_logits

    def recorded(hidden: torch.Tensor) -> torch.Tensor:
        step_logits.append(compute_logits(hidden))
        return step_logits[-1]

    model.compute_logits = recorded
    generated = list(stream(model, prompts, steps))
    model.compute_logits = compute_logits
    tokens = [[step[index] for step in generated] for index in range(len(prompts))]
    return {
        "prompt_logits": prompt_logits,
        "tokens": tokens,
        "step_logits": torch.stack(step_logits),
    }


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        jobs = json.loads((directory / "jobs.json").read_text())
        results = {name: compute(*job) for name, job in jobs.items()}
        torch.save(results, directory / f"rank{dist.get_rank()}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
