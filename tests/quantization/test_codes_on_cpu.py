"""Layers whose codes are multiplied on a CPU: over two ranks, after updates, and in memory."""

from __future__ import annotations

import gc
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch

from vllm_module import vLLMModule
from vllm_module.distributed import run_ranks
from vllm_module.kernels.matmul import code_rows
from vllm_module.kernels.matmul.gguf_types import BLOCK_TYPES
from vllm_module.kernels.matmul.linear import Products, products
from vllm_module.layers import MergedColumnParallelLinear, RowParallelLinear
from vllm_module.quantization import EightBitMethod, Scheme
from vllm_module.quantization.gguf import GGUFMethod
from vllm_module.quantization.method import QuantizeMethod
from vllm_module.quantization.packed import COMPRESSED_TENSORS, GPTQ, PackedMethod

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
        held[..., 1] = 0x20 + held[..., 1] % 4  # the scale, about 0.01
        values = gguf.quants.dequantize(held.view(rows, -1).numpy(), quantization)
        return packing.Layer({f"weight_{kind.lower()}": held}, torch.from_numpy(values).double())

    return GGUFMethod(((None, kind),)), make


def of_floats(rows: int, columns: int, seed: int) -> Any:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return packing.by_compressed_tensors(weight, group=GROUP)


# The method, and what makes a layer of rows and columns with a seed.
KINDS: dict[str, tuple[QuantizeMethod, Make]] = {
    "int8": (EightBitMethod(Scheme("channel", torch.int8, "none")), eight_bits),
    "int4": (PackedMethod(COMPRESSED_TENSORS, 4, GROUP), of_floats),
    "GPTQ": (
        PackedMethod(GPTQ, 4, GROUP, symmetric=False),
        lambda rows, columns, seed: packing.gptq(rows, columns, 4, GROUP, seed=seed),
    ),
    "Q8_0": blocks("Q8_0"),
    "Q4_0": blocks("Q4_0"),
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
    multiplied = code_rows.code_rows_matmul

    def call(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        seen.append(len(x))
        return multiplied(x, *arguments)

    for module in ("gguf_blocks", "packed_matmul", "scaled_matmul"):
        monkeypatch.setattr(f"vllm_module.kernels.matmul.{module}.code_rows_matmul", call)
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
        tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
        sizes = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
        return sum(each.nbytes() for each in sizes.values())

    with torch.inference_mode(), products(Products(codes=64)):
        model(x)  # may make small tables that all layers share
        before = kept()
        for count in (1, 2, 3):
            model(x[:count])
        assert kept() == before
    assert len(counted) == 8
