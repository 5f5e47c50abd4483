"""Which files are weights, by their names: those that trainers, the hub and vLLM write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_module.weights.formats import FORMATS, Files, formats_of
from vllm_module.weights.hub import is_small, patterns_of

# transformers' Trainer, accelerate, DeepSpeed and Lightning write these beside the weights.
STATES = (
    "training_args.bin", "optimizer.bin", "optimizer_0.bin", "optimizer.pt", "scheduler.bin",
    "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pt", "consolidated.00.pt",
    "sampler.bin", "sampler_1.bin", "dl_state_dict.bin", "meta.pt",
)  # fmt: skip


def files(name: str, *present: str) -> list[str]:
    found = FORMATS[name]
    assert isinstance(found, Files)
    return [path.name for path in found.files(map(Path, present))]


def test_states_of_a_trainer_are_no_weights() -> None:
    """Each alone is nothing, and beside weights it is left out; a name inside a word counts not."""
    for state in STATES:
        assert files("pt", state) == []
    weights = ["pytorch_model_fsdp.bin", "my_optimizer.bin", "x-scheduler.bin", "meta.pt.bin"]
    assert files("pt", *STATES, *weights) == weights
    others = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors"]
    others += ["model-rank-0-part-0.safetensors", "model-rank-12-part-3.safetensors"]
    weights = ["model-00001-of-00002.safetensors", "model-rank.safetensors", "a.safetensors"]
    weights += ["not-consolidated.safetensors", "model-rank-x-part-0.safetensors"]
    for other in others:
        assert files("safetensors", other) == []
    assert files("safetensors", *others, *weights) == weights
    # All files with the first suffix that the folder has; .pt counts where no .bin is kept.
    assert files("pt", "a.pt", "b.bin", "c.bin", "d.safetensors") == ["b.bin", "c.bin"]
    assert files("pt", "a.pt", "optimizer.bin") == ["a.pt"]
    assert files("pt", "a.bin.part", "a.BIN", "bin") == []


def test_formats_are_looked_for_in_one_order() -> None:
    """A folder with several has the first of them."""
    order = ["sharded_state", "safetensors", "pt", "npcache", "gguf", "mistral", "dcp"]
    assert list(FORMATS) == order
    assert formats_of("auto") == formats_of("layered") == order
    for name in order:
        assert formats_of(name) == [name]
    with pytest.raises(ValueError, match="load_format 'dummy' has no files to open"):
        formats_of("dummy")
    with pytest.raises(ValueError, match="load_format 'npz' is unknown"):
        formats_of("npz")


@pytest.mark.parametrize(
    ("load_format", "patterns"),
    [
        ("auto", [("*.safetensors",), ("*.bin",), ("*.pt",)]),
        ("safetensors", [("*.safetensors",)]),
        ("pt", [("*.bin",), ("*.pt",)]),
        ("npcache", [("*.bin",), ("*.pt",)]),
        ("gguf", [("*.gguf",)]),
        ("mistral", [("consolidated*",)]),
        ("dcp", [(".metadata", "*.distcp")]),
        ("sharded_state", [("model-rank-*",)]),
    ],
)
def test_what_the_hub_is_asked_for(load_format: str, patterns: list[Any]) -> None:
    """In the order in which a folder is searched; files of one tuple belong together."""
    assert patterns_of(load_format) == patterns


@pytest.mark.parametrize(
    ("name", "small"),
    [
        *[(name, True) for name in (
            "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "x.model",
            "merges.txt", "chat_template.jinja", "model.safetensors.index.json", "params.json",
            "tokenizer_config.json", "1_Pooling/config.json", "tokenizer.bin.json",
            "additional_chat_templates/tool_use.jinja",
        )],
        *[(name, False) for name in (
            "model.safetensors", "m.gguf", "m.bin", "README.md", "x.py", "onnx/config.json",
            "original/params.json", "consolidated.json", "training_args.json", "optimizer.json",
            "scheduler_config.json", "scaler.json", "rng_state.json", "image.png",
            "checkpoints/config.json", "notes/a.txt", "slates/tokenizer.bin",
        )],
    ],
)  # fmt: skip
def test_small_files_of_a_repository(name: str, small: bool) -> None:
    """Settings and tokenizers; folders of other programs, and what trainers write, are left out."""
    assert is_small(name) is small
