"""Weights that follow each other in the same memory: each product is that of the weight there."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.kernels.matmul.gguf_blocks import blocks_matmul
from vllm_module.kernels.matmul.linear import Products, products
from vllm_module.kernels.matmul.packed_matmul import packed_matmul
from vllm_module.kernels.matmul.packed_words import Packing
from vllm_module.kernels.matmul.scaled_matmul import scaled_matmul

pytest.importorskip("numba")
BYTES, GROUP = 4352, 64  # as many as 128 blocks of Q8_0 have, or 68 groups of 64
SQUARE = 5  # rows of a weight, and groups in each
Case = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


def scaled(room: torch.Tensor, scales: torch.Tensor, width: int, dtype: torch.dtype) -> Case:
    """Return a weight of eight bits with ``width`` groups in a row, and its product."""
    scale = scales.view(-1, width)
    weight = room.view(dtype).view(len(scale), width * GROUP)
    spread = scale.repeat_interleave(GROUP, 1)
    return weight.double() * spread, lambda x: scaled_matmul(x, weight, scale, (1, GROUP))


def packed(room: torch.Tensor, scales: torch.Tensor, width: int, order: tuple[int, int]) -> Case:
    """Return a weight of four bits, the codes of a byte in one of two orders."""
    scale = scales.view(-1, width)
    words = room.view(len(scale), -1)
    codes = torch.stack([words >> 4 * place & 15 for place in order], -1).flatten(1)
    spread = scale.repeat_interleave(2 * GROUP, 1)
    packing = Packing(4, 1, order)
    weight = (codes.double() - 8) * spread
    return weight, lambda x: packed_matmul(x, words, scale, packing, 2 * GROUP)


def blocks(room: torch.Tensor, scales: torch.Tensor, width: int, kind: str) -> Case:
    """Return blocks of a GGUF file, ``2 * width`` or as many of another type in a row."""
    quantization = gguf.GGMLQuantizationType[kind]
    held = room.view(-1, 2 * width, gguf.GGML_QUANT_SIZES[quantization][1])
    values = gguf.quants.dequantize(held.reshape(len(held), -1).numpy(), quantization)
    return torch.from_numpy(values).double(), lambda x: blocks_matmul(x, held, kind)


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], Case]] = {
    "int8": lambda *given: scaled(*given, torch.int8),
    "fp8": lambda *given: scaled(*given, torch.float8_e4m3fn),
    "low codes first": lambda *given: packed(*given, (0, 1)),
    "high codes first": lambda *given: packed(*given, (1, 0)),
    "Q8_0": lambda *given: blocks(*given, "Q8_0"),
}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*KINDS]), st.sampled_from([1, 2, 4])), min_size=8))
def test_another_weight_in_the_same_memory(drawn: list[tuple[str, int]]) -> None:
    """What is kept of one is not taken for another shape, dtype, order or kind of it."""
    torch.manual_seed(len(drawn))
    room, scales = torch.empty(BYTES, dtype=torch.uint8), torch.rand(BYTES // GROUP)
    given = torch.randint(0, 0x30, (BYTES,)).byte()  # no block's scale, and no float8, is NaN
    for kind, width in drawn:
        room.copy_(given)
        with torch.inference_mode(), products(Products(codes=64)):
            weight, multiply = KINDS[kind](room, scales, width)
            x = torch.randn(2, weight.shape[1])
            y = multiply(x)
        bound = (weight.shape[1] + 4) * 2.0**-24 * (x.double().abs() @ weight.abs().T)
        assert ((y.double() - x.double() @ weight.T).abs() <= bound).all(), (kind, width)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(["as stored", "transposed", "with gaps"]), min_size=6))
def test_other_scales_in_the_same_memory(drawn: list[str]) -> None:
    """Scales are read where they are now, with their strides, whatever was kept of others."""
    torch.manual_seed(len(drawn))
    weight = torch.randint(-127, 128, (SQUARE, SQUARE * GROUP), dtype=torch.int8)
    room = torch.empty(SQUARE * SQUARE * 2)
    square = room[: SQUARE * SQUARE].view(SQUARE, SQUARE)
    gaps = room.view(SQUARE, SQUARE * 2)[:, ::2]
    scales = {"as stored": square, "transposed": square.T, "with gaps": gaps}
    x = torch.randn(2, weight.shape[1])
    for name in drawn:
        room.uniform_(0.5, 2)  # as an update writes them, in place
        scale = scales[name]
        with torch.inference_mode(), products(Products(codes=64)):
            y = scaled_matmul(x, weight, scale, (1, GROUP))
            again = scaled_matmul(x, weight, scale, (1, GROUP))
        values = weight.double() * scale.double().repeat_interleave(GROUP, 1)
        bound = (weight.shape[1] + 4) * 2.0**-24 * (x.double().abs() @ values.abs().T)
        for result in (y, again):
            assert ((result.double() - x.double() @ values.T).abs() <= bound).all(), name
