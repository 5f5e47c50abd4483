"""Qwen2-VL to Qwen3-VL keep the laws of loading, and compute for text what transformers does."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from vllm_module import ModelConfig, get_model
from vllm_module.build.model_source import read_config
from vllm_module.distributed import run_ranks
from vllm_module.models.qwen_vl import (
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)
from vllm_module.testing import LAWS, model_configs

TEXT = runpy.run_path(str(Path(__file__).with_name("configurations.py")))["config_of"]("")
TEXT |= {"head_dim": 16, "pad_token_id": None}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
IMAGES = {
    "depth": 1, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_heads": 2,
    "out_hidden_size": 64, "num_position_embeddings": 16, "patch_size": 4,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
# As in published files; for text alone the three positions of a token are the same number.
MROPE = {"type": "mrope", "mrope_section": [4, 2, 2]}
INTERLEAVED = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
ARCHITECTURES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2_vl": TEXT | {"rope_scaling": MROPE, "rope_theta": 100.0},
    "qwen2_5_vl": TEXT | {"rope_scaling": MROPE, "use_sliding_window": True, "sliding_window": 8}
    | {"max_window_layers": 1},
    "qwen3_vl": TEXT | {"rope_scaling": INTERLEAVED, "rope_theta": 100.0, "attention_bias": True},
    "qwen3_vl_moe": TEXT | EXPERTS | {"rope_scaling": INTERLEAVED, "rope_theta": 100.0},
}  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
def test_qwen2_vl_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Qwen2VLForConditionalGeneration, model_configs("Qwen2VLForConditionalGeneration"))


@pytest.mark.parametrize("law", LAWS)
def test_qwen3_vl_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Qwen3VLForConditionalGeneration, model_configs("Qwen3VLForConditionalGeneration"))


@pytest.mark.parametrize("law", LAWS)
def test_qwen3_vl_moe_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Qwen3VLMoeForConditionalGeneration, model_configs("Qwen3VLMoeForConditionalGeneration"))


def write(kind: str, folder: Path, *, tied: bool = False) -> Any:
    """Write a checkpoint as it is published; return transformers' model of its values."""
    text = {name: value for name, value in KINDS[kind].items() if name != "model_type"}
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=IMAGES, tie_word_embeddings=tied
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = AutoModelForImageTextToText.from_config(config).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(folder)
    entries = json.loads((folder / "config.json").read_text())
    entries["text_config"] |= KINDS[kind] | {"model_type": entries["text_config"]["model_type"]}
    entries["text_config"].pop("rope_parameters", None)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if kind == "qwen3_vl_moe":
        # Published files have inputs first; transformers reads both orders, by their shapes.
        packed = [name for name in tensors if "experts." in name]
        tensors |= {name: tensors[name].mT.contiguous() for name in packed}
    if kind.startswith("qwen2"):  # the names and entries of files that transformers 4 wrote
        tensors = {
            name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): t
            for name, t in tensors.items()
        }
        entries |= entries.pop("text_config") | {"model_type": kind, "tie_word_embeddings": tied}
    save_file(tensors, file, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(entries))
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_model_of_a_file_with_images(kind: str, tied: bool, tmp_path: Path) -> None:
    """Logits are transformers' of the whole model; what is for images is skipped, with a reason."""
    theirs, ids = write(kind, tmp_path, tied=tied), torch.arange(20)
    with torch.no_grad():
        expected = theirs(input_ids=ids[None]).logits[0]

    def rank_fn(rank: int) -> torch.Tensor:
        model = get_model(model_config=ModelConfig(model=str(tmp_path), dtype="float32"))
        assert model.load_report is not None
        skipped = {name.removeprefix("model.") for name in model.load_report.skipped}
        skipped -= {"lm_head.weight"} if tied else set()
        assert {name.partition(".")[0] for name in skipped} == {"visual"}
        with torch.no_grad():
            return model.compute_logits(model(ids, ids))

    for size in (1, 2):
        for logits in run_ranks(size, rank_fn):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_that_a_file_leaves_out(kind: str, tmp_path: Path) -> None:
    """They are those of transformers' class of this model, and not of Qwen2's or Qwen3's."""
    given = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    theirs = AutoConfig.for_model(kind)
    text = theirs.text_config.to_dict()
    entries = {name: text[name] for name in (*given, "intermediate_size")}
    kinds = {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(kinds | {"text_config": entries}))
    ours = read_config(tmp_path, ModelConfig(model=""))
    compared = {
        "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "hidden_act", "head_dim",
        "attention_bias", "use_sliding_window", "max_window_layers", "num_experts",
        "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
    }  # fmt: skip
    names = compared & text.keys() & type(ours).model_fields.keys()
    assert len(names) > 4
    for name in sorted(names):
        assert getattr(ours, name) == text[name], name
    assert ours.rope_theta == text["rope_parameters"]["rope_theta"]
