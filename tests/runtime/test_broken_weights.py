"""A checkpoint whose weights are not finite loads, and generates an error instead of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_module import LLM, LoadConfig, SamplingParams
from vllm_module.build.model_source import build_model
from vllm_module.hf_config import HFConfig
from vllm_module.testing import random_weights

CONFIG: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
PROMPTS = [{"prompt_token_ids": ids} for ids in ([7], [1, 2, 3], list(range(20)))]


def write_model(folder: Path, architecture: str, name: str, value: float) -> None:
    """Write random weights, with ``value`` at one place of the layer's tensor ``name``."""
    config = CONFIG | {"architectures": [f"{architecture}ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": architecture.lower()}))
    model = build_model(HFConfig(**config), torch.float32, torch.device("cpu"))
    weights = random_weights(model.expected_weights())
    weights[f"model.layers.0.{name}.weight"].view(-1)[5] = value
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize(
    "name", [*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.down_proj", "input_layernorm"]
)
@pytest.mark.parametrize(("architecture", "window"), [("Llama", None), ("Mistral", 2)])
def test_weights_that_are_not_finite_make_errors(
    tmp_path: Path, architecture: str, window: int | None, name: str, value: float
) -> None:
    """NaN reaches the logits of prompts of any length; each output says so and has no text."""
    write_model(tmp_path, architecture, name, value)
    llm = LLM(
        str(tmp_path),
        device="cpu",
        hf_overrides={"sliding_window": window},
        kv_cache_memory_bytes=1 << 18,
        max_num_seqs=4,
        load_config=LoadConfig(allow_nan=True),
    )
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=3)):
        assert output.error is not None
        assert "NaN" in output.error
        assert [completion.token_ids for completion in output.outputs] == [[]]
        assert not output.outputs[0].text
    assert torch.isfinite(llm.executor.worker.model.model.embed_tokens.weight).all()
