"""What compressed-tensors and transformers read of a converted checkpoint."""

from __future__ import annotations

import re
import runpy
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationConfig as Schema
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from vllm_module import ModelConfig, QuantizationConfig, get_model
from vllm_module.export.compressed import convert
from vllm_module.quantization import QuantizableLayer

# Pytest's importlib mode has no imports between test files.
CONVERTING: Any = runpy.run_path(str(Path(__file__).with_name("converting.py")))
stored, entries, converted = (CONVERTING[name] for name in ("stored", "entries", "converted"))


@pytest.mark.parametrize("case", ["tied, per tensor", "per channel", "per block"])
def test_transformers_reads_the_same_numbers(
    converted: Callable[[str], tuple[Path, Path]], case: str
) -> None:
    """transformers, with compressed-tensors, dequantizes each weight to weight times scale."""
    _, folder = converted(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            quantization_config=CompressedTensorsConfig(dequantize=True),
        )
    tensors, schemes = stored(folder), 0
    held = dict(theirs.named_parameters())
    for name, tensor in tensors.items():
        if f"{name}_scale" in tensors:
            scale, (rows, columns) = tensors[f"{name}_scale"], tensor.shape
            wide = scale.view(-1, 1) if scale.dim() < 2 else scale
            for dim, size in enumerate((rows, columns)):
                wide = wide.repeat_interleave(-(-size // wide.shape[dim]), dim)
            tensor, schemes = tensor.float() * wide[:rows, :columns], schemes + 1
        if not name.endswith("_scale"):
            assert torch.equal(held[name].float(), tensor.float()), name
    assert schemes


def test_int8_is_what_compressed_tensors_decompresses(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The layout is int-quantized; the library's product of weights and scales is ours."""
    original, scheme = checkpoint("llama"), "int8_per_channel_weight_only"
    convert(ModelConfig(model=str(original), quantization=scheme), tmp_path / "out")
    config = Schema.model_validate(entries(tmp_path / "out")["quantization_config"])
    assert str(config.format) == "int-quantized"
    group = config.config_groups["group_0"]
    assert group.input_activations is None
    online = get_model(model_config=ModelConfig(model=str(original), quantization=scheme))
    tensors = stored(tmp_path / "out")
    for layer in ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        module = online.get_submodule(f"model.layers.1.{layer}")
        assert isinstance(module, QuantizableLayer)
        whole = module.weight.float() * module.get_parameter("weight_scale")
        parent = f"model.layers.1.{layer.split('.')[0]}"
        names = [f"{parent}.{slot}" for slot in module.shard_names] or [f"model.layers.1.{layer}"]
        parts = [
            {key: tensors[f"{name}.{key}"] for key in ("weight", "weight_scale")} for name in names
        ]
        theirs = [IntQuantizationCompressor.decompress(part, group)["weight"] for part in parts]
        assert torch.equal(torch.cat(theirs).float(), whole)


def test_four_bits_are_what_compressed_tensors_decompresses(
    converted: Callable[[str], tuple[Path, Path]],
) -> None:
    """The layout is pack-quantized; the library makes our codes times scales of its words."""
    original, folder = converted("four bits")
    config = Schema.model_validate(entries(folder)["quantization_config"])
    assert str(config.format) == "pack-quantized"
    tensors, checked = stored(folder), 0
    source = stored(original)
    for name in tensors:
        if name.endswith(".weight_packed"):
            layer = name.removesuffix(".weight_packed")
            keys = "weight_packed", "weight_scale", "weight_shape"
            part = {key: tensors[f"{layer}.{key}"] for key in keys}
            group = config.config_groups["group_0"]
            wide = PackedQuantizationCompressor.decompress(part, group)["weight"].float()
            full, scale = source[f"{layer}.weight"].float(), part["weight_scale"]
            codes = (full.view(*scale.shape, -1) / scale.unsqueeze(-1)).round().clamp(-8, 7)
            assert torch.equal(wide, (codes * scale.unsqueeze(-1)).view_as(wide)), layer
            checked += 1
    assert checked == 14


def test_rows_stay_where_the_original_has_them(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Of layers whose rows are stored in another order than they are computed in, too."""
    original, scheme = checkpoint("qwen3-next"), "int8_per_channel_weight_only"
    convert(ModelConfig(model=str(original), quantization=scheme), tmp_path / "out")
    config = Schema.model_validate(entries(tmp_path / "out")["quantization_config"])
    tensors, before = stored(tmp_path / "out"), stored(original)
    names = [name.removesuffix("_scale") for name in tensors if name.endswith("weight_scale")]
    assert {"in_proj_qkvz", "in_proj_ba"} <= {name.split(".")[-2] for name in names}
    for name in names:
        part = {"weight": tensors[name], "weight_scale": tensors[f"{name}_scale"]}
        group = config.config_groups["group_0"]
        wide = IntQuantizationCompressor.decompress(part, group)["weight"]
        far = (wide.float() - before[name].float()).abs() - part["weight_scale"] / 2
        assert far.max() < 1e-6, name


def test_experts_have_names_of_their_own_and_the_library_reads_them(
    converted: Callable[[str], tuple[Path, Path]],
) -> None:
    """Each projection of each expert is one tensor with one scale; the router is not quantized."""
    _, folder = converted("experts")
    tensors, config = stored(folder), entries(folder)
    schema = Schema.model_validate(config["quantization_config"])
    first = next(name for name in tensors if name.endswith("experts.0.gate_proj.weight"))
    prefix = first.removesuffix("0.gate_proj.weight")
    for expert in range(get_model(model_config=ModelConfig(model=str(folder))).config.num_experts):
        for slot in ("gate_proj", "up_proj", "down_proj"):
            part = {
                key: tensors[f"{prefix}{expert}.{slot}.{key}"] for key in ("weight", "weight_scale")
            }
            assert part["weight"].dtype == torch.float8_e4m3fn
            assert part["weight_scale"].shape == (1,)
            wide = FloatQuantizationCompressor.decompress(part, schema.config_groups["group_0"])
            product = part["weight"].float() * part["weight_scale"]
            assert torch.equal(wide["weight"].float(), product)
    router = prefix.replace("experts.", "gate")
    assert tensors[f"{router}.weight"].dtype == torch.bfloat16
    assert router in config["quantization_config"]["ignore"]


@pytest.mark.parametrize(
    ("scheme", "strategy"), [("fp8_per_channel", "group"), ("fp8_per_block", "token")]
)
def test_only_layers_with_blocks_decide_on_scales_of_inputs(
    checkpoint: Callable[..., Path], tmp_path: Path, scheme: Any, strategy: str
) -> None:
    """A block ends with the 96 inputs of down_proj, and not with the 64 of the other layers."""
    overrides: Any = {r"re:.*\.down_proj": "fp8_per_block"} if strategy == "group" else {}
    asked = QuantizationConfig(scheme=scheme, overrides=overrides, weight_block_size=(8, 24))
    convert(ModelConfig(model=str(checkpoint("qwen2")), quantization=asked), tmp_path / "out")
    schema = Schema.model_validate(entries(tmp_path / "out")["quantization_config"])
    (group,) = [each for each in schema.config_groups.values() if each.weights.block_structure]
    assert group.input_activations.strategy == strategy


@pytest.mark.parametrize("block", [(2, 8), (8, 2)])
def test_inputs_have_a_scale_for_each_block_of_a_row(
    checkpoint: Callable[..., Path], tmp_path: Path, block: tuple[int, int]
) -> None:
    """The groups of inputs are as long as the blocks of weights that they are multiplied by."""
    asked = QuantizationConfig(scheme="fp8_per_block", weight_block_size=block)
    convert(ModelConfig(model=str(checkpoint("qwen2")), quantization=asked), tmp_path / "out")
    schema = Schema.model_validate(entries(tmp_path / "out")["quantization_config"])
    (group,) = schema.config_groups.values()
    assert tuple(group.weights.block_structure) == block
    tensors = stored(tmp_path / "out")
    scales = {name: each for name, each in tensors.items() if name.endswith(".weight_scale")}
    for name, scale in scales.items():
        inputs = tensors[name.removesuffix("_scale")].shape[1]
        assert inputs == group.input_activations.group_size * scale.shape[1]
    assert scales


def test_inputs_that_end_inside_a_block_have_a_scale_for_each_token(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """compressed-tensors computes the logits; it does not divide 64 inputs into groups of 40."""
    original = checkpoint("qwen2")
    asked = QuantizationConfig(scheme="fp8_per_block", weight_block_size=(2, 40))
    convert(ModelConfig(model=str(original), quantization=asked), tmp_path / "out")
    ids = torch.arange(3, 48, 5)[None]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        theirs, full = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
            for folder in (tmp_path / "out", original)
        )
    assert (theirs - full).norm() < 0.3 * full.norm()


@pytest.mark.parametrize("scheme", ["fp8", "fp8_per_channel"])
def test_slots_that_a_checkpoint_stores_as_one_are_written_apart(
    checkpoint: Callable[..., Path], tmp_path: Path, scheme: str
) -> None:
    """The files are those of a checkpoint that stores each slot: the rows are the same."""
    original = checkpoint("llama")
    fused, tensors = tmp_path / "fused", stored(original)
    for layer in range(entries(original)["num_hidden_layers"]):
        for whole, names in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            above = f"model.layers.{layer}.{whole.partition('.')[0]}"
            parts = [tensors.pop(f"{above}.{each}_proj.weight") for each in names]
            tensors[f"model.layers.{layer}.{whole}_proj.weight"] = torch.cat(parts)
    fused.mkdir()
    save_file(tensors, fused / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(original / name, fused)
    for each, out in ((original, "apart"), (fused, "out")):
        convert(ModelConfig(model=str(each), quantization=scheme), tmp_path / out)
    expected, found = stored(tmp_path / "apart"), stored(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor.float()), name


@pytest.mark.parametrize(
    ("scheme", "ignored", "is_read"),
    [
        ("fp8_per_tensor", "lm_head", True),
        ("fp8_per_channel", "lm_head", True),
        ("fp8_per_block", "lm_head", False),
        ("int8_per_channel_weight_only", "lm_head", False),
        ("int4_per_group", "lm_head", True),
        ("int4_per_group", "experts", False),
    ],
)
def test_what_transformers_reads_of_experts(
    checkpoint: Callable[..., Path], tmp_path: Path, scheme: Any, ignored: str, is_read: bool
) -> None:
    """It computes our logits or refuses the folder, as docs/checkpoints.md says."""
    sizes: Any = {"group_size": 8, "weight_block_size": (4, 4)}
    asked = QuantizationConfig(scheme=scheme, ignore=("lm_head", ignored), **sizes)
    folder, ids = tmp_path / "out", torch.arange(3, 48, 5)
    convert(ModelConfig(model=str(checkpoint("mixtral")), quantization=asked), folder)
    how: Any = {"dtype": torch.float32, "output_loading_info": True}
    how["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if not is_read:
            with pytest.raises(RuntimeError, match="conversion of the weights"):
                AutoModelForCausalLM.from_pretrained(folder, **how)
            return
        theirs, report = AutoModelForCausalLM.from_pretrained(folder, **how)
        wanted = theirs(ids[None]).logits[0]
        ours: Any = get_model(model_config=ModelConfig(model=str(folder), dtype="float32"))
        logits = ours.compute_logits(ours(ids, torch.arange(len(ids))))
    assert not report["missing_keys"]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("scheme", "ignored"),
    [("int8_per_channel_weight_only", "lm_head"), ("int4_per_group", "experts")],
)
def test_where_transformers_has_random_experts(
    checkpoint: Callable[..., Path], tmp_path: Path, scheme: Any, ignored: str
) -> None:
    """It reports those of Nemotron-H as missing, as docs/checkpoints.md says."""
    asked = QuantizationConfig(scheme=scheme, ignore=("lm_head", ignored), group_size=8)
    folder = tmp_path / "out"
    convert(ModelConfig(model=str(checkpoint("nemotron-h")), quantization=asked), folder)
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **how)
    missing = {name.rpartition(".mixer.")[2] for name in report["missing_keys"]}
    assert missing == {"experts.up_proj", "experts.down_proj"}
    kept = {re.sub(r"\d+", "*", name.rpartition(".mixer.")[2]) for name in stored(folder)}
    assert {f"experts.*.{each}_proj.weight" for each in ("up", "down")} <= kept


@pytest.mark.parametrize(
    ("scheme", "joined"),
    [("fp8_per_channel", False), ("int4_per_group", False), ("int4_per_group", True)],
)
def test_where_transformers_refuses_convolutions_apart(
    checkpoint: Callable[..., Path], tmp_path: Path, scheme: Any, joined: bool
) -> None:
    """It does not join those of OLMo Hybrid beside packed weights, as docs/checkpoints.md says."""
    asked = QuantizationConfig(scheme=scheme, group_size=8)
    convert(ModelConfig(model=str(checkpoint("olmo-hybrid")), quantization=asked), tmp_path / "out")
    tensors = stored(tmp_path / "out")
    for name in [name for name in tensors if "q_conv1d" in name and joined]:
        apart = [tensors.pop(name.replace("q_", f"{part}_")) for part in "qkv"]
        tensors[name.replace("q_", "")] = torch.cat(apart)
    save_file(tensors, tmp_path / "out/model.safetensors", {"format": "pt"})
    how: Any = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    refused = pytest.raises(RuntimeError, match="automatic conversion of the weights")
    with (
        warnings.catch_warnings(),
        refused if scheme[:3] == "int" and not joined else nullcontext(),
    ):
        warnings.simplefilter("ignore")
        _, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", output_loading_info=True, **how
        )
        assert not report["missing_keys"]
