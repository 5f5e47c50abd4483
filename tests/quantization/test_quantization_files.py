"""What says how a checkpoint is quantized, and in which file, for each tool that writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import ModelConfig, get_model
from vllm_module.build.model_source import ModelSource
from vllm_module.distributed import run_ranks
from vllm_module.errors import MissingWeightError, UnsupportedModelError, WeightLoadError
from vllm_module.hf_config import read_entries
from vllm_module.quantization import EightBitMethod, UnquantizedMethod, rules_for
from vllm_module.testing.checkpoints import assert_same_state, state

SCALE = "model.layers.1.mlp.up_proj.weight_scale"
FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
# As ModelOpt writes them: beside config.json, in it, and in it as vLLM's exporter did.
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "hf_quant_config.json": (
        "hf_quant_config.json",
        {
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": FP8 | {"exclude_modules": ["lm_head"]},
        },
    ),
    "config.json": (
        "config.json",
        {
            "quant_method": "modelopt",
            "producer": {"name": "modelopt", "version": "0.39.0"},
            "quant_algo": "FP8",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "ignore": ["lm_head"],
        },
    ),
    "nested": (
        "config.json",
        {"quant_method": "modelopt", "quantization": FP8 | {"exclude_modules": ["lm_head"]}},
    ),
}


@pytest.fixture
def modelopt(published: Any, edited: Any) -> Callable[..., Path]:
    """Return a function that writes compressed-tensors' checkpoint as ModelOpt does."""

    def write(place: str, change: Callable[[dict[str, torch.Tensor]], object] = len) -> Path:
        def rename(tensors: dict[str, torch.Tensor]) -> None:
            for name in [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]:
                prefix, _, scale = name.rpartition(".")
                tensors[f"{prefix}.{scale[0]}_proj.{scale}"] = tensors.pop(name).view(())
            change(tensors)

        file, entries = PLACES[place]
        folder: Path = edited(published("ct-kv-cache"), rename, None).folder
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        if file == "config.json":
            config["quantization_config"] = entries
        else:
            (folder / file).write_text(json.dumps(entries))
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def loaded(folder: Path) -> Any:
    return get_model(model_config=ModelConfig(model=str(folder)))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_fp8_of_modelopt_is_static_fp8_per_tensor(
    published: Any, modelopt: Any, place: str, size: int
) -> None:
    """Weights, scales, logits and the scales of the cache are those of compressed-tensors."""
    theirs, folder = published("ct-kv-cache"), modelopt(place)
    ids = theirs.ids

    def both(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = loaded(theirs.folder), loaded(folder)
        assert_same_state(state(other), state(one), "of ModelOpt")
        assert other.model.layers[0].self_attn.attn.k_scale is not None
        positions = torch.arange(len(ids))
        with torch.inference_mode():
            return one(ids, positions), other(ids, positions)

    for one, other in run_ranks(size, both):
        assert torch.equal(one, other)


@pytest.mark.parametrize("size", [1, 2])
def test_older_names_of_compressed_tensors(published: Any, edited: Any, size: int) -> None:
    """The configuration was ``compression_config``, and scales of a cache outputs of layers."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]:
            prefix, _, scale = name.rpartition(".")
            tensors[f"{prefix}.{scale[0]}_proj.output_scale"] = tensors.pop(name)

    theirs = published("ct-kv-cache")
    folder: Path = edited(theirs, rename, None).folder
    config = json.loads((theirs.folder / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    del config["compression_config"]["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    for one, other in run_ranks(size, lambda _: (loaded(theirs.folder), loaded(folder))):
        assert_same_state(state(other), state(one), "under older names")
        assert 0 < other.model.layers[0].self_attn.attn.k_scale.item() != 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.input_scale"),
            MissingWeightError,
            r"up_proj\.input_scale",
        ),
        (
            lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.k_scale"),
            MissingWeightError,
            r"layers\.1\.self_attn\.attn\.k_scale \(k_proj\.k_scale in the checkpoint\) is missing",
        ),
        (
            lambda tensors: tensors.update({SCALE: torch.tensor(torch.nan)}),
            WeightLoadError,
            r"up_proj\.weight_scale|weight_scale .slot 'up_proj'",
        ),
    ],
)
def test_a_damaged_checkpoint_of_modelopt_is_refused(
    modelopt: Any, change: Any, error: type[Exception], message: str
) -> None:
    """What is missing or no number is named as the checkpoint calls it."""
    with pytest.raises(error, match=message):
        loaded(modelopt("config.json", change))


@pytest.mark.parametrize("place", PLACES)
def test_scales_of_a_cache_that_was_not_calibrated_are_one(modelopt: Any, place: str) -> None:
    """ModelOpt exports none then, and vLLM takes 1."""

    def without(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]:
            del tensors[name]

    for layer in loaded(modelopt(place, without)).model.layers:
        assert (layer.self_attn.attn.k_scale.item(), layer.self_attn.attn.v_scale.item()) == (1, 1)


@pytest.mark.parametrize(
    "entries",
    [
        {"kv_cache_quant_algo": "NVFP4"},
        {"kv_cache_scheme": {"num_bits": 4, "type": "float", "dynamic": False}},
        {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        {"kv_cache_scheme": "FP8"},
    ],
    ids=str,
)
def test_a_cache_of_modelopt_that_is_not_fp8_is_refused(entries: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="kv_cache_"):
        rules_for(None, {"quant_method": "modelopt", "quant_algo": "FP8", **entries})


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["self_attn.qkv_proj"]},
        {"quant_method": "fp8", "modules_to_not_convert": ["self_attn.qkv_proj"]},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel",
                    },
                }
            },
            "ignore": ["self_attn.qkv_proj"],
        },
    ],
    ids=lambda stored: stored["quant_method"],
)  # fmt: skip
def test_a_fused_layer_that_is_left_out_by_its_own_name(stored: dict[str, Any]) -> None:
    """A checkpoint may store the slots of a layer as one tensor, and name that."""
    rules = rules_for(None, stored)
    assert rules.rule_of("self_attn.q_proj", "self_attn.qkv_proj")[1] is None
    assert rules.rule_of("self_attn.qkv_proj.other", "")[1] is None or "compressed" in str(stored)
    assert rules.rule_of("self_attn.o_proj", "")[1] is not None
    assert rules.rule_of("self_attn.qkv_proj2", "")[1] is not None


def test_names_that_modelopt_leaves_out_may_have_stars() -> None:
    """A star stands for any part of a name, as in Python's fnmatch; the rest is in FP8."""
    ignored = ["lm_head", "model.layers.0*", "*.mlp.gate"]
    rules = rules_for(None, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ignored})
    assert rules is not None
    for name, quantized in (
        ("model.layers.0.mlp.up_proj", False),
        ("model.layers.10.mlp.up_proj", True),
        ("model.layers.3.mlp.gate", False),
        ("model.layers.3.mlp.gate_proj", True),
        ("lm_head", False),
    ):
        assert (rules.rule_of(name)[1] is not None) == quantized, name
    assert rules.kv_scales is None


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A8_AWQ", "MIXED_PRECISION", "W4A16_AWQ"])
def test_other_algorithms_of_modelopt_are_refused(algorithm: str) -> None:
    """The message has what came, and what is read."""
    with pytest.raises(UnsupportedModelError, match=f"quant_algo .*expected FP8.* got {algorithm}"):
        rules_for(None, {"quant_method": "modelopt", "quant_algo": algorithm})


@pytest.mark.parametrize(
    ("file", "quantization", "old"),
    [
        (
            "quantize_config.json",
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
            {
                "bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": True,
                "true_sequential": True, "model_name_or_path": None,
            },
        ),
        (
            "quant_config.json",
            {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
            {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
        ),
    ],
)  # fmt: skip
def test_files_beside_the_configuration_say_the_same(
    tmp_path: Path, file: str, quantization: dict[str, Any], old: dict[str, Any]
) -> None:
    """What AutoGPTQ and AutoAWQ wrote first is read as the entry that they write now."""
    (tmp_path / file).write_text(json.dumps(old))
    for absent in ({}, {"quantization_config": None}):
        entries = {"architectures": ["LlamaForCausalLM"], **absent}
        (tmp_path / "config.json").write_text(json.dumps(entries))
        given = read_entries(tmp_path, {})["quantization_config"]
        found, expected = rules_for(None, given), rules_for(None, quantization)
        assert found == expected
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"now": 1}}))
    assert read_entries(tmp_path, {})["quantization_config"] == {"now": 1}  # which goes before


@pytest.mark.parametrize(
    ("entries", "by"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, "by MLX"),
        ({"quantization_config": {"group_size": 64, "bits": 4}}, "by MLX"),
        ({"quantization_config": {"quant_method": "torchao"}}, "'torchao'"),
        ({"quantization_config": {"quant_method": "quark"}}, "'quark' .AMD Quark"),
        ({"quantization_config": {"quant_method": "exl3"}}, "ExLlamaV3"),
        ({"quantization_config": {"quant_method": "hqq"}}, "HQQ"),
        ({"quantization_config": {"quant_method": "later"}}, "'later'"),
        ({"quantization_config": {"bits": 4}}, "has no quant_method"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, entries: dict[str, Any], by: str) -> None:
    """The message has the tool, what to do, and the methods that are read."""
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(UnsupportedModelError, match=f"{by}.*compressed-tensors.*full precision"):
        rules_for(None, read_entries(tmp_path, {})["quantization_config"])


def test_only_what_is_named_is_left_in_full_precision(modelopt: Any) -> None:
    """The head is not quantized, whatever the file lists, and every other product is."""
    model = loaded(modelopt("hf_quant_config.json"))
    assert isinstance(model.lm_head.quant_method, UnquantizedMethod)
    assert isinstance(model.model.layers[0].mlp.down_proj.quant_method, EightBitMethod)


_WRONG = {
    "hf_quant_config.json": {"quantization": {"quant_algo": "FP9"}},
    "quantize_config.json": {"bits": 4, "group_size": "many"},
    "quant_config.json": {"w_bit": "four", "q_group_size": 128},
}


@pytest.mark.parametrize("name", _WRONG)
def test_a_wrong_entry_is_told_of_the_file_that_has_it(tmp_path: Path, name: str) -> None:
    """The same entries in config.json, or asked for, are told of no other file."""
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / name).write_text(json.dumps(_WRONG[name]))
    said = f"{tmp_path / name} has these entries, not config.json"

    def refusal(**settings: Any) -> str:
        with pytest.raises(WeightLoadError) as refused:
            ModelSource.find(ModelConfig(model=str(tmp_path), **settings))
        return str(refused.value)

    assert refusal().endswith(said)
    stored = read_entries(tmp_path, {})["quantization_config"]
    assert said not in refusal(hf_overrides={"quantization_config": stored})
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    assert said not in refusal()
