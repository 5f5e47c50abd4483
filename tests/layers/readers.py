"""Layers, norms and modules around them, some of which can be given quantized rows.

Products on a CPU do not quantize their inputs. A fixture lets them do so, as on a GPU, by the
definition written out.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vllm_module import vLLMModule
from vllm_module.core.state import unguard
from vllm_module.layers import (
    ColumnParallelLinear,
    GeluAndMul,
    LayerNorm,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    SiluAndMul,
    fuse,
)
from vllm_module.quantization import ONLINE, EightBitMethod, QuantizableLayer, Scheme, rows
from vllm_module.testing.checkpoints import random_weights

E4M3 = torch.float8_e4m3fn
FEATURES = 64
DYNAMIC = Scheme("channel")
SCHEMES = [
    ONLINE["fp8_per_tensor"],
    ONLINE["fp8_per_channel"],
    Scheme("block", block=(16, 16)),
    Scheme("block", block=(16, 128)),  # wider than a row
    Scheme("tensor", activations="static"),
    Scheme("channel", activations="static"),
]
WHOLE = [
    Scheme("channel", activations="none"),
    ONLINE["int8_per_channel_weight_only"],
    Scheme("tensor", torch.int8, "dynamic"),
    Scheme("block", block=(16, 24)),  # no kernel finds the scales of such groups
]


def as_quantized(x: torch.Tensor, group: int | None, scale: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` rounded to what its FP8 numbers and scales stand for, by the definition."""
    if scale is None and group is not None and group < x.shape[-1]:
        return torch.cat([as_quantized(part, None, None) for part in x.split(group, -1)], -1)
    wide = x.float()
    if scale is None:
        scale = (wide.abs().amax(-1, keepdim=True) / 448).clamp(min=torch.finfo(torch.float32).tiny)
    return ((wide / scale).clamp(-448, 448).to(E4M3).float() * scale).to(x.dtype)


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FP8 products quantize their input on this CPU."""
    apply = EightBitMethod.apply

    def quantizing(self: Any, layer: Any, x: torch.Tensor, bias: Any) -> torch.Tensor:
        scheme, static = self.scheme, None
        if scheme.dtype == E4M3 and scheme.activations != "none":
            if scheme.activations == "static":
                static = layer.input_scale.max()
            x = as_quantized(x, scheme.block[1] if scheme.strategy == "block" else None, static)
        return apply(self, layer, x, bias)

    monkeypatch.setattr(EightBitMethod, "apply", quantizing)
    monkeypatch.setattr(rows, "quantizes_inputs", lambda x: x.dtype != torch.float64)


class Writing(nn.Module):
    """A module that returns what its child would give to the reader."""

    sole_readers = {"module": "reader"}

    def __init__(self, reader: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self.reader, self.module = reader, module

    def forward(self, *args: torch.Tensor) -> Any:
        return self.module(*args)


def rows_for(reader: nn.Module, module: nn.Module, *args: torch.Tensor) -> Any:
    """Return what ``module`` returns where nothing but ``reader`` reads it."""
    return fuse(Writing(reader, module))(*args)


def ready(module: Any, *args: torch.Tensor) -> Any:
    """Return ``module`` after a first call, before which a hook checks that it is loaded."""
    module(*args)
    return module


def loaded(module: Any, scheme: Scheme | None = None) -> Any:
    """Return ``module``, quantized and filled."""
    for layer in module.modules():
        if scheme is not None and isinstance(layer, QuantizableLayer):
            layer.quantize(EightBitMethod(scheme))
    module.load_weights(random_weights(module.expected_weights()))
    return module


LAYERS: dict[str, Callable[[torch.dtype], Any]] = {
    "replicated": lambda dtype: ReplicatedLinear(FEATURES, 32, params_dtype=dtype),
    "column": lambda dtype: ColumnParallelLinear(FEATURES, 32, False, params_dtype=dtype),
    "gathered": lambda dtype: ColumnParallelLinear(
        FEATURES, 32, gather_output=True, params_dtype=dtype
    ),
    "fused": lambda dtype: MergedColumnParallelLinear(
        FEATURES, [32, 32], skip_bias_add=True, params_dtype=dtype, shard_names=["a", "b"]
    ),
    "heads": lambda dtype: QKVParallelLinear(FEATURES, 16, 2, 1, params_dtype=dtype),
    "row": lambda dtype: RowParallelLinear(FEATURES, 32, params_dtype=dtype),
}
WRITERS: dict[str, Callable[[torch.dtype], tuple[Any, int]]] = {  # and how wide its input is
    "norm": lambda dtype: (loaded(RMSNorm(FEATURES, params_dtype=dtype)), FEATURES),
    "Gemma's norm": lambda dtype: (
        loaded(RMSNorm(FEATURES, params_dtype=dtype, weight_offset=1.0)),
        FEATURES,
    ),
    "norm with a wider weight": lambda dtype: (
        loaded(RMSNorm(FEATURES, params_dtype=torch.float32)),
        FEATURES,
    ),
    "silu": lambda dtype: (SiluAndMul(), 2 * FEATURES),
    "gelu": lambda dtype: (GeluAndMul(), 2 * FEATURES),
    "gelu by tanh": lambda dtype: (GeluAndMul("tanh"), 2 * FEATURES),
}


class Reading(vLLMModule):
    """A module that hands its input to one layer, as an MLP does."""

    sole_readers = {"x": "layer"}

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = linear() if layer is None else layer
        unguard(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def linear(cls: Any = ReplicatedLinear, scheme: Scheme | None = DYNAMIC, **options: Any) -> Any:
    return loaded(cls(FEATURES, 32, **options), scheme)


def norm(cls: Any = RMSNorm) -> Any:
    return loaded(cls(FEATURES))


def args_of(module: nn.Module) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    if isinstance(module, (RMSNorm, LayerNorm)):
        return torch.randn(3, FEATURES), torch.randn(3, FEATURES)
    return (torch.randn(3, 2 * FEATURES),)
