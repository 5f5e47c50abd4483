"""Packed experts over expert-parallel ranks, some of which have none, and after updates."""

from __future__ import annotations

import runpy
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vllm_module.distributed import expert_parallel, run_ranks
from vllm_module.kernels.experts import grouped_matmul_packed as kernel
from vllm_module.kernels.experts.grouped_matmul_packed import grouped_matmul_packed_triton
from vllm_module.layers import FusedMoE
from vllm_module.quantization.packed import (
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ,
    GPTQ_V2,
    PackedMethod,
)

packing = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("packing.py"))))
Tensors = dict[str, torch.Tensor]
EXPERTS, HIDDEN, INNER = 3, 32, 64

# The method, and what makes a layer of rows and columns with a seed.
KINDS: dict[str, tuple[PackedMethod, Any]] = {
    **{
        f"gptq, {bits} bits": (
            PackedMethod(GPTQ, bits, 32, symmetric=False),
            lambda rows, columns, seed, bits=bits: packing.gptq(rows, columns, bits, seed=seed),
        )
        for bits in (2, 3, 4, 8)
    },
    "gptq in activation order": (
        PackedMethod(GPTQ_V2, 4, 16, symmetric=False, act_order=True),
        lambda rows, columns, seed: packing.gptq(
            rows, columns, 4, 16, v2=True, order=packing.act_order(columns, 16), seed=seed
        ),
    ),
    "awq": (
        PackedMethod(AWQ, 4, 32, symmetric=False),
        lambda rows, columns, seed: packing.awq(rows, columns, seed=seed),
    ),
    "ct": (
        PackedMethod(COMPRESSED_TENSORS, 4, None),
        lambda rows, columns, seed: packing.by_compressed_tensors(
            torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)), group=None
        ),
    ),
}
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def made(kind: str, seed: int = 0) -> dict[str, Any]:
    """Return the layers of all experts by their names."""
    make = KINDS[kind][1]
    return {
        f"{expert}.{name}": make(*shape, seed + 10 * expert + at)
        for expert in range(EXPERTS)
        for at, (name, shape) in enumerate(SHAPES.items())
    }


def stored(layers: dict[str, Any]) -> Tensors:
    return {f"{name}.{attr}": t for name, each in layers.items() for attr, t in each.stored.items()}


def moe_of(kind: str, weights: Tensors) -> Any:
    moe: Any = FusedMoE(EXPERTS, 2, HIDDEN, INNER)
    for layer in (moe.w13, moe.w2):
        layer.quantize(KINDS[kind][0])
    moe.load_weights(weights)
    return moe


def expected(layers: dict[str, Any], x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the output in float64."""
    weights, chosen = logits.double().softmax(-1).topk(2)
    weights /= weights.sum(-1, keepdim=True)
    y = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gate, up, down = (layers[f"{expert}.{name}"].weight.double() for name in SHAPES)
            y[token] += weight * (down @ (F.silu(gate @ row) * (up @ row)))
    return y


@pytest.mark.parametrize(("kind", "size"), [*product(KINDS, (2, 4))])
def test_whole_experts_on_each_rank(kind: str, size: int) -> None:
    """Ranks with two, one or no experts have their weights, bit by bit, and the whole's output."""
    layers = made(kind)
    x, logits = torch.randn(5, HIDDEN), torch.randn(5, EXPERTS)

    def work(rank: int) -> torch.Tensor:
        with expert_parallel():
            moe = moe_of(kind, stored(layers))
        wide = KINDS[kind][0].full_precision(moe.w2)
        kept = moe.w2.experts.kept
        assert len(wide) == len(kept)
        for weight, expert in zip(wide, kept, strict=True):
            assert torch.equal(weight, layers[f"{expert}.down_proj"].weight.float())
        return moe(x, logits)

    for computed in run_ranks(size, work):
        torch.testing.assert_close(
            computed.double(), expected(layers, x, logits), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_of_one_expert(kind: str) -> None:
    """The memory stays, one expert's output changes, and the others' have the same bits."""
    layers, others = made(kind), made(kind, seed=500)
    moe = moe_of(kind, stored(layers))
    memory = [each.data_ptr() for each in (*moe.parameters(), *moe.buffers())]
    changed = {name: each for name, each in others.items() if name.startswith("1.")}
    moe.update_weights(stored(changed))
    assert [each.data_ptr() for each in (*moe.parameters(), *moe.buffers())] == memory
    wide = KINDS[kind][0].full_precision(moe.w13)
    for expert in range(EXPERTS):
        of = layers | changed
        slots = [of[f"{expert}.{name}"].weight.float() for name in ("gate_proj", "up_proj")]
        assert torch.equal(wide[expert], torch.cat(slots))
    x, logits = torch.randn(4, HIDDEN), torch.randn(4, EXPERTS)
    torch.testing.assert_close(
        moe(x, logits).double(), expected(layers | changed, x, logits), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_reads_nothing_of_a_product(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs is launched with tensors that have no values, as a CUDA graph captures it."""
    method = KINDS[kind][0]
    moe = moe_of(kind, stored(made(kind)))
    operands = [
        each.to("meta") if isinstance(each, torch.Tensor) else each
        for each in method._operands(moe.w2)
    ]
    words, scales, size, zeros, group_of = operands
    offsets = torch.empty(EXPERTS + 1, dtype=torch.int32, device="meta")
    launched: list[str] = []

    class Launcher:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **__: launched.append("tiles")

    def of_dequantized(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        assert weight.shape == (EXPERTS, HIDDEN, INNER)
        launched.append("dequantized")
        return x.new_empty(len(x), HIDDEN)

    monkeypatch.setattr(kernel, "_multiply_packed_groups", Launcher())
    monkeypatch.setattr(kernel, "grouped_matmul_triton", of_dequantized)
    x = torch.empty(6, INNER, device="meta")
    y = grouped_matmul_packed_triton(
        x, words, scales, *method.packing, size, zeros, group_of, offsets, None, None, 1
    )
    assert y.shape == (6, HIDDEN)
    assert launched == ["dequantized" if method.bits == 3 else "tiles"]
