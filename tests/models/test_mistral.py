"""Mistral keeps the laws of loading, and has heads of the size that its file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import ModelConfig, get_model
from vllm_module.errors import CheckpointFormatError
from vllm_module.models.llama import MistralForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_mistral_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(MistralForCausalLM, model_configs("MistralForCausalLM"))


@pytest.mark.parametrize(
    ("hidden", "heads", "size"), [(6, 8, 4), (7, 8, 2), (8, 8, 2), (9, 8, 4), (30, 4, 16)]
)
@torch.inference_mode()
def test_heads_need_not_share_the_hidden_size(
    tmp_path: Path, hidden: int, heads: int, size: int
) -> None:
    """With a size in the file, as transformers; without, fewer features than heads are refused."""
    config = AutoConfig.for_model(
        "mistral", hidden_size=hidden, num_attention_heads=heads, head_dim=size, vocab_size=20,
        num_key_value_heads=2, intermediate_size=12, num_hidden_layers=1,
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.normal_(0, 0.5, generator=generator)
    theirs.save_pretrained(tmp_path)
    ours = get_model(model_config=ModelConfig(model=str(tmp_path)))
    ids = torch.arange(9)
    expected = theirs(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(ours.compute_logits(ours(ids, ids)), expected, rtol=0, atol=1e-4)
    if hidden < heads:
        entries = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(entries | {"head_dim": None}))
        with pytest.raises(CheckpointFormatError, match=rf"{hidden} is less than num_.* {heads}, "):
            get_model(model_config=ModelConfig(model=str(tmp_path)))
