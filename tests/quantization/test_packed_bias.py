"""A bias that old versions of AutoGPTQ store for layers that have none."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module.distributed import run_ranks
from vllm_module.errors import UnexpectedWeightError
from vllm_module.layers import ColumnParallelLinear, FusedMoE, MergedColumnParallelLinear
from vllm_module.quantization.packed import AWQ, GPTQ, PackedMethod

packing = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("packing.py"))))
METHOD = PackedMethod(GPTQ, 4, 32, symmetric=False)


def linear(method: PackedMethod = METHOD, bias: bool = False) -> Any:
    layer = ColumnParallelLinear(64, 32, bias)
    layer.quantize(method)
    return layer


def merged() -> Any:
    layer = MergedColumnParallelLinear(64, [32, 32], False, shard_names=["a", "b"])
    layer.quantize(METHOD)
    return layer


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("zeros", [torch.zeros(32), -torch.zeros(32).half()], ids=["0", "-0"])
def test_zeros_are_skipped_by_the_rule_of_the_method(zeros: torch.Tensor, size: int) -> None:
    """The reason is in the report, on each rank; in a plan, a stream and an update too."""
    stored = packing.gptq(32, 64).stored | {"bias": zeros}

    def work(rank: int) -> None:
        layer = linear()
        plan = layer.plan_weights(stored)
        assert "AutoGPTQ" in plan.report.skipped["bias"]
        layer.load_weights(stored)
        assert "AutoGPTQ" in layer.load_report.skipped["bias"]
        assert layer.bias is None
        layer.load_weights((name, tensor) for name, tensor in stored.items())
        layer.update_weights({"bias": zeros})

    run_ranks(size, work)


def test_the_slots_of_a_fused_layer_may_have_zeros() -> None:
    """So may the fused tensor, and some of the experts."""
    made = packing.gptq(32, 64).stored | {"bias": torch.zeros(32)}
    stored = {f"{slot}.{name}": tensor for slot in "ab" for name, tensor in made.items()}
    layer = merged()
    layer.load_weights(stored)
    assert set(layer.load_report.skipped) == {"a.bias", "b.bias"}
    layer.load_weights(packing.gptq(64, 64).stored | {"bias": torch.zeros(64)})
    moe: Any = FusedMoE(2, 1, 64, 32)
    for each in (moe.w13, moe.w2):
        each.quantize(METHOD)
    shapes = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    experts = {
        f"{expert}.{name}.{attr}": tensor
        for expert in range(2)
        for name, shape in shapes.items()
        for attr, tensor in packing.gptq(*shape).stored.items()
    }
    moe.load_weights(experts | {"1.up_proj.bias": torch.zeros(32)})
    assert set(moe.load_report.skipped) == {"1.up_proj.bias"}


@pytest.mark.parametrize(
    ("bias", "named"),
    [
        (torch.tensor([0.0] * 31 + [0.5]), "expected zeros or no such tensor, got 0.5"),
        (torch.full((32,), torch.nan), "got nan"),
        (torch.zeros(32, 2), r"expected a vector of zeros, got torch.float32 \[32, 2\]"),
        (torch.zeros(32, dtype=torch.int32), "expected a vector of zeros, got torch.int32"),
    ],
)
def test_what_is_no_zero_is_refused(bias: torch.Tensor, named: str) -> None:
    """A bias that would change the output is refused by name, with the number."""
    stored = packing.gptq(32, 64).stored | {"bias": bias}
    with pytest.raises(UnexpectedWeightError, match=named) as refused:
        linear().load_weights(stored)
    assert "bias" in str(refused.value)


def test_the_rule_is_of_biases_that_a_layer_does_not_have() -> None:
    """A layer's own bias is loaded, and other names, layers and layouts have no such rule."""
    made = packing.gptq(32, 64).stored
    layer = linear(bias=True)
    layer.load_weights(made | {"bias": torch.arange(32.0)})
    assert torch.equal(layer.bias, torch.arange(32.0))
    for name in ("biases", "x.bias", "bias.x"):
        with pytest.raises(UnexpectedWeightError, match=name):
            linear().load_weights(made | {name: torch.zeros(32)})
    with pytest.raises(UnexpectedWeightError, match="bias"):
        merged().load_weights(packing.gptq(64, 64).stored | {"c.bias": torch.zeros(32)})
    plain = ColumnParallelLinear(64, 32, False)
    with pytest.raises(UnexpectedWeightError, match="bias"):
        plain.load_weights({"weight": torch.zeros(32, 64), "bias": torch.zeros(32)})
    with pytest.raises(UnexpectedWeightError, match="bias"):
        linear(PackedMethod(AWQ, 4, 32, symmetric=False)).load_weights(
            packing.awq(32, 64).stored | {"bias": torch.zeros(32)}
        )
