"""Compute logits and tokens of a checkpoint on one rank, simulated or under torchrun.

As a script, ``one_rank.py DIRECTORY`` reads ``DIRECTORY/jobs.json``, which maps names to arguments
of :func:`compute`, and saves the results by name in ``DIRECTORY/rank<R>.pt``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vllm_module import ModelConfig, get_model
from vllm_module.runtime.cache.kv_cache import KVCache, attention_layers
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.cache.state_cache import StateCache, state_layers
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.step_inputs import StepInputs

MAX_MODEL_LEN = 128  # tokens of the longest prompt and its steps, by which rope scalings are chosen


@torch.inference_mode()
def compute(
    folder: str | Path,
    prompts: list[list[int]],
    steps: int,
    dtype: str = "auto",
    whole_experts: bool = False,
) -> dict[str, Any]:
    """Load ``folder`` through the public API and run it, expert parallel if ``whole_experts``.

    Returns the logits of each prompt, the greedy tokens and the logits of ``steps`` steps.
    """
    model = build(folder, dtype, whole_experts)
    prompt_logits = [
        model.compute_logits(model(torch.tensor(prompt), torch.arange(len(prompt))))
        for prompt in prompts
    ]
    step_logits: list[torch.Tensor] = []
    compute_logits = model.compute_logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        step_logits.append(compute_logits(hidden))
        return step_logits[-1]

    model.compute_logits = record
    tokens, _ = generate(model, prompts, steps)
    model.compute_logits = compute_logits
    return {
        "prompt_logits": prompt_logits,
        "tokens": tokens,
        "step_logits": torch.stack(step_logits),
    }


def build(folder: str | Path, dtype: str = "auto", whole_experts: bool = False) -> Any:
    """Load ``folder`` for sequences of the prompts' lengths and their steps."""
    config = ModelConfig(
        model=str(folder),
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        enable_expert_parallel=whole_experts,
    )
    return get_model(model_config=config)


def generate(
    model: Any,
    prompts: list[list[int]],
    steps: int | list[int],
    *,
    pages: int = 64,
    page_size: int = 16,
    host_pages: int = 0,
    max_num_batched_tokens: int = 128,
    pauses: list[int] | None = None,
) -> tuple[list[list[int]], int]:
    """Return an engine's greedy tokens and its number of preemptions.

    Each rank runs the same engine, which takes ``pauses[i]`` steps before prompt ``i`` arrives.
    """
    windows = {layer.sliding_window for layer in attention_layers(model)}
    (window,) = windows if len(windows) == 1 else (None,)
    dtype = next(p.dtype for p in model.parameters() if p.dtype.itemsize > 1)
    device = torch.device("cpu")
    cache = KVCache(model, pages, page_size, device, dtype, host_pages)
    has_states = bool(state_layers(model))
    host_states = len(prompts) if has_states and host_pages else 0
    states = StateCache(model, len(prompts), device, dtype, host_states)
    runner = ModelRunner(model, device, len(prompts), pages)

    def execute(inputs: StepInputs) -> torch.Tensor:
        if inputs.pages is not None:
            cache.move(inputs.pages)
        if inputs.states is not None:
            states.move(inputs.states)
        return runner.run(inputs)

    scheduler = Scheduler(
        PagePool(pages, page_size),
        PagePool(host_pages, page_size),
        len(prompts),
        max_num_batched_tokens,
        prefix_caching=not has_states,
        window=window,
        has_states=has_states,
        host_states=host_states,
    )
    engine = Engine(execute, scheduler, model.config.vocab_size, pages * page_size)
    requests = []
    max_tokens = [steps] * len(prompts) if isinstance(steps, int) else steps
    for index, (prompt, most) in enumerate(zip(prompts, max_tokens, strict=True)):
        for _ in range(pauses[index] if pauses else 0):
            engine.step()
        params = SamplingParams(temperature=0, max_tokens=most)
        requests.append(engine.add(str(index), prompt, params))
    while engine.requests:
        engine.step()
    cache.close()
    states.close()
    assert scheduler.pool.free_pages == pages
    assert scheduler.host.free_pages == host_pages
    return [request.sequences[0].output for request in requests], scheduler.preemptions


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
