"""Quantizing while loading gives the bits of quantizing the whole tensor and cutting it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_module import vLLMModule
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import ShardingError
from vllm_module.kernels.rows.quantize import quantize
from vllm_module.layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm_module.quantization import ONLINE, EightBitMethod, QuantizableLayer, Scheme, online
from vllm_module.quantization.online import QuantizedRegion
from vllm_module.testing import features, head_layouts, random_weights, tp_sizes
from vllm_module.testing.checkpoints import assert_same_state, state
from vllm_module.weights import reading

BLOCKS = [(1, 1), (1, 3), (2, 2), (4, 1), (3, 8), (128, 128)]


def schemes() -> st.SearchStrategy[Scheme]:
    blocks = st.sampled_from(BLOCKS).map(lambda block: Scheme("block", block=block, online=True))
    return st.sampled_from(list(ONLINE.values())) | blocks


class Drawn(NamedTuple):
    """A function that builds a layer on a rank, and whether the layer's rows or columns are cut."""

    build: Callable[[], QuantizableLayer]
    rows: bool
    columns: bool


@st.composite
def layers(draw: st.DrawFn) -> Drawn:
    """Draw a layer of any kind: fused, with copied key-value heads, padded, or row-parallel."""
    width = draw(features())
    kind = draw(st.sampled_from(["merged", "qkv", "row", "head", "replicated"]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    if kind == "merged":
        sizes = draw(st.lists(features(), min_size=1, max_size=3))
        names = ["gate_proj", "up_proj", "third"][: len(sizes)]
        return Drawn(
            lambda: MergedColumnParallelLinear(width, sizes, params_dtype=dtype, shard_names=names),
            True,
            False,
        )
    if kind == "qkv":
        layout = draw(head_layouts())
        return Drawn(
            lambda: QKVParallelLinear(
                width, layout.head_size, layout.heads, layout.kv_heads, params_dtype=dtype
            ),
            True,
            False,
        )
    other = draw(features())
    if kind == "row":
        return Drawn(lambda: RowParallelLinear(width, other, params_dtype=dtype), False, True)
    if kind == "head":
        padding = draw(st.sampled_from([1, 8, 64]))
        return Drawn(
            lambda: ParallelLMHead(other, width, False, dtype, padding_size=padding), True, False
        )
    return Drawn(lambda: ReplicatedLinear(width, other, params_dtype=dtype), False, False)


class Handle:
    """A handle: unlike a tensor in memory, it is read in pieces."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

    def narrow(self, dim: int, start: int, length: int) -> Handle:
        return Handle(self.tensor.narrow(dim, start, length))

    def read_into(self, destination: torch.Tensor) -> None:
        destination.copy_(self.tensor)


def built(layer: Drawn, scheme: Scheme, rank: int, size: int) -> QuantizableLayer:
    with tensor_parallel(rank=rank, size=size):
        module = layer.build()
    module.quantize(EightBitMethod(scheme))
    return module


def as_stored(wide: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a whole tensor; return it and its scales in the shape that checkpoints have."""
    rows, columns = wide.shape
    block = {"tensor": (rows, columns), "channel": (1, columns), "block": scheme.block}
    tall, across = block[scheme.strategy]
    quantized = torch.empty_like(wide, dtype=scheme.dtype)
    scale = torch.empty(-(-rows // tall), -(-columns // across))
    quantize(wide, quantized, scale, (tall, across))
    return quantized, scale.view(1) if scheme.strategy == "tensor" else scale


def depends_on_cut(layer: Drawn, scheme: Scheme) -> bool:
    if scheme.strategy == "block":
        return False  # a cut inside a block is refused
    return layer.columns or (layer.rows and scheme.strategy == "tensor")


@given(layers(), schemes(), tp_sizes(), st.integers(0, 2**16), st.data())
def test_quantized_while_loading_is_quantized_whole_and_cut(
    layer: Drawn, scheme: Scheme, size: int, seed: int, data: st.DataObject
) -> None:
    """A rank holds the same as from a checkpoint that was quantized before it was cut.

    The bits are the same if no scale depends on the cut. Else no scale is greater, and the error is
    within the bound that the whole tensor's scales give.
    """
    rank = data.draw(st.integers(0, size - 1), "rank")
    try:
        module = built(layer, scheme, rank, size)
    except ShardingError:
        assume(False)
    stored = built(layer, replace(scheme, online=False), rank, size)
    expected = built(layer, scheme, 0, 1).expected_weights()
    tensors = random_weights(expected, seed=seed)
    if data.draw(st.booleans(), "a row of zeros"):
        for tensor in tensors.values():
            tensor[0] = 0
    quantized = {}
    for name, tensor in tensors.items():
        if name.endswith("weight"):
            quantized[name], scale = as_stored(tensor, scheme)
            quantized[f"{name}_scale"] = scale
        else:
            quantized[name] = tensor
    names = data.draw(st.permutations(sorted(tensors)), "order")
    module.load_weights((name, tensors[name]) for name in names)
    stored.load_weights(quantized)
    if size == 1 or not depends_on_cut(layer, scheme):
        assert_same_state(state(module), state(stored), f"on rank {rank} of {size}")
        return
    assert bool((module.weight_scale <= stored.weight_scale).all())
    conversion = module.conversions["weight"]
    restored = conversion.restored(module)
    plain = with_values(layer, tensors, rank, size)
    bounds = {
        name: conversion.error_bound(tensor) if name.endswith("weight") else tensor
        for name, tensor in tensors.items()
    }
    bound = with_values(layer, bounds, rank, size)
    assert bool(((restored - plain).abs() <= bound).all())


def with_values(
    layer: Drawn, tensors: dict[str, torch.Tensor], rank: int, size: int
) -> torch.Tensor:
    """Return the rank's part of float32 tensors, cut like its weight."""
    with tensor_parallel(rank=rank, size=size):
        module = layer.build()
    module.params_dtype = torch.float32
    module.create_weight(module.output, module.input, torch.float32)
    module.load_weights(tensors)
    return module.weight.data


@given(layers(), schemes(), st.integers(0, 2**16))
def test_pieces_make_no_difference(layer: Drawn, scheme: Scheme, seed: int) -> None:
    """A tensor read whole, or a few rows at a time by several threads, gives the same bits."""
    try:
        whole, pieces = (built(layer, scheme, 0, 1) for _ in range(2))
    except ShardingError:
        assume(False)
    tensors = random_weights(whole.expected_weights(), seed=seed)
    whole.load_weights(tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online, "_PIECE", 24)
        patch.setattr(reading, "_BATCH_BYTES", 16)
        pieces.load_weights({name: Handle(tensor) for name, tensor in tensors.items()})
    assert_same_state(state(pieces), state(whole), "read in pieces")


@pytest.mark.parametrize("columns", [16384, 8192, 6528])
def test_a_piece_of_the_real_size_has_whole_blocks(columns: int) -> None:
    """Where 4 MiB are 1, 2 or 2.5 rows of blocks, a scale is its own block's maximum / 448."""
    rows = 2 * 128 + 70
    weight = torch.randn(rows, columns, dtype=torch.bfloat16)
    layer = ReplicatedLinear(columns, rows, bias=False, params_dtype=torch.bfloat16)
    layer.quantize(EightBitMethod(ONLINE["fp8_per_block"]))
    layer.load_weights({"weight": Handle(weight)})
    padded = torch.nn.functional.pad(weight.float(), (0, 0, 0, 3 * 128 - rows))
    expected = padded.view(3, 128, columns // 128, 128).abs().amax((1, 3)) / 448
    (name,) = layer.conversions["weight"].makes
    torch.testing.assert_close(layer.get_parameter(name).data, expected, rtol=1e-6, atol=0)
    restored = layer.conversions["weight"].restored(layer)
    largest = expected.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
    assert bool(((restored - weight.float()).abs() <= largest * 448 / 16).all())


@pytest.mark.parametrize("name", ONLINE)
def test_no_more_than_a_piece_is_in_full_precision(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheme per channel or block reads 4 MiB of a file at a time, one per tensor a slot."""
    sizes = []
    receive = QuantizedRegion.receive
    monkeypatch.setattr(
        QuantizedRegion,
        "receive",
        lambda self, weight: (sizes.append(weight.shape.numel()), receive(self, weight))[1],
    )
    layer = MergedColumnParallelLinear(1024, [4096, 2048], False, shard_names=["a", "b"])
    layer.quantize(EightBitMethod(ONLINE[name]))
    tensors = {n: torch.randn(like.shape) for n, like in layer.expected_weights().items()}

    layer.load_weights({n: Handle(tensor) for n, tensor in tensors.items()})
    most = 4096 * 1024 if ONLINE[name].strategy == "tensor" else 1 << 20
    assert max(sizes) == most
    assert sum(sizes) == (4096 + 2048) * 1024


@pytest.mark.parametrize("name", ONLINE)
def test_an_update_of_one_slot_leaves_the_others(name: str) -> None:
    """New full-precision weights of one slot requantize that slot in place, and no other."""
    layer = MergedColumnParallelLinear(128, [256, 128], False, shard_names=["a", "b"])
    layer.quantize(EightBitMethod(ONLINE[name]))
    first = {"a.weight": torch.randn(256, 128), "b.weight": torch.randn(128, 128)}
    layer.load_weights(first)
    before = state(layer)
    addresses = {path: tensor.data_ptr() for path, tensor in layer.named_parameters()}
    layer.update_weights({"b.weight": 100 * first["b.weight"]})
    after = state(layer)
    fresh = MergedColumnParallelLinear(128, [256, 128], False, shard_names=["a", "b"])
    fresh.quantize(EightBitMethod(ONLINE[name]))
    fresh.load_weights(first | {"b.weight": 100 * first["b.weight"]})
    assert_same_state(after, state(fresh), "after an update")
    assert {path: tensor.data_ptr() for path, tensor in layer.named_parameters()} == addresses
    slot = layer.weight.region("a")
    assert torch.equal(slot.view(torch.uint8), before["weight"][:256].view(torch.uint8))


@pytest.mark.parametrize("name", ONLINE)
def test_extreme_numbers_keep_the_bound(name: str) -> None:
    """The error of tiny, huge and mixed numbers stays within the documented bound."""
    layer = ReplicatedLinear(128, 128, bias=False)
    layer.quantize(EightBitMethod(ONLINE[name]))
    conversion = layer.conversions["weight"]
    generator = torch.Generator().manual_seed(0)
    for factor in (1e-44, 1e-38, 1e-30, 1.0, 1e30, 3e38 / 8):
        wide = torch.randn(128, 128, generator=generator).clamp(-6, 6) * factor
        wide[3] = 0
        wide[5, 7:] *= 1e-6
        layer.load_weights({"weight": wide})
        error = (conversion.restored(layer) - wide).abs()
        assert bool((error <= conversion.error_bound(wide)).all()), factor


class Model(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.up = MergedColumnParallelLinear(128, [128, 128], True, shard_names=["a", "b"])
        self.down = RowParallelLinear(128, 128)


def test_state_dict_has_the_scales() -> None:
    """The state dict of a quantized model has weights and their scales, and can be dequantized."""
    model = Model()
    for layer in (model.up, model.down):
        layer.quantize(EightBitMethod(ONLINE["fp8_per_channel"]))
    model.load_weights(random_weights(model.expected_weights()))
    assert list(model.state_dict()) == [
        "up.weight",
        "up.weight_scale",
        "up.bias",
        "down.weight",
        "down.weight_scale",
        "down.bias",
    ]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_the_bound_of_the_error_is_the_formula(dtype: torch.dtype) -> None:
    """Half a step: of INT8 half the scale, of FP8 a sixteenth, or a 1024th of the scale below."""
    values = torch.tensor([0.0, 0.001, 1.0, 100.0])
    bound = Scheme("tensor", dtype, online=True).error_bound(values, torch.tensor(127.0))
    half = torch.full((4,), 0.5)
    if dtype.is_floating_point:
        half = torch.maximum(values / 16, torch.tensor(127 / 448 / 1024))
    torch.testing.assert_close(bound, half, rtol=1e-2, atol=0)
