"""Tiny Mamba-2, Qwen3-Next and Bamba: greedy tokens of the engine are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import LLM, SamplingParams
from vllm_module.config import DeviceConfig, ModelConfig
from vllm_module.distributed import run_ranks
from vllm_module.loader import get_model
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.kv_cache import KVCache
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.page_pool import PagePool
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.state_cache import StateCache

STEPS = 64  # as in conftest.py
NAMES = ("mamba2", "bamba", "qwen3-next")


def check_llm(checkpoint: Any, size: int, most_tokens: int) -> None:
    folder, reference = checkpoint.folder, checkpoint.reference
    with LLM(
        str(folder), device="cpu", dtype="float32", tensor_parallel_size=size, max_num_seqs=4,
        max_model_len=128, max_num_batched_tokens=most_tokens,
    ) as llm:  # fmt: skip
        asked = SamplingParams(temperature=0, max_tokens=STEPS, n=2, ignore_eos=True)
        got = llm.generate(
            [{"prompt_token_ids": ids} for ids in reference.prompts], asked, use_tqdm=False
        )
    for output, expected in zip(got, reference.tokens, strict=True):
        assert output.error is None
        assert [list(each.token_ids) for each in output.outputs] == [expected] * 2


@pytest.mark.parametrize("name", NAMES)
def test_llm_gives_the_tokens_of_transformers(tiny: Any, name: str) -> None:
    """Prompts of one token and of several chunks, and two samples of each."""
    check_llm(tiny(name), 1, 7)


def test_so_do_two_processes(tiny: Any) -> None:
    """A hybrid with experts, on two ranks."""
    check_llm(tiny("qwen3-next"), 2, 512)


def generate(folder: Path, prompts: list[list[int]], pages: int, host: int, most: int) -> Any:
    config = ModelConfig(model=str(folder), dtype="float32")
    model = get_model(model_config=config, device_config=DeviceConfig(device="cpu"))
    cpu = torch.device("cpu")
    cache = KVCache(model, pages, 8, cpu, torch.float32, host)
    states = StateCache(model, 4, cpu, torch.float32, min(host, 3))
    runner = ModelRunner(model, cpu, 4, 16)

    def execute(inputs: Any) -> torch.Tensor:
        cache.move(inputs.swapped_out, inputs.copied, inputs.swapped_in)
        if inputs.states is not None:
            states.move(inputs.states)
        return runner.run(inputs)

    scheduler = Scheduler(
        PagePool(pages, 8), PagePool(host, 8), 4, most, False, has_states=True,
        host_states=min(host, 3),
    )  # fmt: skip
    engine = Engine(execute, scheduler, 130, 128)
    requests = []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=STEPS, n=1 + index % 3)
        requests.append(engine.add(str(index), prompt, params))
        engine.step()
        engine.step()
    while engine.requests:
        with torch.inference_mode():
            engine.step()
    cache.close()
    states.close()
    assert scheduler.pool.free_pages == pages
    return [[s.output for s in r.sequences] for r in requests], scheduler.preemptions


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_a_prompt_have_the_same_tokens(tiny: Any, name: str) -> None:
    """Samples share a prompt's state, in chunks, with preemptions and swaps, on two ranks."""
    checkpoint = tiny(name)
    prompts, tokens = checkpoint.reference.prompts, checkpoint.reference.tokens
    for got, preemptions in run_ranks(
        2, lambda rank: generate(checkpoint.folder, prompts, 18, 16, 16)
    ):
        assert got == [[each] * (1 + index % 3) for index, each in enumerate(tokens)]
        assert preemptions
