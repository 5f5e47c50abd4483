"""Rows that norms and activations quantize for the linear layer that reads them."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from vllm_module import vLLMModule
from vllm_module.distributed import run_ranks
from vllm_module.kernels import dtypes
from vllm_module.kernels.matmul import scaled_matmul
from vllm_module.layers import (
    MergedColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    SiluAndMul,
    fuse,
)
from vllm_module.quantization import EightBitMethod, Scheme, rows
from vllm_module.quantization.rows import QuantizedRows
from vllm_module.testing.checkpoints import random_weights

# Pytest's importlib mode has no imports between test files.
READERS: Any = runpy.run_path(str(Path(__file__).with_name("readers.py")))
FEATURES, SCHEMES, rows_for = (READERS[name] for name in ("FEATURES", "SCHEMES", "rows_for"))
ready, loaded, LAYERS = (READERS[name] for name in ("ready", "loaded", "LAYERS"))
WRITERS, Reading, linear = (READERS[name] for name in ("WRITERS", "Reading", "linear"))
norm, args_of = (READERS[name] for name in ("norm", "args_of"))
_as_on_a_gpu = READERS["_as_on_a_gpu"]
pytestmark = pytest.mark.usefixtures("_as_on_a_gpu")


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("writer", WRITERS)
@torch.no_grad()
def test_a_product_of_quantized_rows(scheme: Scheme, writer: str) -> None:
    """Rows that are quantized by the one who computes them give the bits of the product."""
    for dtype in (torch.bfloat16, torch.float32):
        module, features = WRITERS[writer](dtype)
        ready(module, torch.ones(1, features, dtype=dtype))
        product = torch.promote_types(
            dtype, getattr(module, "weight", torch.empty(0, dtype=dtype)).dtype
        )
        for name, build in LAYERS.items():
            layer = loaded(build(product), scheme)
            # The second has rows of zeros, and of numbers that are far apart.
            for x in (torch.randn(5, features), torch.randn(2, 3, features) ** 9):
                x = x.to(dtype)
                x[..., 0, :] = 0
                quantized = rows_for(layer, module, x)
                assert isinstance(quantized, QuantizedRows)
                assert torch.equal(layer(quantized), layer(module(x))), name
                if isinstance(module, RMSNorm):
                    (quantized, total), residual = rows_for(layer, module, x, x * 3), x * 3
                    assert torch.equal(total, x + residual)
                    assert torch.equal(layer(quantized), layer(module(x, residual)[0])), name
            assert layer(rows_for(layer, module, x[:0])).shape[0] == 0


@torch.no_grad()
def test_a_module_that_declares_its_reader() -> None:
    """The layer that a module declares is given the rows, through the module."""
    reader, module = Reading(), norm()
    args = args_of(module)
    given, total = rows_for(reader, module, *args)
    assert isinstance(given, QuantizedRows)
    assert torch.equal(reader(given), reader(module(*args)[0]))
    assert torch.equal(total, sum(args))


def test_nothing_takes_rows_for_a_tensor() -> None:
    """Rows have no operations, cannot be unpacked or changed, and say so at once."""
    with torch.no_grad():
        given, _ = rows_for(linear(), norm(), *args_of(norm()))
    for use in (
        lambda: given + 1,
        lambda: given.float(),
        lambda: tuple(given),
        lambda: nn.functional.linear(given, torch.ones(2, FEATURES)),
        lambda: linear(scheme=None)(given),
        lambda: linear(RowParallelLinear, input_is_parallel=False)(given),
    ):
        with pytest.raises((TypeError, AttributeError, NotImplementedError, AssertionError)):
            use()
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.scales = None


def test_derivatives_need_tensors() -> None:
    """Where derivatives are recorded, nothing is quantized for another one."""
    layer, module, args = linear(), norm(), args_of(norm())
    assert isinstance(rows_for(layer, module, *args)[0], torch.Tensor)
    with torch.inference_mode():
        assert isinstance(rows_for(layer, module, *args)[0], QuantizedRows)


@torch.no_grad()
def test_a_module_that_is_not_ready_is_called_as_ever() -> None:
    """A layer put to sleep refuses to run, as it does without quantized rows."""
    layer, module = linear(), norm()
    for sleeping in (layer, module):
        sleeping.sleep()
        with pytest.raises(RuntimeError, match="cannot run: not loaded"):
            layer(rows_for(layer, module, *args_of(module))[0])
        sleeping.load_weights(random_weights(sleeping.expected_weights()))
    assert isinstance(rows_for(layer, module, *args_of(module))[0], QuantizedRows)


@torch.no_grad()
def test_a_scale_that_is_updated() -> None:
    """A static scale is the layer's own, in its memory, also after an update."""
    layer, module = linear(scheme=Scheme("tensor", activations="static")), norm()
    args = args_of(module)
    before, _ = rows_for(layer, module, *args)
    layer.update_weights({"input_scale": torch.tensor(0.5)})
    after, _ = rows_for(layer, module, *args)
    assert after.scales is before.scales is layer.input_scale_for_matmul
    assert torch.equal(layer(after), layer(module(*args)[0]))
    assert not torch.equal(before.values.float(), after.values.float())


class Pair(vLLMModule):
    """A gated MLP that is cut over ranks."""

    sole_readers = {"x": "gate_up", "act": "down"}

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = MergedColumnParallelLinear(FEATURES, [128, 128], shard_names=["gate", "up"])
        self.act = SiluAndMul()
        self.down = RowParallelLinear(128, FEATURES)
        self.handed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.act(self.gate_up(x))
        self.handed += isinstance(inner, QuantizedRows)
        return self.down(inner)


@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_quantize_their_own_part(scheme: Scheme, size: int, monkeypatch: Any) -> None:
    """However many ranks share the features, each quantizes its part of a row as its product."""
    x = torch.randn(3, FEATURES)
    weights = random_weights(Pair().expected_weights())

    def run(rank: int) -> tuple[torch.Tensor, int]:
        model = Pair()
        for layer in (model.gate_up, model.down):
            layer.quantize(EightBitMethod(dataclasses.replace(scheme, online=True)))
        fuse(model)
        model.load_weights(weights)
        module = loaded(RMSNorm(FEATURES))
        with torch.no_grad():
            return model(rows_for(model, module, x)), model.handed

    together = run_ranks(size, run)
    assert [handed for _, handed in together] == [1] * size
    monkeypatch.setattr(rows, "quantizes_inputs", lambda _: False)
    apart = run_ranks(size, run)
    assert all(
        torch.equal(one, other) and not handed
        for (one, _), (other, handed) in zip(together, apart, strict=True)
    )


def test_only_a_gpu_quantizes_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are quantized on a GPU, and not where a graph is traced."""
    quantizes_inputs = scaled_matmul.quantizes_inputs
    with FakeTensorMode():
        x = torch.empty(2, 4, device="cuda")
        host = torch.empty(2, 4, device="cpu")
    assert not quantizes_inputs(x)  # traced
    # The class of a fake tensor is that of a traced one.
    monkeypatch.setattr(scaled_matmul.torch, "Tensor", type(x))
    assert quantizes_inputs(x)
    assert not quantizes_inputs(x.double())
    assert not quantizes_inputs(host)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not quantizes_inputs(x)
    monkeypatch.undo()


@torch.no_grad()
def test_a_gpu_that_does_not_multiply_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products dequantize the weight, so nothing is quantized for them."""
    layer, module = linear(), norm()
    assert isinstance(rows_for(layer, module, *args_of(module))[0], QuantizedRows)
    monkeypatch.setattr(dtypes, "capability", lambda _: (8, 0))
    assert isinstance(rows_for(layer, module, *args_of(module))[0], torch.Tensor)
