"""Tiny Mamba-2, Qwen3-Next and Bamba: greedy tokens of the engine are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

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

STEPS = 64
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba2": {
        "model_type": "mamba2", "vocab_size": 130, "hidden_size": 64, "num_hidden_layers": 3,
        "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 4, "conv_kernel": 4,
        "expand": 2, "chunk_size": 16, "tie_word_embeddings": False, "pad_token_id": 0,
        "eos_token_id": 0, "bos_token_id": 0,
    },
    "bamba": {
        "model_type": "bamba", "vocab_size": 130, "hidden_size": 64, "num_hidden_layers": 4,
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 4,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16,
        "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0,
        "tie_word_embeddings": False,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", "vocab_size": 130, "hidden_size": 64, "num_hidden_layers": 4,
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "pad_token_id": 0, "eos_token_id": 0,
        "bos_token_id": 0, "tie_word_embeddings": False,
    },
}  # fmt: skip
LENGTHS = (16, 1, 40, 5, 17)


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request: Any, tmp_path_factory: Any) -> Any:
    """A folder, prompts, and transformers' tokens of each prompt alone."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[request.param])).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias", ".D")):
                continue
            scale = 0.5 if "embed" in name or "lm_head" in name else 0.15
            mean = 1.0 if "norm" in name else 0.0
            parameter.normal_(mean, scale, generator=generator)
    model.save_pretrained(folder)
    prompts = [torch.randint(1, 130, (n,), generator=generator).tolist() for n in LENGTHS]
    tokens = []
    with torch.no_grad():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(STEPS):  # whole sequences, without any cache of transformers
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            tokens.append(ids[len(prompt) :])
    return folder, prompts, tokens


def check_llm(saved: Any, size: int, most_tokens: int) -> None:
    folder, prompts, tokens = saved
    with LLM(
        str(folder), device="cpu", dtype="float32", tensor_parallel_size=size, max_num_seqs=4,
        max_model_len=128, max_num_batched_tokens=most_tokens,
    ) as llm:  # fmt: skip
        asked = SamplingParams(temperature=0, max_tokens=STEPS, n=2, ignore_eos=True)
        got = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    for output, expected in zip(got, tokens, strict=True):
        assert output.error is None
        assert [list(each.token_ids) for each in output.outputs] == [expected] * 2


def test_llm_gives_the_tokens_of_transformers(saved: Any) -> None:
    """Prompts of one token and of several chunks, and two samples of each."""
    check_llm(saved, 1, 7)


@pytest.mark.parametrize("saved", ["qwen3_next"], indirect=True)
def test_so_do_two_processes(saved: Any) -> None:
    """A hybrid with experts, on two ranks."""
    check_llm(saved, 2, 512)


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


@pytest.mark.parametrize(
    ("size", "pages", "host", "most"), [(1, 18, 0, 5), (2, 18, 16, 64), (4, 60, 0, 16)]
)
def test_schedules_change_no_token(saved: Any, size: int, pages: int, host: int, most: int) -> None:
    """Chunks, arrivals, samples and preemptions, at any number of ranks."""
    folder, prompts, tokens = saved
    size = 2 if "qwen3_next" in folder.name else size  # it has two key heads
    for got, preemptions in run_ranks(
        size, lambda rank: generate(folder, prompts, pages, host, most)
    ):
        assert got == [[each] * (1 + index % 3) for index, each in enumerate(tokens)]
        assert preemptions or pages > 20
