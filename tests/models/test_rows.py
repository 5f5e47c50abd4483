"""What models compute where norms and activations quantize rows for the layers that read them."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vllm_module.build.model_source import build_model
from vllm_module.build.registry import config_class
from vllm_module.hf_config import parse_config
from vllm_module.layers import linear
from vllm_module.quantization import EightBitMethod, online_rules, rows
from vllm_module.quantization.rows import QuantizedRows
from vllm_module.testing.checkpoints import random_weights

_configurations = runpy.run_path(str(Path(__file__).with_name("configurations.py")))
CPU = torch.device("cpu")
DENSE = {"qkv_proj": 2, "gate_up_proj": 2, "down_proj": 2}  # of two layers
# How often each layer is given quantized rows in one pass.
HANDED: dict[str, dict[str, int]] = {
    **dict.fromkeys(["llama", "llama-gelu-head-size", "mistral", "qwen2", "qwen3", "phi3"], DENSE),
    **dict.fromkeys(["glm", "glm4", "gemma2", "gemma3"], DENSE),
    "granite": dict.fromkeys(DENSE, 3),
    # Attention and MLP read one norm, or none.
    "cohere": {"down_proj": 2},
    "olmo2": {"down_proj": 2},
    # Experts and a router read one norm. Some layers are dense, and shared experts are.
    **{kind: {"qkv_proj": 2} for kind in ["mixtral", "olmoe", "gpt-oss"]},
    "qwen3-moe": {"qkv_proj": 2, "gate_up_proj": 1, "down_proj": 1},
    "qwen2-moe": {"qkv_proj": 2, "gate_up_proj": 1, "down_proj": 2},
    # Two projections read one norm, or they are fused.
    "deepseek-v2": {"gate_up_proj": 1, "down_proj": 2},
    "deepseek-v3": {"qkv_a_proj": 2, "q_b_proj": 2, "gate_up_proj": 1, "down_proj": 2},
    # Other norms and activations.
    "gpt2": {},
    "starcoder2": {},
}


def model_of(kind: str) -> Any:
    """Return a model in FP8 with random weights."""
    config = _configurations["CONFIGS"][kind]
    entries = AutoConfig.for_model(**config).to_diff_dict()
    entries["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    parsed = parse_config(config_class(entries["architectures"]), entries, Path("config.json"))
    model = build_model(parsed, torch.bfloat16, CPU, online_rules("fp8_per_channel"))
    model.load_weights(random_weights(model.expected_weights()))
    return model


def quantizing(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply as on a GPU: the input is rounded to FP8 with a scale for each row."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 448).clamp(min=torch.finfo(torch.float32).tiny)
    narrow = (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return apply(self, layer, (narrow.float() * scale).to(x.dtype), bias)


apply = EightBitMethod.apply


@pytest.mark.parametrize("kind", HANDED)
@torch.inference_mode()
def test_models_hand_rows_over(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's bits do not depend on it, and each layer that reads alone is given rows."""
    model, handed = model_of(kind), Counter()
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    multiply = linear.LinearBase._multiply

    def counting(self: Any, x: Any, bias: Any) -> torch.Tensor:
        handed[names[self]] += isinstance(x, QuantizedRows)
        return multiply(self, x, bias)

    monkeypatch.setattr(linear.LinearBase, "_multiply", counting)
    monkeypatch.setattr(EightBitMethod, "apply", quantizing)
    ids = torch.arange(1, 8)
    results = []
    for together in (False, True):
        monkeypatch.setattr(rows, "quantizes_inputs", lambda _, together=together: together)
        results.append(model.compute_logits(model(ids, torch.arange(7), None)))
        assert together or not handed.total()
    assert torch.equal(*results)
    assert results[0].isfinite().all()
    assert {name: count for name, count in handed.items() if count} == HANDED[kind]
