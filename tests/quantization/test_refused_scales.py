"""Impossible scales and NaN in FP8 weights are refused by name, and the model does not run."""

from __future__ import annotations

import runpy
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import get_model
from vllm_module.errors import (
    MisshapenWeightError,
    MissingWeightError,
    WeightLoadError,
    WeightReadError,
)
from vllm_module.layers import ReplicatedLinear
from vllm_module.quantization import EightBitMethod, Scheme, demand

Tensors = dict[str, torch.Tensor]

_refusing = runpy.run_path(str(Path(__file__).with_name("refusing.py")))
ADVICE = _refusing["ADVICE"]
ATTENTION = _refusing["ATTENTION"]
FP8 = _refusing["FP8"]
LAYERS = _refusing["LAYERS"]
MLP = _refusing["MLP"]
ask = _refusing["ask"]
assert_names = _refusing["assert_names"]
first = _refusing["first"]
refuse_weights = _refusing["refuse_weights"]
scaled = _refusing["scaled"]

IMPOSSIBLE = (-1.0, float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scale", ["weight_scale", "input_scale"])
def test_a_scale_that_is_missing(published: Any, edited: Any, layer: str, scale: str) -> None:
    """A scale that the files lack is reported missing by its own name, with the expected shape."""
    source = published("ct-tensor-static")
    broken = edited(source, lambda tensors: tensors.pop(f"{layer}.{scale}"))
    message = refuse_weights(broken, MissingWeightError)
    assert f"{layer}.{scale}: expected shape [1]" in message
    assert ADVICE in message


@pytest.mark.parametrize("layer", [f"{ATTENTION}.k_proj", f"{MLP}.down_proj"])
def test_a_scale_stored_under_two_names(published: Any, edited: Any, layer: str) -> None:
    """A scale that is stored under both of its names is refused, whatever the values."""

    def edit(tensors: Tensors) -> None:
        tensors[f"{layer}.weight_scale_inv"] = tensors[f"{layer}.weight_scale"].clone()

    message = refuse_weights(edited(published("ct-tensor-static"), edit), WeightLoadError)
    assert f"{layer}.weight_scale" in message
    assert ADVICE in message


@pytest.mark.parametrize(("layer", "value"), list(zip(LAYERS, cycle(IMPOSSIBLE), strict=False)))
@pytest.mark.parametrize("scale", ["weight_scale", "input_scale"])
def test_an_impossible_scale(
    published: Any, edited: Any, scale: str, layer: str, value: float
) -> None:
    """A scale that is negative, NaN or infinite is refused by layer and slot."""
    source = published("ct-tensor-static")
    broken = edited(source, scaled(f"{layer}.{scale}", first(value)))
    message = refuse_weights(broken, WeightReadError)
    assert_names(message, layer, scale)
    assert "must be finite and" in message


@pytest.mark.parametrize(
    ("place", "value"), [(0, -1e-30), (1, float("nan")), (-1, float("inf")), (-1, -1e-30)]
)
@pytest.mark.parametrize(
    ("layout", "scale"),
    [("ct-channel-dynamic", "weight_scale"), ("fp8-block", "weight_scale_inv")],
)
def test_one_scale_of_many(
    published: Any,
    edited: Any,
    layout: str,
    scale: str,
    value: float,
    place: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One impossible scale of a channel or block, anywhere and on any rank, is refused.

    So it is where few of them are looked at at a time.
    """
    # Smaller than these few scales, so that one may lie in any chunk.
    monkeypatch.setattr(demand, "_CHUNK", 3)
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
    """An input scale of zero, which inputs would be divided by, is refused by layer and slot."""
    broken = edited(
        published("vllm-tensor-static"), scaled(f"{layer}.input_scale", torch.zeros_like)
    )
    message = refuse_weights(broken, WeightReadError)
    assert_names(message, layer, "input_scale")
    assert "must be finite and positive" in message


def test_a_weight_scale_of_zero_is_accepted(published: Any, edited: Any) -> None:
    """A weight scale of zero is accepted: some publishers write it for rows of zeros."""
    source = published("ct-channel-dynamic")
    row = edited(source, scaled(f"{MLP}.up_proj.weight_scale", first(0.0)))
    assert get_model(model_config=ask(row)).load_report.ok


@pytest.mark.parametrize("rows", [1, 40])
def test_a_negative_scale_of_int8_is_accepted(rows: int) -> None:
    """The weight is the product: AutoRound stores a channel with -128 for its largest number."""
    codes = torch.randint(-128, 128, (32, 64), dtype=torch.int8)
    scales = torch.randn(32, 1)
    assert len({*scales.sign().flatten().tolist()}) == 2
    layer = ReplicatedLinear(64, 32, False, params_dtype=torch.float32)
    layer.quantize(EightBitMethod(Scheme("channel", torch.int8, "none")))
    layer.load_weights({"weight": codes, "weight_scale": scales})
    wide = codes.float() * scales
    assert torch.equal(layer.quant_method.full_precision(layer), wide)
    x = torch.randn(rows, 64)
    torch.testing.assert_close(layer(x), x @ wide.T, rtol=1e-5, atol=1e-3)
    scales[7] = -torch.inf
    with pytest.raises(WeightReadError, match="weight_scale has -inf, and must be finite"):
        layer.load_weights({"weight": codes, "weight_scale": scales})


@pytest.mark.parametrize("scale", ["k_scale", "v_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), None])
def test_a_kv_cache_scale(published: Any, edited: Any, scale: str, value: float | None) -> None:
    """A KV cache scale that is missing, zero, negative or not finite is refused by name."""
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
    """A scale of the wrong shape is refused by name and both shapes, before a byte is read."""
    broken = edited(published(layout), scaled(f"{layer}.{scale}", lambda _: torch.ones(shape)))
    message = refuse_weights(broken, MisshapenWeightError)
    assert f"{layer}.{scale}: expected shape [" in message
    assert f"got {list(shape)}" in message
    assert "Nothing was written to the model" in message


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, FP8])
def test_a_scale_of_another_dtype(published: Any, edited: Any, dtype: torch.dtype) -> None:
    """A scale in integers or FP8 is refused by its own name, with both dtypes."""
    name = f"{ATTENTION}.k_proj.weight_scale"
    broken = edited(published("ct-tensor-static"), scaled(name, lambda t: t.to(dtype)))
    message = refuse_weights(broken, MisshapenWeightError)
    assert f"{name}: expected dtype torch.float32" in message
    assert f"got {dtype}" in message


@pytest.mark.parametrize(("layer", "place"), list(zip(LAYERS, cycle([0, 1717, -1]), strict=False)))
@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_nan_in_an_fp8_weight(
    published: Any, edited: Any, layer: str, nan: int, place: int
) -> None:
    """NaN of either sign, anywhere in an FP8 weight, is refused by layer and slot."""

    def edit(tensors: Tensors) -> None:
        tensors[f"{layer}.weight"].view(torch.uint8).view(-1)[place] = nan

    message = refuse_weights(edited(published("ct-channel-dynamic"), edit), WeightReadError)
    assert_names(message, layer, "weight")
    assert "has nan, and must be finite" in message
