"""Engines on a simulated device that refuses what a step may not do.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3 as modeling_qwen3  # sees the real torch.cuda

from vllm_module import LLM, SamplingParams
from vllm_module.runtime import engine
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.sampling import sampler

HERE = Path(__file__).parent
_simulated = runpy.run_path(str(HERE / "simulated_device.py"))
DEVICE, SimulatedDevice = _simulated["DEVICE"], _simulated["SimulatedDevice"]
HostError = _simulated["HostError"]
CONFIGS: dict[str, dict[str, Any]] = runpy.run_path(str(HERE.parent / "models/configurations.py"))[
    "CONFIGS"
]
WIDE = CONFIGS["llama"] | {"hidden_size": 128, "intermediate_size": 256}  # whole groups of 128
MEMORY = 1 << 30
PROMPTS = [[5, 9, 3], [7] * 21, [11, 4], [2, 8, 6, 1, 30]]


@contextmanager
def on_device() -> Iterator[Any]:
    """Have a simulated device that refuses what a step may not do."""
    device = SimulatedDevice(launches=True)

    def stepping(function: Any) -> Any:
        def called(*arguments: Any, **others: Any) -> Any:
            with device.stepping():
                return function(*arguments, **others)

        return called

    with device.serving(MEMORY), pytest.MonkeyPatch.context() as patch:
        # Wrapped: the device refuses waits and launches only inside of a step, and is told of it.
        patch.setattr(ModelRunner, "run", stepping(ModelRunner.run))
        patch.setattr(engine, "sample", stepping(sampler.sample))
        yield device


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a small model of an architecture, once."""
    saved: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in saved:
            torch.manual_seed(0)
            saved[name] = tmp_path_factory.mktemp(name)
            config = AutoConfig.for_model(**CONFIGS.get(name, WIDE))
            AutoModelForCausalLM.from_config(config).save_pretrained(saved[name])
        return saved[name]

    return folder


def generated(folder: Path, params: Any, **options: Any) -> list[Any]:
    """Return tokens and logprobs of all prompts, some of which are computed in chunks."""
    with LLM(
        folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, dtype="float32",
        max_num_batched_tokens=16, block_size=4, **options,
    ) as llm:  # fmt: skip
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [each.error for each in outputs] == [None] * len(PROMPTS)
    return [
        (each.outputs[0].token_ids, [list(x) for x in each.outputs[0].logprobs or []])
        for each in outputs
    ]


GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
