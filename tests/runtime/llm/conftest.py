"""A small Qwen3 of transformers, its checkpoint with a tokenizer, and an ``LLM`` of it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM

# Pytest's importlib mode has no imports between test files.
ASKING: Any = runpy.run_path(str(Path(__file__).with_name("asking.py")))
write_tokenizer, SMALL = (ASKING[name] for name in ("write_tokenizer", "SMALL"))


@pytest.fixture(scope="session")
def theirs() -> Any:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=130,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=128,
        eos_token_id=129,
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        scale = 1.0 if "norm" in name else 0.5 if "embed" in name or "head" in name else 0.15
        parameter.data.normal_(0, scale, generator=generator)
    return model.eval()


@pytest.fixture(scope="session")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(folder, **SMALL) as llm:
        yield llm
