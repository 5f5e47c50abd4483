"""An update of the scales of an 8-bit cache, while requests have keys and values in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, SamplingParams

SCALES = {
    f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor([0.25 + layer])
    for layer in (0, 1)
    for name in "kv"
}
PROMPTS = [[(7 * i + 3) % 60 for i in range(30 + 4 * n)] for n in range(4)]
PAGE = 4 * 2 * 2 * 2 * 16  # tokens, layers, keys and values, heads, features: bytes


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama whose weights are not quantized, with scales of its cache."""
    folder = tmp_path_factory.mktemp("scaled")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=60, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | SCALES, folder / "model.safetensors")
    entries = json.loads((folder / "config.json").read_text())
    entries["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {
            "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False,
            "symmetric": True,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


def steps(llm: LLM, update: dict[str, torch.Tensor] | None) -> Iterator[Any]:
    """Serve the prompts, with an update after ten steps, and yield what they are given."""
    given = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=60)
    for number, prompt in enumerate(PROMPTS):
        llm.engine.add(str(number), prompt, given)
    requests = [*llm.engine.requests.values()]
    for _ in range(10):
        llm.engine.step()
    assert any(each.sequences[0].output for each in requests)
    if update is not None:
        llm.update_weights(update)
    while llm.engine.requests:
        llm.engine.step()
    for request in requests:
        (sequence,) = request.sequences
        rows = [[row[at].logprob for at in range(60)] for row in sequence.logprobs]
        yield sequence.output, torch.tensor(rows)


@pytest.mark.parametrize("settings", [{}, {"swap_space": 0.001}, {"pipeline_parallel_size": 2}])
def test_running_requests_do_not_mix_scales(scaled: Path, settings: dict[str, Any]) -> None:
    """Powers of two cancel out but for the smallest numbers, so other scales change little.

    With pages for two of the four requests, others are preempted, and swapped to host memory.
    """
    given = {"kv_cache_dtype": "fp8", "block_size": 4, "dtype": "float32", "max_logprobs": 60}
    given |= {"skip_tokenizer_init": True, "max_model_len": 64, **settings}
    memory = 26 * PAGE // settings.get("pipeline_parallel_size", 1)
    with LLM(scaled, kv_cache_memory_bytes=memory, **given) as llm:
        assert llm.engine.scheduler.pool.num_pages == 26
        wanted = [*steps(llm, None)]
        assert llm.engine.scheduler.preemptions
        found = [*steps(llm, {name: 4 * scale for name, scale in SCALES.items()})]
        for (tokens, logprobs), (same, again) in zip(wanted, found, strict=True):
            assert tokens == same
            torch.testing.assert_close(again, logprobs, rtol=0, atol=0.02)
