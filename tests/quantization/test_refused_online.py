"""A number that is not finite is refused when it is quantized while loading, and nothing runs."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import get_model
from vllm_module.config import QuantizationConfig
from vllm_module.errors import ModelNotReadyError, WeightReadError
from vllm_module.layers import QKVParallelLinear, RowParallelLinear
from vllm_module.quantization import ONLINE, EightBitMethod, Scheme

_refusing = runpy.run_path(str(Path(__file__).with_name("refusing.py")))
ATTENTION = _refusing["ATTENTION"]
LAYERS = _refusing["LAYERS"]
ask = _refusing["ask"]
assert_names = _refusing["assert_names"]
refuse_weights = _refusing["refuse_weights"]
scaled = _refusing["scaled"]

PLACES = (0, None, -1)  # first, middle, last


def online_layers() -> dict[str, tuple[Callable[[], Any], dict[str, list[int]]]]:
    """Return, by kind, a function that builds a layer, and the shape of each slot's tensor."""
    return {
        "qkv": (
            lambda: QKVParallelLinear(24, 8, 4, 2, bias=False),
            {"q_proj": [32, 24], "k_proj": [16, 24], "v_proj": [16, 24]},
        ),
        "row": (lambda: RowParallelLinear(24, 16, bias=False), {"": [16, 24]}),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ONLINE)
@pytest.mark.parametrize("kind", ["qkv", "row"])
def test_one_number_that_is_not_finite(kind: str, scheme: str, dtype: torch.dtype) -> None:
    """One NaN or infinity, anywhere in any slot, is refused with the slot, by every scheme."""
    build, shapes = online_layers()[kind]
    good = {
        f"{slot}.weight".lstrip("."): torch.randn(shape).to(dtype) for slot, shape in shapes.items()
    }
    held = ONLINE[scheme]
    if held.strategy == "block":
        held = Scheme("block", block=(8, 8), online=True)
    for slot in shapes:
        name = f"{slot}.weight".lstrip(".")
        for place in PLACES:
            for value in (float("nan"), float("inf"), float("-inf")):
                layer = build()
                layer.quantize(EightBitMethod(held))
                layer.allow_nan = True  # which eight bits cannot hold
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
                layer.load_weights(good)  # the layer can be loaded afterwards
                assert layer(torch.ones(1, 24, dtype=dtype)).isfinite().all()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("layer", "scheme"), list(zip(LAYERS, cycle(ONLINE), strict=False)))
def test_one_number_that_is_not_finite_in_a_model(
    full_precision: Any, edited: Any, layer: str, scheme: str, size: int
) -> None:
    """A checkpoint with one infinity, on any rank, is refused with the layer's path and slot."""
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


def test_an_update_that_is_not_finite(full_precision: Any) -> None:
    """An update with a NaN is refused before it is written, and one with an infinity later."""
    model: Any = get_model(model_config=ask(full_precision, "fp8_per_channel"))
    name = f"{ATTENTION}.v_proj.weight"
    weight = full_precision.tensors[name]
    bad = weight.clone()
    bad[3, 3] = float("nan")
    ids = full_precision.ids
    before = model(ids, torch.arange(len(ids)))
    with pytest.raises(WeightReadError, match=r"v_proj\.weight has a NaN.*\n.*Nothing was written"):
        model.update_weights({name: bad})
    assert torch.equal(model(ids, torch.arange(len(ids))), before)
    bad[3, 3] = float("inf")
    with pytest.raises(WeightReadError, match=r"weight \(slot 'v_proj'\) has (nan|inf)"):
        model.update_weights({name: bad})
    with pytest.raises(ModelNotReadyError, match="v_proj"):
        model(ids, torch.arange(len(ids)))
    model.load_weights(full_precision.tensors)
    assert torch.equal(model(ids, torch.arange(len(ids))), before)
