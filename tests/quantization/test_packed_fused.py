"""Packed layers whose slots a checkpoint stores as one tensor, beside the slots by themselves."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module.distributed import run_ranks
from vllm_module.errors import MisshapenWeightError, WeightReadError
from vllm_module.layers import MergedColumnParallelLinear, QKVParallelLinear
from vllm_module.quantization.packed import (
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ,
    GPTQ_V2,
    PackedMethod,
)

packing = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("packing.py"))))


def _gptq(bits: int, **how: Any) -> Callable[[int, int], Any]:
    return lambda rows, columns: packing.gptq(rows, columns, bits, **how)


def _compressed(**how: Any) -> Callable[[int, int], Any]:
    return lambda rows, columns: packing.by_compressed_tensors(torch.randn(rows, columns), **how)


KINDS: dict[str, tuple[PackedMethod, Callable[[int, int], Any]]] = {
    **{
        f"gptq, {bits} bits": (PackedMethod(GPTQ, bits, 32, symmetric=False), _gptq(bits))
        for bits in (2, 3, 4, 8)
    },
    "gptq, symmetric": (PackedMethod(GPTQ, 4, None), _gptq(4, group=None, symmetric=True)),
    "gptq in activation order": (
        PackedMethod(GPTQ_V2, 4, 32, symmetric=False, act_order=True),
        _gptq(4, v2=True, order=packing.act_order(64, 32)),
    ),
    "awq": (PackedMethod(AWQ, 4, 32, symmetric=False), packing.awq),
    "ct": (PackedMethod(COMPRESSED_TENSORS, 4, 32), _compressed()),
    "ct with zeros": (
        PackedMethod(COMPRESSED_TENSORS, 4, None, symmetric=False),
        _compressed(group=None, symmetric=False),
    ),
}


@pytest.mark.parametrize(("kind", "size"), [*product(KINDS, (1, 2, 4))])
def test_a_fused_tensor_is_cut_by_slot_and_then_by_rank(kind: str, size: int) -> None:
    """Each rank's weight is its part of each slot, bit by bit; the key-value heads are copied."""
    torch.manual_seed(0)
    method, make = KINDS[kind]
    merged, qkv = make(384, 64), make(256, 64)

    def work(rank: int) -> None:
        layer: Any = MergedColumnParallelLinear(64, [256, 128], False, shard_names=["a", "b"])
        layer.quantize(method)
        layer.load_weights(merged.stored)
        parts = [slot.chunk(size)[rank] for slot in merged.weight.split([256, 128])]
        assert torch.equal(method.full_precision(layer), torch.cat(parts).float())
        attention: Any = QKVParallelLinear(64, 32, 4, 2, bias=False)
        attention.quantize(method)
        attention.load_weights(qkv.stored)
        q, k, v = qkv.weight.split([128, 64, 64])
        heads = min(size, 2)
        of_kv = rank * heads // size
        parts = [q.chunk(size)[rank], k.chunk(heads)[of_kv], v.chunk(heads)[of_kv]]
        assert torch.equal(method.full_precision(attention), torch.cat(parts).float())

    run_ranks(size, work)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_and_the_fused_tensor_update_each_other(kind: str) -> None:
    """After a load of the fused tensor a slot can be updated by itself, and the other way round."""
    torch.manual_seed(0)
    method, make = KINDS[kind]
    whole, part = make(128, 64), make(64, 64)
    layer: Any = MergedColumnParallelLinear(64, [64, 64], False, shard_names=["a", "b"])
    layer.quantize(method)
    plan = layer.plan_weights(whole.stored)
    assert plan.report.ok, plan.report
    layer.load_weights(whole.stored)
    layer.update_weights({f"b.{name}": tensor for name, tensor in part.stored.items()})
    expected = torch.cat((whole.weight[:64], part.weight)).float()
    assert torch.equal(method.full_precision(layer), expected)
    layer.update_weights(whole.stored)
    assert torch.equal(method.full_precision(layer), whole.weight.float())


def test_what_does_not_fit_a_fused_tensor() -> None:
    """A shape of another layer, or groups of other inputs, are refused by name."""
    torch.manual_seed(0)
    method, make = KINDS["ct"]
    layer: Any = MergedColumnParallelLinear(64, [64, 32], False, shard_names=["a", "b"])
    layer.quantize(method)
    stored = make(96, 64).stored
    with pytest.raises(WeightReadError, match=r"weight_shape \(slot 'a'\) has \[96, 32\]"):
        layer.load_weights(stored | {"weight_shape": torch.tensor([96, 32])})
    ordered: Any = MergedColumnParallelLinear(64, [64, 32], False, shard_names=["a", "b"])
    ordered.quantize(PackedMethod(GPTQ, 4, 32, symmetric=False))
    stored = packing.gptq(96, 64).stored
    with pytest.raises(MisshapenWeightError, match="g_idx: expected shape"):
        ordered.load_weights(stored | {"g_idx": stored["g_idx"][:-1]})
