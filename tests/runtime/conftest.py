"""A small model whose weights give clear differences between logits, and a tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import vLLMModule
from vllm_module.build.model_source import build_model
from vllm_module.hf_config import HFConfig

CONFIG = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def model() -> vLLMModule:
    """Build a Qwen3 and load it with large random weights."""
    config = AutoConfig.for_model("qwen3", architectures=["Qwen3ForCausalLM"], **CONFIG)
    theirs = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in theirs.named_parameters():
        scale = 1.0 if "norm" in name else 0.5 if "embed" in name or "head" in name else 0.15
        parameter.data.normal_(0, scale, generator=generator)
    ours = build_model(HFConfig(**config.to_dict()), torch.float32, torch.device("cpu"))
    ours.load_weights(theirs.state_dict())
    return ours.eval()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama of one layer, without a tokenizer, which no test changes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=60, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("checkpoint")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path
