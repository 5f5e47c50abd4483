"""Qwen3.5 keeps the laws of loading, and loads from files of text and images."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from vllm_module import ModelConfig, get_model
from vllm_module.build.model_source import read_config
from vllm_module.errors import CheckpointFormatError
from vllm_module.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from vllm_module.testing import LAWS, model_configs

CASES = runpy.run_path(str(Path(__file__).with_name("configurations.py")))
IMAGES = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip
# As in published files; for text alone the three positions of a token are the same number.
ROPE = {
    "rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1], "mrope_interleaved": True,
}  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
def test_qwen3_5_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Qwen3_5ForCausalLM, model_configs("Qwen3_5ForCausalLM"))


@pytest.mark.parametrize("law", LAWS)
def test_qwen3_5moe_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Qwen3_5MoeForCausalLM, model_configs("Qwen3_5MoeForCausalLM"))


@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_model_says_whether_its_head_is_tied(tied: bool, tmp_path: Path) -> None:
    """As in transformers, whatever the entries of its text model say."""
    text = CASES["CONFIGS"]["qwen3.5"] | {"tie_word_embeddings": not tied}
    config = AutoConfig.for_model(
        "qwen3_5", text_config=text, vision_config=IMAGES, tie_word_embeddings=tied
    )
    theirs = AutoModelForImageTextToText.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    model = get_model(model_config=ModelConfig(model=str(tmp_path), dtype="float32"))
    ids = torch.arange(9)
    with torch.no_grad():
        logits = model.compute_logits(model(ids, ids))
        torch.testing.assert_close(logits, theirs(input_ids=ids[None]).logits[0])


YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "overrides", [{"text_config": {"rope_parameters": YARN}}, {"rope_parameters": YARN}]
)
def test_overrides_reach_the_entries_of_the_text_model(
    overrides: dict[str, Any], tmp_path: Path
) -> None:
    """The first is how the model cards have it; the other entries of the text model stay."""
    text = CASES["CONFIGS"]["qwen3.5"] | {"rope_parameters": YARN}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=IMAGES)
    theirs = AutoModelForImageTextToText.from_config(config).eval()
    config.text_config.rope_parameters = ROPE
    theirs.save_pretrained(tmp_path)
    settings = ModelConfig(model=str(tmp_path), dtype="float32", hf_overrides=overrides)
    model, ids = get_model(model_config=settings), torch.arange(20)
    with torch.no_grad():
        logits = model.compute_logits(model(ids, ids))
        torch.testing.assert_close(logits, theirs(input_ids=ids[None]).logits[0])


@pytest.mark.parametrize(("kind", "name"), [("qwen3_5", "qwen3.5"), ("qwen3_5_moe", "qwen3.5-moe")])
def test_the_text_model_of_a_file_with_images(kind: str, name: str, tmp_path: Path) -> None:
    """Logits are transformers' of the whole model; what is for images is skipped, with a reason."""
    text = CASES["CONFIGS"][name] | {"rope_parameters": ROPE}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=IMAGES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = AutoModelForImageTextToText.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    model = get_model(model_config=ModelConfig(model=str(tmp_path), dtype="float32"))
    ids = torch.arange(20)
    with torch.no_grad():
        logits = model.compute_logits(model(ids, ids))
        torch.testing.assert_close(logits, theirs(input_ids=ids[None]).logits[0])
    assert model.load_report is not None
    skipped = {name.split(".")[1] for name in model.load_report.skipped}
    assert skipped == {"visual"}


@pytest.mark.parametrize(
    ("entry", "value"),
    [("norm_topk_prob", False), ("decoder_sparse_step", 2), ("mlp_only_layers", [0])],
)
def test_what_transformers_ignores_is_refused(tmp_path: Path, entry: str, value: Any) -> None:
    """Qwen3-Next has these entries; with experts, Qwen3.5 computes as if they were not there."""
    entries = AutoConfig.for_model(**CASES["CONFIGS"]["qwen3.5-moe"]).to_dict()
    entries |= {"architectures": ["Qwen3_5MoeForCausalLM"], entry: value}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointFormatError, match=entry):
        read_config(tmp_path, ModelConfig(model=""))
    del entries[entry]
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert read_config(tmp_path, ModelConfig(model="")).num_experts == 6
