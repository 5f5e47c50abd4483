"""Invalid requests of the user and invalid entries of config.json are refused by name."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import ModelConfig
from vllm_module.config import QuantizationConfig
from vllm_module.errors import (
    ShardingError,
    UnsupportedModelError,
    WeightLoadError,
)
from vllm_module.quantization import ONLINE

Tensors = dict[str, torch.Tensor]

_refusing = runpy.run_path(str(Path(__file__).with_name("refusing.py")))
FP8 = _refusing["FP8"]
refuse = _refusing["refuse"]

# Requests of the user


@pytest.mark.parametrize(
    ("layout", "asked"),
    [
        *(("fp8-block", name) for name in (*ONLINE, "compressed-tensors")),
        *(("ct-channel-dynamic", name) for name in (*ONLINE, "fp8")),
        ("fp8-block", QuantizationConfig(scheme="fp8_per_block", weight_block_size=(16, 32))),
    ],
)
def test_a_request_against_config_json(published: Any, layout: str, asked: Any) -> None:
    """``quantization`` other than the checkpoint's own method is refused, with both methods."""
    message = refuse(published(layout), UnsupportedModelError, asked)
    method = "fp8" if layout.startswith("fp8") else "compressed-tensors"
    assert repr(getattr(asked, "scheme", asked)) in message
    assert f"quantized already, by {method!r}" in message
    assert "leave it out, or take the checkpoint in full precision" in message


def test_compressed_tensors_for_full_precision(full_precision: Any) -> None:
    """A layout cannot be requested for full precision; the error lists the possible schemes."""
    message = refuse(full_precision, UnsupportedModelError, "compressed-tensors")
    assert "config.json has no quantization_config" in message
    assert all(name in message for name in ONLINE)


@pytest.mark.parametrize("name", ["fp4", "", "FP8", "hqq"])
def test_an_unknown_scheme(name: str) -> None:
    """The configuration refuses an unknown scheme and lists the known ones."""
    with pytest.raises(ValueError, match="fp8_per_tensor"):
        ModelConfig(model="m", quantization=name)
    with pytest.raises(ValueError, match="fp8_per_tensor"):
        QuantizationConfig(scheme=name)


@pytest.mark.parametrize("target", ["model.layers.7.mlp.down_proj", "re:.*experts.*", "k_prok"])
@pytest.mark.parametrize("where", ["ignore", "overrides"])
def test_a_target_that_is_nowhere(full_precision: Any, target: str, where: str) -> None:
    """A target of the user that matches no layer is refused by name."""
    entries: dict[str, Any] = {where: [target] if where == "ignore" else {target: "none"}}
    asked = QuantizationConfig(scheme="fp8_per_channel", **entries)
    message = refuse(full_precision, UnsupportedModelError, asked)
    assert f"{target!r} has no effect on Qwen3ForCausalLM" in message
    assert "name layers as the checkpoint does" in message


@pytest.mark.parametrize("where", ["ignore", "overrides"])
def test_a_target_that_is_not_an_expression(full_precision: Any, where: str) -> None:
    """An invalid regular expression of the user is refused with its error."""
    entries: dict[str, Any] = {where: ["re:*mlp"] if where == "ignore" else {"re:*mlp": "none"}}
    asked = QuantizationConfig(scheme="fp8_per_channel", **entries)
    message = refuse(full_precision, WeightLoadError, asked)
    assert "'re:*mlp' is not a valid regular expression: " in message
    assert "nothing to repeat" in message


@pytest.mark.parametrize("slot", ["k_proj", "gate_proj"])
def test_a_slot_with_another_scheme(full_precision: Any, slot: str) -> None:
    """Another scheme, or none, for one slot of a fused layer is refused."""
    for entries in ({"ignore": [slot]}, {"overrides": {slot: "fp8_per_tensor"}}):
        asked = QuantizationConfig(scheme="fp8_per_channel", **entries)  # type: ignore[arg-type]
        message = refuse(full_precision, UnsupportedModelError, asked)
        assert "fuses layers that are not quantized alike" in message
        assert f".{slot}: " in message


@pytest.mark.parametrize(
    ("asked", "size", "named"),
    [
        # The 128 rows of q_proj are one block, the 64 of k_proj half a block.
        ((128, 128), 1, ["self_attn.qkv_proj", "slot 'k_proj'", "64", "128"]),
        # Each of two ranks has 32 rows of k_proj, half a block.
        ((64, 16), 2, ["self_attn.qkv_proj", "slot 'k_proj'", "32", "64"]),
        # Each of two ranks has 64 columns of o_proj, half a block.
        ((16, 128), 2, ["self_attn.o_proj", "64", "128"]),
        ((48, 16), 1, ["self_attn.qkv_proj", "slot 'q_proj'", "128", "48"]),
    ],
)
def test_a_block_across_an_edge(
    full_precision: Any, asked: tuple[int, int], size: int, named: list[str]
) -> None:
    """A block across the edge of a slot or shard is refused, with layer and numbers."""
    config = QuantizationConfig(scheme="fp8_per_block", weight_block_size=asked)
    message = refuse(full_precision, ShardingError, config, size)
    assert all(text in message for text in (*named, "weight_block_size"))


def test_a_stored_block_across_an_edge(published: Any) -> None:
    """A stored block across the edge of a shard is refused, with advice on the size."""
    message = refuse(published("ct-block-uneven"), ShardingError, size=4)
    assert "scale block of 64" in message
    assert "tensor-parallel size" in message


# quantization_config


def ct(**weights: Any) -> dict[str, Any]:
    args = {"num_bits": 8, "type": "float", "strategy": "channel"} | weights
    return group({"targets": ["Linear"], "weights": args})


def group(entries: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": entries}}


_LINEAR = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
FP8_ARGS = {"num_bits": 8, "type": "float", "strategy": "tensor"}

INVALID: dict[str, tuple[Any, list[str]]] = {
    "list": ([{"quant_method": "fp8"}], ["must be an object"]),
    "text": ("fp8", ["must be an object"]),
    "number": (8, ["must be an object"]),
    "false": (False, ["must be an object"]),
    "empty": ({}, ["expected one of fp8, compressed-tensors"]),
    "method-null": ({"quant_method": None}, ["expected one of fp8, compressed-tensors"]),
    "method-hqq": ({"quant_method": "hqq"}, ["'hqq'", "expected one of fp8, compressed-tensors"]),
    "method-case": ({"quant_method": "FP8"}, ["'FP8'", "expected one of"]),
    "method-list": ({"quant_method": ["fp8"]}, ["fp8", "expected one of"]),
    "method-object": ({"quant_method": {"fp8": 1}}, ["fp8", "expected one of"]),
    "fp8-block-of-one": ({"quant_method": "fp8", "weight_block_size": [16]}, ["weight_block_size"]),
    "fp8-block-of-zero": (
        {"quant_method": "fp8", "weight_block_size": [0, 16]},
        ["weight_block_size"],
    ),
    "fp8-block-negative": (
        {"quant_method": "fp8", "weight_block_size": [16, -16]},
        ["weight_block_size"],
    ),
    "fp8-block-half": (
        {"quant_method": "fp8", "weight_block_size": [16.5, 16]},
        ["weight_block_size"],
    ),
    "fp8-block-text": ({"quant_method": "fp8", "weight_block_size": "128"}, ["weight_block_size"]),
    "fp8-block-huge": (
        {"quant_method": "fp8", "weight_block_size": [2**70, 16]},
        ["self_attn.qkv_proj"],
    ),
    "fp8-scheme": ({"quant_method": "fp8", "activation_scheme": "half"}, ["activation_scheme"]),
    "fp8-scheme-list": ({"quant_method": "fp8", "activation_scheme": []}, ["activation_scheme"]),
    "fp8-fmt": ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt"]),
    "fp8-skip-text": (
        {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
        ["modules_to_not_convert"],
    ),
    "fp8-skip-number": ({"quant_method": "fp8", "ignored_layers": [7]}, ["ignored_layers"]),
    "fp8-skip-expression": (
        {"quant_method": "fp8", "modules_to_not_convert": ["re:(mlp"]},
        ["'re:(mlp' is not a valid regular expression"],
    ),
    "fp8-static-block": (
        {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "static"},
        ["weight_block_size", "expected dynamic"],
    ),
    "ct-no-groups": ({"quant_method": "compressed-tensors"}, ["config_groups"]),
    "ct-groups-list": (
        {"quant_method": "compressed-tensors", "config_groups": []},
        ["config_groups"],
    ),
    "ct-group-number": (group(5), ["config_groups"]),
    "ct-group-preset-unknown": (
        {"quant_method": "compressed-tensors", "config_groups": {"W9A9": ["Linear"]}},
        ["W9A9"],
    ),
    "ct-group-preset-int4": (
        {"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}},
        ["config_groups.W4A16.format", "expected pack-quantized or int-quantized"],
    ),
    "ct-group-no-targets": (group({"weights": FP8_ARGS}), ["targets"]),
    "ct-group-no-weights": (
        group({"targets": ["Linear"]}),
        ["config_groups.group_0.weights", "expected symmetric FP8"],
    ),
    "ct-int8": (ct(type="int"), ["config_groups.group_0.format", "expected pack-quantized"]),
    "ct-4-bits": (ct(num_bits=4), ["config_groups.group_0.weights", "expected symmetric FP8"]),
    "ct-bits-text": (ct(num_bits="eight"), ["num_bits"]),
    "ct-bits-negative": (ct(num_bits=-8), ["num_bits"]),
    "ct-group-strategy": (
        ct(strategy="group", group_size=32),
        ["config_groups.group_0.weights", "channel or block"],
    ),
    "ct-strategy-unknown": (ct(strategy="diagonal"), ["strategy"]),
    "ct-asymmetric": (ct(symmetric=False), ["config_groups.group_0.weights", "symmetric"]),
    "ct-block-none": (ct(strategy="block"), ["block"]),
    "ct-block-zero": (ct(strategy="block", block_structure=[0, 16]), ["block_structure"]),
    "ct-block-of-three": (ct(strategy="block", block_structure=[1, 2, 3]), ["block_structure"]),
    "ct-inputs-int": (
        group(_LINEAR | {"input_activations": {"num_bits": 8, "type": "int"}}),
        ["config_groups.group_0.input_activations", "expected symmetric FP8"],
    ),
    "ct-inputs-by-channel": (
        group(_LINEAR | {"input_activations": FP8_ARGS | {"strategy": "channel"}}),
        ["channel"],
    ),
    "ct-outputs": (
        group(_LINEAR | {"output_activations": FP8_ARGS}),
        ["config_groups.group_0.output_activations", "expected none"],
    ),
    "ct-ignore-expression": (
        group(_LINEAR) | {"ignore": ["re:[mlp"]},
        ["'re:[mlp' is not a valid regular expression"],
    ),
    "ct-target-expression": (
        group(_LINEAR | {"targets": ["re:+"]}),
        ["'re:+' is not a valid regular expression"],
    ),
    "ct-ignore-text": (group(_LINEAR) | {"ignore": "lm_head"}, ["ignore"]),
    "ct-cache-text": (group(_LINEAR) | {"kv_cache_scheme": "fp8"}, ["kv_cache_scheme"]),
    "ct-cache-int": (
        group(_LINEAR) | {"kv_cache_scheme": {"num_bits": 8, "type": "int", "strategy": "tensor"}},
        ["kv_cache_scheme", "expected static FP8 per tensor"],
    ),
    "ct-cache-dynamic": (
        group(_LINEAR) | {"kv_cache_scheme": FP8_ARGS | {"dynamic": True}},
        ["kv_cache_scheme", "expected static FP8 per tensor"],
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning:compressed_tensors")
@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_configuration(published: Any, edited: Any, run: Any, case: str) -> None:
    """An invalid quantization_config is refused in one line that names the entry."""
    entries, named = INVALID[case]
    broken = edited(published("fp8-block"))
    path = broken.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": entries}))
    message = refuse(broken, WeightLoadError)
    assert all(text in message for text in named), message
    assert len(message) < 2000
