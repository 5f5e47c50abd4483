"""Checkpoint formats that the laws do not cover: other keys, extra tensors, other dtypes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module import ModelConfig, get_model, vLLMModule
from vllm_module.distributed import run_ranks
from vllm_module.errors import DuplicateWeightError

Tensors = dict[str, torch.Tensor]

FILE = "model.safetensors"


def copy(
    source: Path,
    target: Path,
    edit_tensors: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    edit_config: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config,
) -> Path:
    """Copy the checkpoint ``source`` to one file in ``target``, with its contents edited."""
    tensors: Tensors = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    save_file(edit_tensors(tensors), target / FILE)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(edit_config(config)))
    return target


def load(folder: Path, **entries: Any) -> vLLMModule:
    return get_model(model_config=ModelConfig(model=str(folder), **entries))


def to_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    config["torch_dtype"] = config.pop("dtype")
    newer = config["model_type"] in ("lfm3", "olmo_hybrid")  # of no transformers 4
    if newer or "rope_parameters" not in config:  # GPT-2 has learned positions
        return config
    rope = config.pop("rope_parameters")
    types = config.pop("layer_types", None)
    if config["model_type"] in ("cohere2", "gemma3_text"):
        config["sliding_window_pattern"] = types.index("full_attention") + 1
    if config["model_type"] == "granitemoehybrid":
        older = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [older[kind] for kind in types]
    if config["model_type"] == "lfm2":
        config["full_attn_idxs"] = [at for at, kind in enumerate(types) if kind != "conv"]
    if config["model_type"] == "lfm2_moe":
        config["layer_types"] = types
    if "linear_num_key_heads" in config:
        config["full_attention_interval"] = types.index("full_attention") + 1
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    spelling = "rope_type" if kind == "llama3" else "type"
    config["rope_scaling"] = None if kind == "default" else {spelling: kind, **rope}
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = 6  # older Qwen2 files have an unused window
    size = (config.get("head_dim") or 0) * config["num_attention_heads"]
    if size == config["hidden_size"] and "linear_num_key_heads" not in config:  # whose files say it
        del config["head_dim"]
    return config


def test_configurations_of_transformers_4(checkpoint: Any, compute: Any, tmp_path: Path) -> None:
    """A configuration with transformers 4's keys computes the same logits."""
    copy(checkpoint.folder, tmp_path, edit_config=to_transformers_4)
    reference = checkpoint.reference
    reference.check_prompts(compute(tmp_path, reference.prompts, 1))


def test_stored_rotary_frequencies_are_skipped(tiny: Any, compute: Any, tmp_path: Path) -> None:
    """Rotary frequencies that old files store are skipped by a named rule and not used."""
    checkpoint = tiny("llama-llama3")
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]
    copy(checkpoint.folder, tmp_path, lambda t: t | {name: torch.randn(8) for name in names})
    checkpoint.reference.check(compute(tmp_path, *checkpoint.reference.job))
    report = load(tmp_path).load_report
    assert report is not None
    rule = "rotary frequencies are computed from the configuration"
    assert report.skipped == dict.fromkeys(names, rule)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("row", [0, -1])
def test_a_tied_table_with_two_values_is_refused(
    tiny: Any, tmp_path: Path, row: int, size: int
) -> None:
    """A tied head stored with other values than the embedding is refused, and both are named."""

    def store_a_head(tensors: Tensors) -> Tensors:
        head = tensors["model.embed_tokens.weight"].clone()
        head[row, 0] += 1
        return tensors | {"lm_head.weight": head}

    copy(tiny("qwen2").folder, tmp_path, store_a_head)
    with pytest.raises(DuplicateWeightError, match="values differ") as refused:
        run_ranks(size, lambda rank: load(tmp_path))
    assert "lm_head.weight" in str(refused.value)
    assert "model.embed_tokens.weight" in str(refused.value)


class Narrow(NamedTuple):
    """A checkpoint stored in 16 bits, and what transformers computes with it."""

    folder: Path
    dtype: torch.dtype
    in_float32: Any
    in_dtype: Any


@pytest.fixture(scope="session", params=["bfloat16", "float16"])
def narrow(
    request: pytest.FixtureRequest,
    tiny: Any,
    refer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Narrow:
    """Return the checkpoint in each 16-bit dtype."""
    dtype = getattr(torch, request.param)
    folder = copy(
        tiny("llama-yarn-tied-biases-one-kv-head").folder,
        tmp_path_factory.mktemp(request.param),
        lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()},
        lambda config: config | {"dtype": request.param},
    )
    return Narrow(folder, dtype, refer(folder), refer(folder, dtype))


@pytest.mark.parametrize("size", [1, 2])
def test_sixteen_bits_on_disk_and_float32_in_memory(
    narrow: Narrow, compute: Any, size: int
) -> None:
    """A 16-bit checkpoint loaded as float32 computes what transformers computes in float32."""
    reference = narrow.in_float32
    assert reference.is_robust
    for computed in run_ranks(size, lambda rank: compute(narrow.folder, *reference.job, "float32")):
        reference.check(computed)


@pytest.mark.parametrize("size", [1, 2])
def test_sixteen_bits_in_memory(narrow: Narrow, compute: Any, size: int) -> None:
    """A 16-bit checkpoint keeps dtype and bits, and is as accurate as transformers."""
    exact = narrow.in_float32

    def error(prompt_logits: list[torch.Tensor]) -> torch.Tensor:
        difference = torch.cat(prompt_logits).float() - torch.cat(exact.prompt_logits)
        return difference.square().mean().sqrt()

    for computed in run_ranks(size, lambda rank: compute(narrow.folder, exact.prompts, 1)):
        assert computed["prompt_logits"][0].dtype == narrow.dtype
        assert error(computed["prompt_logits"]) < 1.25 * error(narrow.in_dtype.prompt_logits)
    stored = load_file(narrow.folder / FILE)
    model = load(narrow.folder)
    assert {p.dtype for p in model.parameters()} == {narrow.dtype}
    assert torch.equal(model.model.norm.weight, stored["model.norm.weight"])
    assert torch.equal(model.model.embed_tokens.weight[:130], stored["model.embed_tokens.weight"])
