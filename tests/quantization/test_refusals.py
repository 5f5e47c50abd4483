"""Quantized checkpoints and demands that make no sense are refused by name, and nothing runs."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import LoadConfig, get_model
from vllm_module.config import QuantizationConfig
from vllm_module.errors import (
    MisshapenWeightError,
    MissingWeightError,
    ModelNotReadyError,
    UnsupportedModelError,
    WeightLoadError,
    WeightReadError,
)
from vllm_module.layers import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm_module.quantization import ONLINE, EightBitMethod, Scheme, quantize, rules_for

Tensors = dict[str, torch.Tensor]

_refusing = runpy.run_path(str(Path(__file__).with_name("refusing.py")))
ADVICE = _refusing["ADVICE"]
ATTENTION = _refusing["ATTENTION"]
FP8 = _refusing["FP8"]
LAYERS = _refusing["LAYERS"]
MLP = _refusing["MLP"]
ask = _refusing["ask"]
refuse = _refusing["refuse"]
refuse_weights = _refusing["refuse_weights"]
scaled = _refusing["scaled"]
first = _refusing["first"]

# Scales in the file


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scale", ["weight_scale", "input_scale"])
def test_a_scale_that_is_missing(published: Any, edited: Any, layer: str, scale: str) -> None:
    """A scale that the files lack is refused by its own name, with the shape expected."""
    source = published("ct-tensor-static")
    broken = edited(source, lambda tensors: tensors.pop(f"{layer}.{scale}"))
    message = refuse_weights(broken, MissingWeightError)
    assert f"{layer}.{scale}: expected shape [1]" in message
    assert ADVICE in message


@pytest.mark.parametrize("layer", [f"{ATTENTION}.k_proj", f"{MLP}.down_proj"])
def test_a_scale_that_is_there_by_two_names(published: Any, edited: Any, layer: str) -> None:
    """A scale stored by both of its spellings is refused, whatever the values."""

    def edit(tensors: Tensors) -> None:
        tensors[f"{layer}.weight_scale_inv"] = tensors[f"{layer}.weight_scale"].clone()

    message = refuse_weights(edited(published("ct-tensor-static"), edit), WeightLoadError)
    assert f"{layer}.weight_scale" in message
    assert ADVICE in message


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("layout", "scale"),
    [("ct-tensor-static", "weight_scale"), ("ct-tensor-static", "input_scale")],
)
def test_a_scale_that_is_no_scale(
    published: Any, edited: Any, layout: str, scale: str, layer: str, value: float
) -> None:
    """A scale that is negative, NaN or infinite is refused by layer and slot."""
    source = published(layout)
    broken = edited(source, scaled(f"{layer}.{scale}", first(value)))
    message = refuse_weights(broken, WeightReadError)
    assert_names(message, layer, scale)
    assert "must be finite and" in message


def assert_names(message: str, layer: str, attr: str) -> None:
    """Check that a message names a tensor by the layer that holds it, and the slot."""
    path, slot = LAYERS[layer]
    assert message.startswith((f"{path}.{attr}", f"{layer}.{attr}")), message
    assert not slot or f"{slot!r}" in message or f"{layer}.{attr}" in message, message


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("value", [-1e-30, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("layout", "scale"),
    [("ct-channel-dynamic", "weight_scale"), ("fp8-block", "weight_scale_inv")],
)
def test_one_scale_of_many(
    published: Any, edited: Any, layout: str, scale: str, value: float, place: int
) -> None:
    """One bad scale, wherever among those of channels or blocks, is refused, on whichever rank."""
    source = published(layout)

    def edit(tensors: Tensors) -> None:
        tensors[f"{MLP}.up_proj.{scale}"].view(-1)[place] = value

    broken = edited(source, edit)
    for size in (1, 2):
        message = refuse_weights(broken, WeightReadError, size=size)
        assert_names(message, f"{MLP}.up_proj", scale)
        assert "must be finite and not negative" in message


@pytest.mark.parametrize("layer", LAYERS)
def test_an_input_scale_of_zero(published: Any, edited: Any, layer: str) -> None:
    """An input scale of zero, by which inputs would be divided, is refused by layer and slot."""
    broken = edited(
        published("vllm-tensor-static"), scaled(f"{layer}.input_scale", torch.zeros_like)
    )
    message = refuse_weights(broken, WeightReadError)
    assert_names(message, layer, "input_scale")
    assert "must be finite and positive" in message


def test_a_weight_scale_of_zero_is_one(published: Any, edited: Any) -> None:
    """A weight scale of zero is no mistake: some publishers write it for rows of zeros."""
    source = published("ct-channel-dynamic")
    row = edited(source, scaled(f"{MLP}.up_proj.weight_scale", first(0.0)))
    assert get_model(model_config=ask(row)).load_report.ok


@pytest.mark.parametrize("scale", ["k_scale", "v_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), None])
def test_a_scale_of_the_cache(published: Any, edited: Any, scale: str, value: float | None) -> None:
    """A scale of the cache that is missing, zero, negative or not finite is refused by name."""
    name = f"{ATTENTION}.{scale}"

    def edit(tensors: Tensors) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name].fill_(value)

    broken = edited(published("ct-kv-cache"), edit)
    if value is None:
        message = refuse_weights(broken, MissingWeightError)
        assert f"{name}: expected shape [1]" in message
    else:
        message = refuse_weights(broken, WeightReadError)
        assert scale in message
        assert ATTENTION in message
        assert "must be finite and positive" in message


@pytest.mark.parametrize(
    ("layout", "layer", "scale", "shape"),
    [
        ("ct-tensor-static", f"{ATTENTION}.k_proj", "weight_scale", (2,)),
        ("ct-tensor-static", f"{ATTENTION}.k_proj", "weight_scale", (64, 1)),
        ("ct-tensor-static", f"{MLP}.down_proj", "input_scale", (128,)),
        ("ct-tensor-static", f"{MLP}.down_proj", "input_scale", (0,)),
        ("ct-channel-dynamic", f"{ATTENTION}.v_proj", "weight_scale", (1,)),
        ("ct-channel-dynamic", f"{ATTENTION}.v_proj", "weight_scale", ()),
        ("ct-channel-dynamic", f"{ATTENTION}.v_proj", "weight_scale", (1, 64)),
        ("ct-channel-dynamic", f"{MLP}.up_proj", "weight_scale", (128,)),
        ("fp8-block", f"{MLP}.up_proj", "weight_scale_inv", (2, 8)),
        ("fp8-block", f"{MLP}.up_proj", "weight_scale_inv", (7, 2)),
        ("fp8-block", f"{ATTENTION}.q_proj", "weight_scale_inv", ()),
        ("ct-block", f"{ATTENTION}.o_proj", "weight_scale", (4,)),
    ],
)
def test_a_scale_of_another_shape(
    published: Any, edited: Any, layout: str, layer: str, scale: str, shape: tuple[int, ...]
) -> None:
    """A scale of the wrong shape is refused by its own name, with both shapes, before any byte."""
    broken = edited(published(layout), scaled(f"{layer}.{scale}", lambda _: torch.ones(shape)))
    message = refuse_weights(broken, MisshapenWeightError)
    assert f"{layer}.{scale}: expected shape [" in message
    assert f"got {list(shape)}" in message
    assert "Nothing was written to the model" in message


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, FP8])
def test_a_scale_of_another_dtype(published: Any, edited: Any, dtype: torch.dtype) -> None:
    """A scale that is no wide float is refused by its own name, with both dtypes."""
    name = f"{ATTENTION}.k_proj.weight_scale"
    broken = edited(published("ct-tensor-static"), scaled(name, lambda t: t.to(dtype)))
    message = refuse_weights(broken, MisshapenWeightError)
    assert f"{name}: expected dtype torch.float32" in message
    assert f"got {dtype}" in message


@pytest.mark.parametrize("place", [0, 1717, -1])
@pytest.mark.parametrize("nan", [0x7F, 0xFF])
@pytest.mark.parametrize("layer", LAYERS)
def test_nan_in_an_fp8_weight(
    published: Any, edited: Any, layer: str, nan: int, place: int
) -> None:
    """NaN of either sign, anywhere in an FP8 weight, is refused by layer and slot."""

    def edit(tensors: Tensors) -> None:
        tensors[f"{layer}.weight"].view(torch.uint8).view(-1)[place] = nan

    message = refuse_weights(edited(published("ct-channel-dynamic"), edit), WeightReadError)
    assert_names(message, layer, "weight")
    assert "has nan, and must be finite" in message


# A file that is not what config.json says


def dense(source: Any, full_precision: Any, *names: str) -> Callable[[Tensors], None]:
    """Return what puts layers in full precision into the file, without scales."""

    def edit(tensors: Tensors) -> None:
        for name in names:
            tensors[f"{name}.weight"] = full_precision.tensors[f"{name}.weight"]
            for scale in ("weight_scale", "weight_scale_inv", "input_scale"):
                tensors.pop(f"{name}.{scale}", None)

    return edit


@pytest.mark.parametrize("layer", [f"{ATTENTION}.k_proj", f"{MLP}.gate_proj", f"{MLP}.down_proj"])
@pytest.mark.parametrize("layout", ["fp8-block", "ct-tensor-static", "ct-channel-dynamic"])
def test_a_sibling_in_full_precision_in_the_file(
    published: Any, full_precision: Any, edited: Any, layout: str, layer: str
) -> None:
    """A layer in full precision that config.json says is quantized is refused: weight and scale."""
    broken = edited(published(layout), dense(published(layout), full_precision, layer))
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
@pytest.mark.parametrize("part", [f"{ATTENTION}.k_proj", f"{MLP}.gate_proj"])
def test_a_sibling_in_full_precision_in_the_configuration(
    published: Any, edited: Any, layout: str, where: str, part: str, size: int
) -> None:
    """A fused layer of which config.json leaves out a part is refused, with what each part is."""
    broken = edited(published(layout), **{where: ["lm_head", part]})
    message = refuse(broken, UnsupportedModelError, size=size)
    fused = f"{ATTENTION}.qkv_proj" if "self_attn" in part else f"{MLP}.gate_up_proj"
    assert message.startswith(f"{fused} fuses layers that are not quantized alike")
    assert f"{part}: not quantized" in message
    assert "Quantize all of them in one way or none" in message


def test_siblings_in_two_schemes(published: Any, edited: Any) -> None:
    """A fused layer whose parts have different schemes is refused, with both of them."""
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


# A config.json, and the layout whose files it is put beside
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
    """Files in another scheme than config.json says are refused, before a byte, by the scales."""
    files, says = (published(layout) for layout in MISMATCHES[case])
    config = json.loads((says.folder / "config.json").read_text())["quantization_config"]
    message = refuse_weights(edited(files, quantization=config), WeightLoadError)
    assert "_scale" in message
    assert "Nothing was written to the model" in message
    assert ADVICE in message


def test_a_quantized_file_that_config_json_does_not_mention(published: Any, edited: Any) -> None:
    """FP8 numbers without their configuration are refused, weights and scales: never converted."""
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
    """Full precision under an FP8 configuration is refused: it is not quantized unasked."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    message = refuse_weights(edited(full_precision, quantization=config), WeightLoadError)
    assert "expected dtype torch.float8_e4m3fn" in message
    assert "self_attn.k_proj.weight_scale" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e5m2])
def test_another_8_bit_dtype(published: Any, edited: Any, dtype: torch.dtype) -> None:
    """Eight bits of another kind are refused by name, not taken for FP8."""
    name = f"{MLP}.down_proj.weight"
    broken = edited(published("ct-channel-dynamic"), scaled(name, lambda t: t.view(dtype)))
    message = refuse_weights(broken, MisshapenWeightError)
    assert f"{name}: expected dtype torch.float8_e4m3fn" in message
    assert f"got {dtype}" in message


# Quantizing while loading

POSITIONS = {"first": 0, "middle": None, "last": -1}


def online_layers() -> dict[str, tuple[Callable[[], Any], dict[str, list[int]]]]:
    """Return layers by kind, and the shape of each tensor that they are filled by."""
    return {
        "qkv": (
            lambda: QKVParallelLinear(24, 8, 4, 2, bias=False),
            {"q_proj": [32, 24], "k_proj": [16, 24], "v_proj": [16, 24]},
        ),
        "merged": (
            lambda: MergedColumnParallelLinear(
                24, [16, 16], bias=False, shard_names=["gate_proj", "up_proj"]
            ),
            {"gate_proj": [16, 24], "up_proj": [16, 24]},
        ),
        "row": (lambda: RowParallelLinear(24, 16, bias=False), {"": [16, 24]}),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ONLINE)
@pytest.mark.parametrize("kind", ["qkv", "merged", "row"])
def test_one_number_that_is_none(kind: str, scheme: str, dtype: torch.dtype) -> None:
    """One NaN or infinity, anywhere in any slot, is refused by weight and slot by every scheme."""
    build, shapes = online_layers()[kind]
    good = {
        f"{slot}.weight".lstrip("."): torch.randn(shape).to(dtype) for slot, shape in shapes.items()
    }
    held = ONLINE[scheme]
    if held.strategy == "block":
        held = Scheme("block", block=(8, 8), online=True)
    for slot in shapes:
        name = f"{slot}.weight".lstrip(".")
        for place in POSITIONS.values():
            for value in (float("nan"), float("inf"), float("-inf")):
                layer = build()
                layer.quantize(EightBitMethod(held))
                bad = good[name].clone()
                bad.view(-1)[bad.numel() // 2 + 5 if place is None else place] = value
                with pytest.raises(WeightReadError) as refused:
                    layer.load_weights(good | {name: bad})
                message = str(refused.value)
                assert message.startswith("weight"), message
                assert not slot or f"(slot {slot!r})" in message
                assert "must be finite to be quantized" in message
                with pytest.raises(ModelNotReadyError):
                    layer(torch.zeros(1, 24, dtype=dtype))
                layer.load_weights(good)  # a whole one mends it
                assert layer(torch.ones(1, 24, dtype=dtype)).isfinite().all()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("scheme", ONLINE)
@pytest.mark.parametrize("layer", LAYERS)
def test_one_number_that_is_none_in_a_model(
    full_precision: Any, edited: Any, layer: str, scheme: str, size: int
) -> None:
    """A checkpoint with one infinity is refused by the layer's path and slot, on whichever rank."""
    broken = edited(full_precision, scaled(f"{layer}.weight", last_is_infinite))
    asked: Any = scheme
    if scheme == "fp8_per_block":
        asked = QuantizationConfig(scheme=scheme, weight_block_size=(16, 32))
    message = refuse_weights(broken, WeightReadError, asked, size)
    assert_names(message, layer, "weight")
    assert "must be finite to be quantized" in message


def last_is_infinite(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[-1] = float("inf")
    return tensor


def test_an_update_that_is_no_number(full_precision: Any) -> None:
    """An update with a NaN is refused by slot, and the model does not run with what is left."""
    model: Any = get_model(model_config=ask(full_precision, "fp8_per_channel"))
    name = f"{ATTENTION}.v_proj.weight"
    weight = full_precision.tensors[name]
    bad = weight.clone()
    bad[3, 3] = float("nan")
    ids = full_precision.ids
    before = model(ids, torch.arange(len(ids)))
    with pytest.raises(WeightReadError, match=r"weight \(slot 'v_proj'\) has (nan|inf)"):
        model.update_weights({name: bad})
    with pytest.raises(ModelNotReadyError, match="v_proj"):
        model(ids, torch.arange(len(ids)))
    model.load_weights(full_precision.tensors)
    assert torch.equal(model(ids, torch.arange(len(ids))), before)


# What is missing, and when


@pytest.mark.parametrize("module", ["compressed_tensors", "compressed_tensors.quantization"])
def test_the_library_that_reads_a_layout_is_missing(
    published: Any, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """Without compressed-tensors its layout is refused, with what to install; FP8's is loaded."""
    ours, theirs = published("fp8-block"), published("ct-channel-dynamic")
    for name in list(sys.modules):
        if name == module or name.startswith(f"{module}."):
            monkeypatch.setitem(sys.modules, name, None)
    message = refuse(theirs, UnsupportedModelError)
    assert "pip install 'vllm-module[compressed-tensors]'" in message
    assert get_model(model_config=ask(ours)).load_report.ok


def test_asking_after_loading(full_precision: Any) -> None:
    """A model that is loaded is not quantized any more: it says so, and runs as before."""
    model: Any = get_model(model_config=ask(full_precision))
    ids = full_precision.ids
    before = model(ids, torch.arange(len(ids)))
    rules = rules_for("fp8_per_channel", None)
    assert rules is not None
    with pytest.raises(RuntimeError, match="is loaded: quantize it before it is"):
        quantize(model, rules)
    assert torch.equal(model(ids, torch.arange(len(ids))), before)
    for module in model.modules():
        assert not isinstance(getattr(module, "quant_method", None), EightBitMethod)


def test_asking_for_scales_of_the_cache_after_loading(full_precision: Any) -> None:
    """A model that is loaded gets no scales of the cache, which nothing would fill."""
    model: Any = get_model(model_config=ask(full_precision))
    stored = {"quant_method": "fp8", "kv_cache_scheme": "static", "ignored_layers": ["re:.*"]}
    rules = rules_for(None, stored)
    assert rules is not None
    with pytest.raises(RuntimeError, match="is loaded: quantize it before it is"):
        quantize(model, rules)
    model.check_ready()


# From the command line


@pytest.mark.parametrize("command", ["load", "plan", "generate"])
@pytest.mark.parametrize(
    ("layout", "asked", "said"),
    [
        ("fp8-block", "fp8_per_channel", "quantized already, by 'fp8'"),
        ("fp8-block", "compressed-tensors", "quantized already, by 'fp8'"),
        ("ct-channel-dynamic", "fp8", "quantized already, by 'compressed-tensors'"),
        ("full", "compressed-tensors", "config.json has no quantization_config"),
    ],
)
def test_the_command_line_refuses_in_one_line(
    published: Any,
    full_precision: Any,
    run: Any,
    command: str,
    layout: str,
    asked: str,
    said: str,
) -> None:
    """``--quantization`` against config.json ends with 1 and one plain line."""
    source = full_precision if layout == "full" else published(layout)
    options = ["--prompt-ids", "1"] if command == "generate" else []
    result = run(command, source.folder, "--quantization", asked, *options)
    assert result.code == 1
    assert result.out == ""
    assert said in result.err
    assert repr(asked) in result.err
    assert "Traceback" not in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_the_command_line_refuses_values_in_one_line(published: Any, edited: Any, run: Any) -> None:
    """A scale that is NaN ends ``load`` with 1 and one plain line that names it."""
    name = f"{ATTENTION}.k_proj.weight_scale"
    broken = edited(published("ct-tensor-dynamic"), scaled(name, first(float("nan"))))
    result = run("load", broken.folder, "--device", "cpu")
    assert result.code == 1
    assert "qkv_proj.weight_scale (slot 'k_proj')" in result.err
    assert "Traceback" not in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_loading_under_a_progress_bar_is_refused_alike(published: Any, edited: Any) -> None:
    """The bar, which plans first, changes nothing of a refusal."""
    name = f"{ATTENTION}.k_proj.weight_scale"
    broken = edited(published("ct-tensor-dynamic"), scaled(name, first(float("nan"))))
    with pytest.raises(WeightReadError, match="k_proj"):
        get_model(model_config=ask(broken), load_config=LoadConfig(show_progress=True))
    assert Path(broken.folder, "config.json").is_file()
