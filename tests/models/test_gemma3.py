"""Gemma3 keeps the laws of loading, and loads from files of text and images."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from vllm_module import ModelConfig, get_model
from vllm_module.build.model_source import read_config
from vllm_module.models.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from vllm_module.testing import LAWS, model_configs

TEXT = runpy.run_path(str(Path(__file__).with_name("configurations.py")))["CONFIGS"]["gemma3"]
IMAGES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
def test_gemma3_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Gemma3ForCausalLM, model_configs("Gemma3ForCausalLM"))


@pytest.mark.parametrize("law", LAWS)
def test_gemma3_of_text_and_images_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Gemma3ForConditionalGeneration, model_configs("Gemma3ForConditionalGeneration"))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_text_model_of_a_file_with_images(prefix: str, tied: bool, tmp_path: Path) -> None:
    """By the names of either version of transformers, logits are those of its whole model."""
    text = {name: value for name, value in TEXT.items() if name != "model_type"}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=IMAGES, tie_word_embeddings=tied
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = AutoModelForImageTextToText.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        for stored in ("language_model.model.", "model.language_model."):
            if name.startswith(stored):
                name = prefix + name.removeprefix(stored)
                break
        tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert sum(name.startswith(prefix) for name in tensors) > 20
    model, ids = get_model(model_config=ModelConfig(model=str(tmp_path))), torch.arange(20)
    assert isinstance(model, Gemma3ForConditionalGeneration)
    with torch.no_grad():
        logits = model.compute_logits(model(ids, ids))
        torch.testing.assert_close(logits, theirs(input_ids=ids[None]).logits[0])
    assert model.load_report is not None
    skipped = {name.removeprefix("model.").partition(".")[0] for name in model.load_report.skipped}
    assert skipped - {"lm_head"} == {"vision_tower", "multi_modal_projector"}


def test_entries_that_published_files_leave_out(tmp_path: Path) -> None:
    """They are those of transformers' class."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"model_type": "gemma3_text", "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    entries = {"model_type": "gemma3", "text_config": text}
    kind = {"architectures": ["Gemma3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(entries | kind))
    ours = read_config(tmp_path, ModelConfig(model=""))
    theirs = AutoConfig.from_pretrained(tmp_path).text_config
    for name in (
        "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
        "query_pre_attn_scalar", "sliding_window", "max_position_embeddings", "tie_word_embeddings",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
