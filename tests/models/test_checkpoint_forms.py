"""Forms in which a checkpoint may come, beside those of the laws: they compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module import ModelConfig, get_model, vLLMModule
from vllm_module.distributed import run_ranks
from vllm_module.errors import DuplicateWeightError

Tensors = dict[str, torch.Tensor]
Copy = Callable[..., Path]

FILE = "model.safetensors"


@pytest.fixture
def copied(tmp_path: Path) -> Copy:
    """Copy a checkpoint into one file, its tensors and configuration edited."""

    def copy(
        folder: Path,
        tensors: Callable[[Tensors], Tensors] = lambda tensors: tensors,
        config: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config,
    ) -> Path:
        stored: Tensors = {}
        for file in folder.glob("*.safetensors"):
            stored |= load_file(file)
        save_file(tensors(stored), tmp_path / FILE)
        entries = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config(entries)))
        return tmp_path

    return copy


def load(folder: Path, **entries: Any) -> vLLMModule:
    return get_model(model_config=ModelConfig(model=str(folder), **entries))


def as_transformers_4_wrote_it(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    spelling = "rope_type" if kind == "llama3" else "type"
    config["rope_scaling"] = None if kind == "default" else {spelling: kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = 6  # the older Qwen2's files have one and do not use it
    if config.get("head_dim", 0) * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
    return config


def test_configurations_of_transformers_4(checkpoint: Any, compute: Any, copied: Copy) -> None:
    """A configuration in transformers 4's keys computes what transformers does with its own."""
    old = copied(checkpoint.folder, config=as_transformers_4_wrote_it)
    checkpoint.reference.check(compute(old, *checkpoint.reference.job))


def test_stored_rotary_frequencies_are_skipped(tiny: Any, compute: Any, copied: Copy) -> None:
    """Frequencies that old files store are skipped by the rotary module's rule, not used."""
    checkpoint = tiny("llama-llama3")
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]
    folder = copied(checkpoint.folder, lambda t: t | {name: torch.randn(8) for name in names})
    checkpoint.reference.check(compute(folder, *checkpoint.reference.job))
    report = load(folder).load_report
    assert report is not None
    rule = "rotary frequencies are computed from the configuration"
    assert report.skipped == dict.fromkeys(names, rule)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("row", [0, -1])
def test_a_tied_table_with_two_values_is_refused(
    tiny: Any, copied: Copy, row: int, size: int
) -> None:
    """A tied head that is stored with other values is refused, and both tensors are named."""

    def store(tensors: Tensors) -> Tensors:
        head = tensors["model.embed_tokens.weight"].clone()
        head[row, 0] += 1
        return tensors | {"lm_head.weight": head}

    folder = copied(tiny("qwen2").folder, store)
    with pytest.raises(DuplicateWeightError, match="values differ") as refused:
        run_ranks(size, lambda rank: load(folder))
    assert "lm_head.weight" in str(refused.value)
    assert "model.embed_tokens.weight" in str(refused.value)


@pytest.fixture(params=["bfloat16", "float16"])
def narrow(request: pytest.FixtureRequest, tiny: Any, copied: Copy) -> tuple[Path, torch.dtype]:
    """A checkpoint stored in 16 bits, and its dtype."""
    dtype = getattr(torch, request.param)
    folder = copied(
        tiny("llama-yarn-tied-biases-one-kv-head").folder,
        lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()},
        lambda config: config | {"dtype": request.param},
    )
    return folder, dtype


@pytest.mark.parametrize("size", [1, 2])
def test_sixteen_bits_on_disk_and_float32_in_memory(
    narrow: tuple[Path, torch.dtype], refer: Any, compute: Any, size: int
) -> None:
    """A 16-bit checkpoint loaded as float32 computes what transformers computes in float32."""
    folder, _ = narrow
    reference = refer(folder)
    assert reference.is_robust
    for computed in run_ranks(size, lambda rank: compute(folder, *reference.job, "float32")):
        reference.check(computed)


@pytest.mark.parametrize("size", [1, 2])
def test_sixteen_bits_in_memory(
    narrow: tuple[Path, torch.dtype], refer: Any, compute: Any, size: int
) -> None:
    """A 16-bit checkpoint keeps dtype and bits, and is as near to float32 as transformers is."""
    folder, dtype = narrow
    exact, theirs = refer(folder), refer(folder, dtype)

    def error(prompt_logits: list[torch.Tensor]) -> torch.Tensor:
        difference = torch.cat(prompt_logits).float() - torch.cat(exact.prompt_logits)
        return difference.square().mean().sqrt()

    for computed in run_ranks(size, lambda rank: compute(folder, exact.prompts, 1)):
        assert computed["prompt_logits"][0].dtype == dtype
        assert error(computed["prompt_logits"]) < 1.25 * error(theirs.prompt_logits)
    stored = load_file(folder / FILE)
    model = load(folder)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert torch.equal(model.model.norm.weight, stored["model.norm.weight"])
    assert torch.equal(model.model.embed_tokens.weight[:130], stored["model.embed_tokens.weight"])
