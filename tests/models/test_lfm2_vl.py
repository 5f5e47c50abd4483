"""LFM2-VL keeps the laws of loading, and computes for text what transformers does."""

import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from vllm_module import ModelConfig, get_model
from vllm_module.models.lfm2_vl import Lfm2VlForConditionalGeneration
from vllm_module.testing import LAWS, model_configs

TEXT = runpy.run_path(str(Path(__file__).with_name("configurations.py")))["CONFIGS"]["lfm2"]
IMAGES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_patches": 4, "patch_size": 8,
}  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
def test_lfm2_vl_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Lfm2VlForConditionalGeneration, model_configs("Lfm2VlForConditionalGeneration"))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_text_model_of_a_file_with_images(tied: bool, tmp_path: Path) -> None:
    """Logits are those of transformers' whole model."""
    config = AutoConfig.for_model(
        "lfm2_vl",
        text_config=TEXT,
        vision_config=IMAGES,
        tie_word_embeddings=tied,
        projector_hidden_size=32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = AutoModelForImageTextToText.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    model, ids = get_model(model_config=ModelConfig(model=str(tmp_path))), torch.arange(20)
    assert isinstance(model, Lfm2VlForConditionalGeneration)
    with torch.no_grad():
        logits = model.compute_logits(model(ids, ids))
        torch.testing.assert_close(logits, theirs(input_ids=ids[None]).logits[0])
    assert model.load_report is not None
    skipped = {name.removeprefix("model.").partition(".")[0] for name in model.load_report.skipped}
    assert skipped - {"lm_head"} == {"vision_tower", "multi_modal_projector"}
