"""Files in another format than config.json says are refused by name, and nothing runs."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.config import QuantizationConfig
from vllm_module.errors import MisshapenWeightError, UnsupportedModelError, WeightLoadError
from vllm_module.quantization import ONLINE

Tensors = dict[str, torch.Tensor]

_refusing = runpy.run_path(str(Path(__file__).with_name("refusing.py")))
ADVICE = _refusing["ADVICE"]
ATTENTION = _refusing["ATTENTION"]
MLP = _refusing["MLP"]
refuse = _refusing["refuse"]
refuse_weights = _refusing["refuse_weights"]
scaled = _refusing["scaled"]


def in_full_precision(full_precision: Any, layer: str) -> Callable[[Tensors], None]:
    """Return an edit that replaces layers of a checkpoint by full precision, without scales."""

    def edit(tensors: Tensors) -> None:
        tensors[f"{layer}.weight"] = full_precision.tensors[f"{layer}.weight"]
        for scale in ("weight_scale", "weight_scale_inv", "input_scale"):
            tensors.pop(f"{layer}.{scale}", None)

    return edit


@pytest.mark.parametrize("layer", [f"{ATTENTION}.k_proj", f"{MLP}.gate_proj", f"{MLP}.down_proj"])
@pytest.mark.parametrize("layout", ["fp8-block", "ct-tensor-static", "ct-channel-dynamic"])
def test_a_layer_in_full_precision_in_the_file(
    published: Any, full_precision: Any, edited: Any, layout: str, layer: str
) -> None:
    """A full-precision layer that config.json calls quantized is refused: weight and scale."""
    broken = edited(published(layout), in_full_precision(full_precision, layer))
    message = refuse_weights(broken, WeightLoadError)
    assert f"{layer}.weight: expected dtype torch.float8_e4m3fn" in message
    assert f"{layer}.weight_scale" in message
    assert "got torch.float32" in message
    assert ADVICE in message


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("layout", "where"),
    [
        ("fp8-block", "modules_to_not_convert"),
        ("vllm-tensor-static", "ignored_layers"),
        ("ct-channel-dynamic", "ignore"),
    ],
)
@pytest.mark.parametrize("slot", [f"{ATTENTION}.k_proj", f"{MLP}.gate_proj"])
def test_a_slot_in_full_precision_in_the_configuration(
    published: Any, edited: Any, layout: str, where: str, slot: str, size: int
) -> None:
    """A fused layer is refused if config.json quantizes only some slots; each slot is listed."""
    broken = edited(published(layout), **{where: ["lm_head", slot]})
    message = refuse(broken, UnsupportedModelError, size=size)
    fused = f"{ATTENTION}.qkv_proj" if "self_attn" in slot else f"{MLP}.gate_up_proj"
    assert message.startswith(f"{fused} fuses layers that are not quantized alike")
    assert f"{slot}: not quantized" in message
    assert "Quantize all of them in one way or none" in message


def test_slots_in_two_schemes(published: Any, edited: Any) -> None:
    """A fused layer whose slots have different schemes is refused, with both schemes."""
    source = published("ct-channel-dynamic")
    config = json.loads((source.folder / "config.json").read_text())["quantization_config"]
    other = json.loads(json.dumps(config["config_groups"]["group_0"]))
    other["targets"] = ["re:.*v_proj"]
    other["weights"]["strategy"] = "tensor"
    config["config_groups"]["group_1"] = other
    message = refuse(edited(source, quantization=config), UnsupportedModelError)
    assert message.startswith(f"{ATTENTION}.qkv_proj fuses layers that are not quantized alike")
    assert f"{ATTENTION}.v_proj: float8_e4m3fn per tensor" in message
    assert f"{ATTENTION}.q_proj: float8_e4m3fn per channel" in message


# What config.json says and what is stored: the layout of the files, then that of config.json
MISMATCHES = {
    "per tensor, stored per channel": ("ct-channel-dynamic", "ct-tensor-dynamic"),
    "per channel, stored per tensor": ("ct-tensor-dynamic", "ct-channel-dynamic"),
    "per channel, stored in blocks": ("ct-block", "ct-channel-dynamic"),
    "in blocks, stored per channel": ("ct-channel-dynamic", "ct-block"),
    "in blocks, stored in others": ("fp8-block-skipped", "fp8-block"),
    "static, stored dynamic": ("ct-channel-dynamic", "ct-channel-static"),
    "dynamic, stored static": ("ct-channel-static", "ct-channel-dynamic"),
    "without the head, stored with it": ("ct-channel-head-too", "ct-channel-dynamic"),
    "with the head, stored without it": ("ct-channel-dynamic", "ct-channel-head-too"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_checkpoint_in_another_scheme(published: Any, edited: Any, case: str) -> None:
    """Files in another scheme than config.json says are refused before a byte is read."""
    files, other = (published(layout) for layout in MISMATCHES[case])
    config = json.loads((other.folder / "config.json").read_text())["quantization_config"]
    message = refuse_weights(edited(files, quantization=config), WeightLoadError)
    assert "_scale" in message
    assert "Nothing was written to the model" in message
    assert ADVICE in message


def test_a_quantized_file_that_config_json_does_not_mention(published: Any, edited: Any) -> None:
    """FP8 weights without a configuration are refused, and so are their scales."""
    broken = edited(published("fp8-block"), quantization=None)
    message = refuse_weights(broken, WeightLoadError)
    assert "self_attn.k_proj.weight: expected dtype torch.float32" in message
    assert "self_attn.k_proj.weight_scale_inv" in message
    for scheme in ONLINE:
        asked = QuantizationConfig(scheme=scheme, weight_block_size=(16, 32))
        assert "got torch.float8_e4m3fn" in refuse_weights(broken, WeightLoadError, asked)


def test_full_precision_that_config_json_calls_quantized(
    published: Any, full_precision: Any, edited: Any
) -> None:
    """Full precision with an FP8 configuration is refused: only a request quantizes it."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    message = refuse_weights(edited(full_precision, quantization=config), WeightLoadError)
    assert "expected dtype torch.float8_e4m3fn" in message
    assert "self_attn.k_proj.weight_scale" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e5m2])
def test_another_8_bit_dtype(published: Any, edited: Any, dtype: torch.dtype) -> None:
    """Another 8-bit dtype is refused by name and not read as FP8."""
    name = f"{MLP}.down_proj.weight"
    broken = edited(published("ct-channel-dynamic"), scaled(name, lambda t: t.view(dtype)))
    message = refuse_weights(broken, MisshapenWeightError)
    assert f"{name}: expected dtype torch.float8_e4m3fn" in message
    assert f"got {dtype}" in message
