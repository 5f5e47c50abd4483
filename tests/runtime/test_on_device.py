"""Engines that start and serve on a simulated device: no step uses the host; tokens are right."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import LLM, SamplingParams
from vllm_module.kernels.matmul.code_rows_matmul import fastest_code_rows
from vllm_module.layers.placed_experts import PlacedExperts
from vllm_module.runtime.ranks.worker_experts import WorkerExperts

# Pytest's importlib mode has no imports between test files.
HERE = Path(__file__).parent
ENGINES: Any = runpy.run_path(str(HERE / "engines_on_device.py"))
folders, generated, on_device, GREEDY, PROMPTS = (
    ENGINES[name] for name in ("folders", "generated", "on_device", "GREEDY", "PROMPTS")
)
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "dense, eager": ("qwen3", {"enforce_eager": True}),
    "soft caps, windows": ("gemma2", {}),
    "sinks, experts": ("gpt-oss", {}),
    "experts": ("qwen3-moe", {}),
    "latent": ("deepseek-v3", {}),
    "mamba2": ("mamba2", {}),
    "delta rule": ("qwen3-next", {}),
    "FP8 cache": ("qwen3", {"kv_cache_dtype": "fp8"}),
    "latent, FP8 cache": ("deepseek-v3", {"kv_cache_dtype": "fp8"}),
    "FP8 weights": ("qwen3", {"quantization": "fp8_per_channel"}),
    "FP8 experts": ("qwen3-moe", {"quantization": "fp8_per_tensor"}),
    "int4 weights": ("wide", {"quantization": "int4_per_group"}),
}


# Others have their kinds of caches, weights and experts.
LONG = "experts", "FP8 cache", "FP8 weights"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.at_length] if name in LONG else []) for name in SERVED],
)
def test_an_engine_starts_and_serves(folders: Any, name: str) -> None:
    """Without a given memory for pages, it measures its largest steps, and gives a CPU's tokens."""
    architecture, options = SERVED[name]
    folder = folders(architecture)
    expected = generated(folder, GREEDY, device="cpu", kv_cache_memory_bytes=1 << 20, **options)
    with on_device():
        assert generated(folder, GREEDY, device="cuda", **options) == expected


@pytest.mark.parametrize(
    ("architecture", "options"), [("qwen3", {}), ("wide", {"quantization": "bitsandbytes"})]
)
def test_the_default_device_is_not_that_of_an_engine(
    folders: Any, architecture: str, options: dict[str, Any]
) -> None:
    """An engine on a CPU makes nothing on the device that a program has set for its own tensors."""
    folder = folders(architecture)
    run = partial(generated, folder, GREEDY, device="cpu", kv_cache_memory_bytes=1 << 20, **options)
    expected = run()
    fastest_code_rows.cache_clear()
    with torch.device("meta"):
        assert run() == expected


BEFORE_FP8: dict[str, tuple[str, dict[str, Any]]] = {
    "FP8 cache": ("qwen3", {"kv_cache_dtype": "fp8_e5m2"}),
    "latent, FP8 cache": ("deepseek-v3", {"kv_cache_dtype": "fp8_e5m2"}),
    "FP8 weights": ("qwen3", {"quantization": "fp8_per_channel"}),
    "FP8 experts": ("qwen3-moe", {"quantization": "fp8_per_tensor"}),
}


@pytest.mark.parametrize("name", BEFORE_FP8)
def test_an_engine_on_a_gpu_without_fp8(
    folders: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 8.9 torch converts FP8; the host does not wait for it, and graphs capture it."""
    architecture, options = BEFORE_FP8[name]
    folder = folders(architecture)
    expected = generated(folder, GREEDY, device="cpu", kv_cache_memory_bytes=1 << 20, **options)
    with on_device():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
        assert generated(folder, GREEDY, device="cuda", **options) == expected


def test_tokens_of_captures_are_not_counted(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' counts begin with requests, and stay while the engine sleeps."""

    def layers(worker: Any) -> dict[str, Any]:  # though they are on one rank
        named = worker.model.named_modules()
        return {path: each for path, each in named if isinstance(each, PlacedExperts)}

    monkeypatch.setattr(WorkerExperts, "_layers", layers)
    options: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "dtype": "float32"}
    with (
        on_device(),
        LLM(folders("qwen3-moe"), skip_tokenizer_init=True, enable_eplb=True, **options) as llm,
    ):
        counts = llm.expert_counts()
        assert {sum(each) for each in counts.values()} == {0}
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY, use_tqdm=False)
        counts = llm.expert_counts()
        assert all(sum(each) for each in counts.values())
        llm.sleep()
        llm.wake_up()
        assert llm.expert_counts() == counts


def test_every_operation_is_launched(folders: Any) -> None:
    """The engines here and the benchmark's cases launch every operation of kernels/."""
    launched: set[str] = set()
    kernels = runpy.run_path(str(HERE.parent / "kernels/test_on_device.py"))
    for architecture in ("qwen3-moe", "deepseek-v3", "gpt-oss"):
        folder = folders(architecture)
        with on_device() as device:
            device.launched = launched
            generated(folder, GREEDY, device="cuda")
    with kernels["bench_cases"]() as cases:
        launched |= kernels["launched_by"](cases)
    assert kernels["operations"]() - launched == set()


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "wide top_p": {"top_p": 0.99},
    "min_p": {"min_p": 0.1},
    "all three": {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {3: 5.0, 7: -100.0}},
    "allowed": {"allowed_token_ids": [5, 6, 7], "logprobs": 2, "frequency_penalty": 1.0},
    "banned": {"min_tokens": 3, "stop_token_ids": [1, 2, 3]},
    "logprobs": {"logprobs": 4},
    "greedy with logprobs": {"temperature": 0, "logprobs": 0},
}


def test_sampling_with_every_option(folders: Any) -> None:
    """Requests of all kinds in one batch, and in turns, get a CPU's tokens and logprobs."""
    common = {"seed": 3, "max_tokens": 4, "ignore_eos": True}
    kinds = [SamplingParams(**{**common, **each}) for each in SAMPLED.values()]
    for first in range(0, len(kinds), 4):
        params = (kinds[first:] + kinds)[:4]
        expected = generated(folders("qwen3"), params, device="cpu", kv_cache_memory_bytes=1 << 20)
        with on_device():
            assert generated(folders("qwen3"), params, device="cuda") == expected
