"""Checkpoints that store the halves of each head in turns, as llama.cpp and Mistral do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module import ModelConfig, get_model
from vllm_module.distributed import run_ranks
from vllm_module.errors import UnexpectedWeightError, UnsupportedModelError

WITHIN = 1e-4  # as in conftest.py


def in_turns(source: Path, folder: Path) -> Path:
    """Copy a checkpoint whose rows of q and k are stored in turns, with the entry that says so."""
    config = json.loads((source / "config.json").read_text())
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    stored = {}
    for file in source.glob("*.safetensors"):
        stored |= load_file(file)
    tensors = {}
    moved = 0
    for name, tensor in stored.items():
        if ".q_proj." in name or ".k_proj." in name:
            # Row 2 i is that of the first half, row 2 i + 1 that of the second.
            halves = tensor.unflatten(0, (-1, 2, head // 2))
            turned = halves.transpose(1, 2).flatten(0, 2).contiguous()
            tensors[name.replace("_proj.", "_proj_pairs.")] = turned
            moved += 1
        else:
            tensors[name] = tensor
    assert moved == config["num_hidden_layers"] * (4 if config.get("attention_bias") else 2)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "stored_rotary_pairs": True}))
    return folder


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama-tied-biases", "mistral"])
def test_heads_that_are_stored_in_turns_compute_the_same(
    tiny: Any, tmp_path: Path, name: str, size: int
) -> None:
    """With the entry, the logits are those of the checkpoint in Hugging Face's order."""
    checkpoint = tiny(name)
    folder = in_turns(checkpoint.folder, tmp_path)
    prompt = max(checkpoint.reference.prompts, key=len)
    expected = max(checkpoint.reference.prompt_logits, key=len)

    def work(rank: int) -> torch.Tensor:
        model = get_model(model_config=ModelConfig(model=str(folder)))
        with torch.inference_mode():
            hidden = model(torch.tensor(prompt), torch.arange(len(prompt)))
            logits: torch.Tensor = model.compute_logits(hidden)
        return logits

    for logits in run_ranks(size, work):
        torch.testing.assert_close(logits, expected, rtol=0, atol=WITHIN)


def test_a_model_that_cannot_read_them_refuses(tiny: Any, tmp_path: Path) -> None:
    """A model with an attention of its own refuses the entry and does not ignore it."""
    folder = in_turns(tiny("qwen3").folder, tmp_path)
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM does not read heads whose"):
        get_model(model_config=ModelConfig(model=str(folder)))


def test_the_name_says_the_order(tiny: Any, tmp_path: Path) -> None:
    """A tensor of q in Hugging Face's order is refused where rows are expected in turns."""
    checkpoint = tiny("mistral")
    model = get_model(model_config=ModelConfig(model=str(in_turns(checkpoint.folder, tmp_path))))
    name = "model.layers.0.self_attn.q_proj.weight"
    theirs = min(checkpoint.folder.glob("*.safetensors"))  # the first part has this layer
    with pytest.raises(UnexpectedWeightError, match=r"q_proj_pairs"):
        model.update_weights({name: load_file(theirs)[name]})
