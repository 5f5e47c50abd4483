"""AutoAWQ's GEMV layout beside its formula: groups of each size, ranks, experts and damages."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vllm_module.distributed import run_ranks
from vllm_module.errors import ShardingError, UnsupportedModelError, WeightLoadError
from vllm_module.layers import FusedMoE
from vllm_module.layers.linear import RowParallelLinear
from vllm_module.quantization import rules_for
from vllm_module.quantization.packed_gemv import AWQ_GEMV, GEMVMethod

packing = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("packing.py"))))

SHAPES = {"gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128)}


def method(group: int) -> GEMVMethod:
    return GEMVMethod(AWQ_GEMV, 4, group, symmetric=False)


# Numbers of groups below, at and above what a row of zeros is filled up to.
@pytest.mark.parametrize(
    ("group", "columns", "words"),
    [(32, 64, 4), (32, 1024, 4), (32, 1088, 8), (64, 1152, 4), (128, 1024, 1), (128, 1280, 2)],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_has_the_groups_of_its_inputs(
    group: int, columns: int, words: int, size: int
) -> None:
    """Each rank's part of the weight is that of the formula, though its words cross the edge."""
    made = packing.awq_gemv(16, columns, group, seed=columns)
    assert list(made.stored["qzeros"].shape) == [16, words]
    assert list(made.stored["scales"].shape) == [16, words * 8]

    def work(rank: int) -> torch.Tensor:
        layer: Any = RowParallelLinear(columns, 16, bias=False)
        layer.quantize(method(group))
        layer.load_weights(made.stored)
        x = torch.eye(columns // size)
        assert torch.equal(layer.quant_method.full_precision(layer), layer.quant_method.apply(
            layer, x, None).T)  # fmt: skip
        return layer.quant_method.full_precision(layer)

    if columns // size % group:
        with pytest.raises(ShardingError, match=f"scale group of {group}"):
            run_ranks(size, work)
        return
    assert torch.equal(torch.cat(run_ranks(size, work), 1), made.weight.float())


# Of 3 groups, each of two ranks has room for two, and each of three has one.
@pytest.mark.parametrize(
    ("size", "inner", "block"), [(1, 128, None), (2, 128, None), (2, 96, 32), (3, 96, 32)]
)
def test_experts(size: int, inner: int, block: int | None) -> None:
    """Ranks with parts of experts have the formula's numbers, also where one part is smaller."""
    shapes = {"gate_proj": (inner, 64), "up_proj": (inner, 64), "down_proj": (64, inner)}
    layers = {
        f"{expert}.{name}": packing.awq_gemv(*shape, seed=10 * expert + at)
        for expert in range(3)
        for at, (name, shape) in enumerate(shapes.items())
    }
    stored = {f"{n}.{attr}": t for n, each in layers.items() for attr, t in each.stored.items()}
    x, logits = torch.randn(5, 64), torch.randn(5, 3)

    def work(rank: int) -> torch.Tensor:
        moe: Any = FusedMoE(3, 2, 64, inner, block=block)
        for layer in (moe.w13, moe.w2):
            layer.quantize(method(32))
        moe.load_weights(stored)
        return moe(x, logits)

    weights, chosen = logits.double().softmax(-1).topk(2)
    weights /= weights.sum(-1, keepdim=True)
    expected = torch.zeros(len(x), 64, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gate, up, down = (layers[f"{expert}.{name}"].weight for name in shapes)
            expected[token] += weight * (down @ (F.silu(gate @ row) * (up @ row)))
    for computed in run_ranks(size, work):
        torch.testing.assert_close(computed.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("attr", "change"),
    [
        ("scales", lambda t: None),
        ("qzeros", lambda t: None),
        ("scales", lambda t: t[:, :2].clone()),  # not filled up
        ("qzeros", lambda t: t[:, :1].clone()),
        ("scales", lambda t: t.fill_(torch.nan)),
        ("scales", lambda t: t.int()),
        ("qweight", lambda t: t.T.contiguous()),
        ("qzeros", lambda t: t.float()),
    ],
)
def test_damages_are_refused_by_name(attr: str, change: Any) -> None:
    """What is missing, misshapen, of another dtype or no number is named."""
    stored = packing.awq_gemv(24, 128).stored
    new = change(stored.pop(attr))
    stored |= {} if new is None else {attr: new}
    layer: Any = RowParallelLinear(128, 24, bias=False)
    layer.quantize(method(32))
    with pytest.raises(WeightLoadError, match=attr):
        layer.load_weights(stored)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"version": "gemv_fast"}, "version.*expected gemm or gemv, got 'gemv_fast'.*convert it"),
        ({"version": "gemv", "group_size": -1}, "group_size.*a positive number with gemv"),
    ],
)
def test_other_settings_are_refused(entries: dict[str, Any], named: str) -> None:
    """What is not read is refused by the entry, with what to do."""
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True} | entries
    with pytest.raises(UnsupportedModelError, match=named):
        rules_for(None, config)
