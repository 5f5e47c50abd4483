"""An adapter of another base is refused by name, where names or digests tell."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from vllm_module import LLM, ModelConfig
from vllm_module.adapters import adapter_config
from vllm_module.adapters import check_base as check_base_of
from vllm_module.build.model_source import ModelSource
from vllm_module.cli import main
from vllm_module.errors import UnsupportedModelError, WeightLoadError
from vllm_module.export.merged import merge
from vllm_module.weights.digests import DIGESTS, digest_of_all, digests_file

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def check_base(config: Any, source: ModelSource) -> None:
    check_base_of(config, source.source.folder, source.config)


def of_the_hub(one: Any, folder: Path, name: str, **entries: Any) -> Path:
    """Copy the base to where the hub's cache has the model of this name."""
    found = folder / f"models--{name.replace('/', '--')}" / "snapshots" / "a1b2"
    shutil.copytree(one.base, found)
    config = json.loads((found / "config.json").read_text()) | entries
    (found / "config.json").write_text(json.dumps(config))
    return found


# What is served, what the adapter was made for, and whether they are known to differ.
NAMES: list[tuple[str, Any, bool]] = [
    ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", False),
    ("Qwen/Qwen3-8B", "qwen/qwen3-8b", False),
    ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", True),
    ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B", True),
    ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", True),
    ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B", True),
    ("Qwen/Qwen3-8B", "unsloth/Qwen3-8B-unsloth-bnb-4bit", False),
    ("RedHatAI/Qwen3-8B-quantized.w4a16", "Qwen/Qwen3-8B", False),
    ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B-AWQ", False),
    ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct", False),
    ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B", True),
    ("org/model--two", "org/model--two", False),
    ("org/model--two", "org/model", True),
    ("Qwen/Qwen3-8B", None, False),
    ("Qwen/Qwen3-8B", "", False),
    ("Qwen/Qwen3-8B", "/data/mine", False),
    ("Qwen/Qwen3-8B", "./out/checkpoint-3/", False),
    ("Qwen/Qwen3-8B", "/c/models--Qwen--Qwen3-8B-Base/snapshots/77", True),
    ("Qwen/Qwen3-8B", "/c/models--Qwen--Qwen3-8B/snapshots/77", False),
    ("Qwen/Qwen3-8B", "gpt2", False),
    ("Qwen/Qwen3-8B", "./base", False),
    ("Qwen/Qwen3-8B", "../models", False),
    ("meta-llama/Meta-Llama-3-8B", "unsloth/llama-3-8b-bnb-4bit", False),
    ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct", False),
    ("tiiuae/falcon-7b", "ybelkada/falcon-7b-sharded-bf16", False),
    ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.3", True),
]


@pytest.mark.parametrize(("served", "made_for", "differ"), NAMES)
def test_names(
    tuned: Callable[[str], Any], tmp_path: Path, served: str, made_for: Any, differ: bool
) -> None:
    config = adapter_config(PLAIN | {"base_model_name_or_path": made_for}, "file")
    one = tuned("llama")
    source = ModelSource.find(ModelConfig(model=str(of_the_hub(one, tmp_path, served))))
    if differ:
        with pytest.raises(UnsupportedModelError, match=rf"made for .*the model is {served}: "):
            check_base(config, source)
    else:
        check_base(config, source)
    check_base(config, ModelSource.find(ModelConfig(model=str(one.base))))  # of no known name


def test_a_model_that_says_what_it_was_made_of(tuned: Callable[[str], Any], tmp_path: Path) -> None:
    """Its own adapters and those of that model are loaded."""
    folder = of_the_hub(tuned("llama"), tmp_path, "me/tuned", _name_or_path="Qwen/Qwen3-8B")
    source = ModelSource.find(ModelConfig(model=str(folder)))
    for name in ("me/tuned", "Qwen/Qwen3-8B"):
        check_base(adapter_config(PLAIN | {"base_model_name_or_path": name}, "file"), source)
    other = adapter_config(PLAIN | {"base_model_name_or_path": "Qwen/Qwen3-4B"}, "file")
    with pytest.raises(UnsupportedModelError, match="made for Qwen/Qwen3-4B"):
        check_base(other, source)


def test_every_way_in(
    tuned: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sibling's adapter of the same shape is refused by an engine, the commands and a merge."""
    one = tuned("llama")
    base, adapter = of_the_hub(one, tmp_path, "org/sibling"), tmp_path / "adapter"
    shutil.copytree(one.adapter, adapter)
    entries = json.loads((adapter / "adapter_config.json").read_text())
    entries["base_model_name_or_path"] = "org/model"
    (adapter / "adapter_config.json").write_text(json.dumps(entries))
    said = "made for org/model, and the model is org/sibling"
    llm = LLM(str(base), device="cpu", dtype="float32", kv_cache_memory_bytes=2**22)
    with pytest.raises(UnsupportedModelError, match=said):
        llm.load_adapter("a", adapter)
    assert llm.list_adapters() == []
    with pytest.raises(UnsupportedModelError, match=said):
        merge(ModelConfig(model=str(base)), adapter, tmp_path / "out")
    for command in ("plan", "load"):
        assert main([command, str(base), "--adapter", str(adapter)]) == 1
        assert said in " ".join(capsys.readouterr().err.split())
    del entries["base_model_name_or_path"]
    (adapter / "adapter_config.json").write_text(json.dumps(entries))
    llm.load_adapter("a", adapter)


def test_a_digest_of_the_base(
    tuned: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that an adapter has is compared with that of digests.json, whatever the names are."""
    folder = of_the_hub(tuned("llama"), tmp_path, "org/model")
    assert main(["digest", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    settings = {"base_model_name_or_path": "org/other", "base_digest": "0" * 32}
    right = settings | {"base_digest": printed["digest"]}
    source = ModelSource.find(ModelConfig(model=str(folder)))
    with pytest.raises(UnsupportedModelError, match=r"no digests\.json of a whole checkpoint"):
        check_base(adapter_config(PLAIN | right, "file"), source)
    out = str(folder / "digests.json")
    assert main(["digest", str(folder), "--out", out]) == 0
    check_base(adapter_config(PLAIN | right, "file"), source)
    with pytest.raises(UnsupportedModelError, match=r"the digest '0{32}', and the one in .* has"):
        check_base(adapter_config(PLAIN | settings, "file"), source)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, folder / "model.safetensors")
    assert main(["digest", str(folder)]) == 1
    assert main(["digest", str(folder), "--out", out]) == 0
    with pytest.raises(UnsupportedModelError, match="the adapter was made for a model with"):
        check_base(adapter_config(PLAIN | right, "file"), source)


def test_only_the_digests_of_one_whole_checkpoint_tell(tmp_path: Path) -> None:
    """Ranks of a sharded state have parts of tensors: whichever has the digest tells nothing."""
    one, other = {"a.weight": "1" * 32}, {"b.weight": "2" * 32}
    for parts in ([one], [one, other], [other, one], [one, one], [one, {}], [{}, one]):
        (tmp_path / DIGESTS).write_text(json.dumps(digests_file(parts)))
        settings = PLAIN | {"base_digest": digest_of_all(one.items())}
        if parts == [one]:
            check_base_of(adapter_config(settings, "file"), tmp_path, None)
            continue
        with pytest.raises(UnsupportedModelError, match=r"no digests\.json of a whole checkpoint"):
            check_base_of(adapter_config(settings, "file"), tmp_path, None)


def test_a_refusal_by_shapes_says_what_the_adapter_was_made_for(
    tuned: Callable[[str], Any], tmp_path: Path
) -> None:
    """A folder's name tells nothing beforehand, and another size of the model is a likely cause."""
    one, adapter = tuned("llama"), tmp_path / "adapter"
    shutil.copytree(one.adapter, adapter)
    entries = json.loads((adapter / "adapter_config.json").read_text())
    entries["base_model_name_or_path"] = "org/larger"
    (adapter / "adapter_config.json").write_text(json.dumps(entries))
    weights = load_file(adapter / "adapter_model.safetensors")
    wider = {n: w.repeat(1, 2) if "lora_A" in n else w for n, w in weights.items()}
    save_file(wider, adapter / "adapter_model.safetensors")
    with LLM(str(one.base), device="cpu", dtype="float32", kv_cache_memory_bytes=2**22) as llm:
        said = "The adapter was made for org/larger: is this that model"
        with pytest.raises(WeightLoadError, match=said):
            llm.load_adapter("a", adapter)
