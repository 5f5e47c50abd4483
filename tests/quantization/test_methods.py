"""A quantization method names the parameters that it creates, and creates them only when needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_module.layers import ParallelLMHead, QKVParallelLinear, RowParallelLinear
from vllm_module.quantization import (
    ONLINE,
    EightBitMethod,
    QuantizableLayer,
    QuantizeMethod,
    Scheme,
    UnquantizedMethod,
)

STORED = [
    Scheme("tensor", activations="static"),
    Scheme("tensor", activations="none"),
    Scheme("channel"),
    Scheme("block", block=(8, 8), scale_name="weight_scale_inv"),
]
SCHEMES = [*STORED, *(replace(scheme, block=(8, 8)) for scheme in ONLINE.values())]
METHODS = [UnquantizedMethod(), *map(EightBitMethod, SCHEMES)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(getattr(method, "scheme", "")))
def test_a_method_names_the_parameters_that_it_creates(method: QuantizeMethod) -> None:
    """``parameter_names`` are the keys of ``create_weights``, in order."""
    layer = QKVParallelLinear(16, 8, 2)
    assert method.parameter_names == tuple(method.create_weights(layer))


@pytest.mark.parametrize(
    "build",
    [
        lambda: QKVParallelLinear(16, 8, 2),
        lambda: RowParallelLinear(16, 8),
        lambda: ParallelLMHead(16, 8, bias=True),
    ],
    ids=["qkv", "row", "head"],
)
def test_a_weight_is_created_once_for_each_method(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building a layer and quantizing it create one weight each; moving and saving create none."""
    dtypes = []
    new_weight = QuantizableLayer.new_weight
    monkeypatch.setattr(
        QuantizableLayer,
        "new_weight",
        lambda self, dtype: (dtypes.append(dtype), new_weight(self, dtype))[1],
    )
    layer = build()
    assert not layer.is_quantized
    layer.quantize(EightBitMethod(ONLINE["fp8_per_channel"]))
    assert layer.is_quantized
    layer.half()
    layer.load_state_dict(layer.state_dict(), assign=True)
    assert dtypes == [torch.float32, torch.float8_e4m3fn]
