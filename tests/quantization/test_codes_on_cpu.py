"""Layers and experts whose codes are multiplied on a CPU: two ranks, updates, and memory."""

from __future__ import annotations

import gc
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from vllm_module import vLLMModule
from vllm_module.distributed import expert_parallel, run_ranks
from vllm_module.kernels.experts import grouped_matmul
from vllm_module.kernels.matmul import code_rows_by_expert, code_rows_matmul
from vllm_module.kernels.matmul.gguf_types import BLOCK_TYPES
from vllm_module.kernels.matmul.products import Products, products
from vllm_module.layers import FusedMoE, MergedColumnParallelLinear, RowParallelLinear
from vllm_module.quantization import EightBitMethod, Scheme
from vllm_module.quantization.gguf import GGUFMethod
from vllm_module.quantization.method import QuantizeMethod
from vllm_module.quantization.mxfp4 import MXFP4PackedMethod
from vllm_module.quantization.packed import (
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ,
    GPTQ_V2,
    PackedMethod,
)

pytest.importorskip("numba")
packing = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("packing.py"))))
HIDDEN, INNER, SIZE, GROUP = 256, 512, 2, 128
Make = Callable[[int, int, int], Any]


def eight_bits(rows: int, columns: int, seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=draw)
    scale = torch.rand(rows, 1, generator=draw)
    stored = {"weight": codes, "weight_scale": scale}
    return packing.Layer(stored, codes.double() * scale.double())


def blocks(kind: str) -> tuple[QuantizeMethod, Make]:
    """Return a layer of random bytes with finite scales, and what gguf-py reads from them."""
    quantization = gguf.GGMLQuantizationType[kind]

    def make(rows: int, columns: int, seed: int) -> Any:
        block, draw = BLOCK_TYPES[kind], torch.Generator().manual_seed(seed)
        shape = rows, columns // block.values, block.nbytes
        held = torch.randint(256, shape, dtype=torch.uint8, generator=draw)
        scale = block.nbytes - 1 if kind == "Q6_K" else 1
        held[..., scale] = 0x20 + held[..., scale] % 4  # about 0.01
        values = gguf.quants.dequantize(held.view(rows, -1).numpy(), quantization)
        return packing.Layer({f"weight_{kind.lower()}": held}, torch.from_numpy(values).double())

    return GGUFMethod(((None, kind),)), make


def of_floats(rows: int, columns: int, seed: int) -> Any:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return packing.by_compressed_tensors(weight, group=GROUP)


def in_activation_order(rows: int, columns: int, seed: int) -> Any:
    order = packing.act_order(columns, GROUP)  # slots of a layer have the same
    return packing.gptq(rows, columns, 4, GROUP, v2=True, order=order, seed=seed)


# The method, and what makes a layer of rows and columns with a seed.
KINDS: dict[str, tuple[QuantizeMethod, Make]] = {
    "int8": (EightBitMethod(Scheme("channel", torch.int8, "none")), eight_bits),
    "int4": (PackedMethod(COMPRESSED_TENSORS, 4, GROUP), of_floats),
    "GPTQ": (
        PackedMethod(GPTQ, 4, GROUP, symmetric=False),
        lambda rows, columns, seed: packing.gptq(rows, columns, 4, GROUP, seed=seed),
    ),
    "GPTQ in activation order": (
        PackedMethod(GPTQ_V2, 4, GROUP, symmetric=False, act_order=True),
        in_activation_order,
    ),
    "AWQ": (
        PackedMethod(AWQ, 4, GROUP, symmetric=False),
        lambda rows, columns, seed: packing.awq(rows, columns, GROUP, seed=seed),
    ),
    "Q8_0": blocks("Q8_0"),
    "Q4_0": blocks("Q4_0"),
    "Q6_K": blocks("Q6_K"),
}
SHAPES = {"up.a": (INNER, HIDDEN), "up.b": (INNER, HIDDEN), "down": (HIDDEN, INNER)}


class Both(vLLMModule):
    """A layer that is cut by its output and one that is cut by its input."""

    def __init__(self, method: QuantizeMethod) -> None:
        super().__init__()
        self.up = MergedColumnParallelLinear(
            HIDDEN, [INNER] * 2, bias=False, shard_names=["a", "b"]
        )
        self.down = RowParallelLinear(INNER, HIDDEN, bias=False)
        for layer in (self.up, self.down):
            layer.quantize(method)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).chunk(2, -1)
        z: torch.Tensor = self.down(y[0] + y[1])
        return z

    def tensors(self) -> list[torch.Tensor]:
        return [*self.parameters(), *self.buffers()]


def made(kind: str, seed: int) -> dict[str, Any]:
    make = KINDS[kind][1]
    return {name: make(*shape, seed + at) for at, (name, shape) in enumerate(SHAPES.items())}


def stored(layers: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{name}.{attr}": t for name, each in layers.items() for attr, t in each.stored.items()}


def loaded(kind: str, layers: dict[str, Any]) -> Both:
    model = Both(KINDS[kind][0])
    model.load_weights(stored(layers))
    return model


def within_bounds(y: torch.Tensor, x: torch.Tensor, layers: dict[str, Any]) -> bool:
    """Return whether ``y`` is the product, within (n + 4) 2^-24 of the absolute one, twice.

    One more unit is for the sum of the two halves, and of the parts of two ranks.
    """
    x, up = x.double(), layers["up.a"].weight.double() + layers["up.b"].weight.double()
    most = layers["up.a"].weight.double().abs() + layers["up.b"].weight.double().abs()
    down = layers["down"].weight.double()
    bound = (HIDDEN + INNER + 10) * 2.0**-24 * (x.abs() @ most.T @ down.abs().T)
    return bool(((y.double() - x @ up.T @ down.T).abs() <= bound).all())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of rows that the loops have multiplied."""
    seen: list[int] = []
    multiplied = code_rows_matmul._product

    def call(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        seen.append(len(x))
        return multiplied(x, *arguments)

    of_experts = code_rows_by_expert._product

    def call_of_experts(x: torch.Tensor, offsets: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.extend(count for count in offsets.diff().tolist() if count)
        return of_experts(x, offsets, *others)

    # Results do not tell what multiplied.
    monkeypatch.setattr(code_rows_matmul, "_product", call)
    monkeypatch.setattr(code_rows_by_expert, "_product", call_of_experts)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_and_an_update_in_place(kind: str, counted: list[int]) -> None:
    """Each rank multiplies by its part, and after an update of one slot by the new one."""
    layers, others = made(kind, 0), made(kind, 50)
    changed = {"up.b": others["up.b"]}
    inputs = [torch.randn(rows, HIDDEN) for rows in (1, 5)]

    def work(rank: int) -> list[torch.Tensor]:
        model = loaded(kind, layers)
        with torch.inference_mode(), products(Products(codes=64)):
            before = [model(x) for x in inputs]
            memory = [each.data_ptr() for each in model.tensors()]
            model.update_weights(stored(changed))
            assert [each.data_ptr() for each in model.tensors()] == memory
            return before + [model(x) for x in inputs]

    for computed in run_ranks(SIZE, work):
        for of, results in ((layers, computed[:2]), (layers | changed, computed[2:])):
            for x, y in zip(inputs, results, strict=True):
                assert within_bounds(y, x, of)
    assert sorted(counted) == [1] * 8 + [5] * 8  # two layers, two ranks, before and after


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_held_beside_what_a_file_stores(kind: str, counted: list[int]) -> None:
    """Products keep no tensor, and a layer holds at most 1.1 times what a file has of it."""
    layers = made(kind, 0)
    model, x = loaded(kind, layers), torch.randn(3, HIDDEN)
    held = sum(each.nbytes for each in model.tensors())
    assert held <= 1.1 * sum(each.nbytes for each in stored(layers).values())

    def kept() -> int:
        gc.collect()
        tensors = (
            each
            for each in gc.get_objects()
            # Those that torch.compile has traced for other tests have no memory.
            if issubclass(type(each), torch.Tensor) and not issubclass(type(each), FakeTensor)
        )
        sizes = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
        return sum(each.nbytes() for each in sizes.values())

    with torch.inference_mode(), products(Products(codes=64)):
        model(x)  # may make small tables that all layers share
        before = kept()
        for count in (1, 2, 3):
            model(x[:count])
        assert kept() == before
    assert len(counted) == 8


EXPERTS, TOP_K = 5, 2
SLOTS = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def two_in_a_byte(rows: int, columns: int, seed: int) -> Any:
    """Return MXFP4 by its formula: a sign, 0 to 6, and a power of two for 32 numbers."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (rows, columns), generator=draw)
    exponents = torch.randint(115, 122, (rows, columns // 32), generator=draw)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[codes % 8]
    weight = values * (1 - codes // 8 * 2) * 2.0 ** (exponents - 127).repeat_interleave(32, 1)
    words = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return packing.Layer(
        {"weight_packed": words, "weight_scale": exponents.to(torch.uint8)}, weight
    )


OF_EXPERTS = {**KINDS, "MXFP4": (MXFP4PackedMethod(), two_in_a_byte)}


@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole experts"])
@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_experts_are_multiplied_where_tokens_go(
    kind: str, whole: bool, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks sum to the formula in float64, and only the rows of tokens are multiplied.

    One call multiplies the rows of all experts.
    """
    method, make = OF_EXPERTS[kind]
    multiply, in_one_call = grouped_matmul.multiplied_by_experts, []

    def noted(*arguments: Any) -> torch.Tensor | None:
        y = multiply(*arguments)
        in_one_call.append(y is not None)
        return y

    monkeypatch.setattr(grouped_matmul, "multiplied_by_experts", noted)  # what it returns is hidden
    layers = {
        f"{expert}.{name}": make(*shape, 10 * expert + at)
        for expert in range(EXPERTS)
        for at, (name, shape) in enumerate(SLOTS.items())
    }
    draw = torch.Generator().manual_seed(1)
    x, logits = (torch.randn(7, n, generator=draw) for n in (HIDDEN, EXPERTS))
    logits[:, 3] = -9  # no token goes there

    def work(rank: int) -> torch.Tensor:
        with expert_parallel() if whole else nullcontext():
            moe: Any = FusedMoE(EXPERTS, TOP_K, HIDDEN, INNER)
        for layer in (moe.w13, moe.w2):
            layer.quantize(method)
        moe.load_weights(stored(layers))
        with torch.inference_mode(), products(Products(codes=64)):
            return moe(x, logits)

    weights, chosen = logits.double().softmax(-1).topk(TOP_K)
    weights /= weights.sum(-1, keepdim=True)
    expected = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for by, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gate, up, down = (layers[f"{expert}.{name}"].weight.double() for name in SLOTS)
            expected[token] += by * (down @ (F.silu(gate @ row) * (up @ row)))
    for y in run_ranks(SIZE, work):
        error = (y.double() - expected).abs().max() / expected.abs().max()
        assert float(error) < 1e-5
    of_expert = chosen.flatten().bincount(minlength=EXPERTS).tolist()
    assert of_expert[3] == 0
    assert in_one_call == [kind != "GPTQ in activation order"] * 2 * SIZE
    times = 2 if whole else 2 * SIZE  # two layers, on the rank that has it or on both
    assert sorted(counted) == sorted(each for each in of_expert if each for _ in range(times))
