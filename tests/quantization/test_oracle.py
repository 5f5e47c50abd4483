"""Quantizing while loading against compressed-tensors' own quantizer.

The two differ, by design, in these cases:

- INT8: its scale is amax / 127.5, half the range of -128 to 127. Ours is amax / 127, so that -128
  is never used. With our scale, its numbers are ours.
- Only zeros: its scale is float32's epsilon, ours the smallest normal float32. The numbers are
  zeros.
- A quotient amax / 448 (or / 127) below the smallest normal float32: ours is that number, its scale
  is subnormal.
- Minus zero: it adds a zero point, which gives plus zero. Our numbers, and its numbers without a
  zero point, keep the sign.
- 16-bit weights: it rounds scale and quotient to 16 bits. Ours are in float32, and are the same as
  its own for the same numbers in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st

from vllm_module.layers import MergedColumnParallelLinear, ReplicatedLinear
from vllm_module.quantization import ONLINE, EightBitMethod, QuantizableLayer, Scheme

FP8 = [name for name in ONLINE if name.startswith("fp8")]
TINY = torch.finfo(torch.float32).tiny
BLOCKS = [(1, 1), (1, 4), (4, 1), (2, 3), (16, 8), (128, 128)]

Calibrated = Callable[[torch.Tensor, QuantizationArgs], torch.Tensor]


def args_of(scheme: Scheme) -> QuantizationArgs:
    """Return compressed-tensors' arguments for a scheme."""
    return QuantizationArgs(
        num_bits=8,
        type="float" if scheme.dtype.is_floating_point else "int",
        strategy=scheme.strategy,
        block_structure=list(scheme.block) if scheme.strategy == "block" else None,
    )


def ours(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of a layer that has loaded ``weight``, and its scales."""
    layer = ReplicatedLinear(weight.shape[1], weight.shape[0], False, params_dtype=weight.dtype)
    layer.quantize(EightBitMethod(scheme))
    layer.load_weights({"weight": weight})
    return layer.weight.data, getattr(layer, scheme.scale_name).data


def assert_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    """Draw a float32 matrix of any magnitude, with outliers in rows, columns and numbers."""
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    weight = torch.randn(rows, columns, generator=generator)
    spread = draw(st.sampled_from([0.0, 1.0, 8.0]))  # of magnitudes, within a row and among rows
    weight *= torch.exp(spread * torch.randn(rows, columns, generator=generator))
    weight *= torch.exp(spread * torch.randn(rows, 1, generator=generator))
    weight *= 10.0 ** draw(st.integers(-20, 20))
    weight = weight.clamp(-1e38, 1e38)
    weight[weight.abs() < 1e-30] = 0  # smaller ones have a test of their own
    specials = st.sampled_from([0.0, -0.0, 1.0, -448.0, 127.5, 1e-30, -1e30])
    for _ in range(draw(st.integers(0, 4))):
        row, column = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
        weight[row, column] = draw(specials)
    if draw(st.booleans()):
        weight[draw(st.integers(0, rows - 1))] = 0
    return weight


def schemes(names: list[str]) -> st.SearchStrategy[Scheme]:
    """Draw a scheme, with blocks that are smaller or larger than the matrix."""
    return st.builds(
        lambda name, block: replace(ONLINE[name], block=block),
        st.sampled_from(names),
        st.sampled_from(BLOCKS),
    )


@given(weight=weights(), scheme=schemes(FP8))
def test_fp8_has_the_oracles_bits(
    calibrated: Calibrated, weight: torch.Tensor, scheme: Scheme
) -> None:
    """Scales and FP8 numbers of float32 weights are compressed-tensors', bit for bit."""
    args = args_of(scheme)
    quantized, scale = ours(weight, scheme)
    expected = calibrated(weight, args).view(scale.shape)
    zeros = scale == TINY  # other numbers that are drawn are not so small
    assert_bits(scale[~zeros], expected[~zeros])
    assert (expected[zeros] == torch.finfo(torch.float32).eps).all()
    theirs = quantize(weight, expected, None, args, scheme.dtype)
    assert_bits(quantized, theirs)
    # Its compressor adds a zero point, which removes the sign of a minus zero.
    pointed = quantize(weight, expected, torch.zeros_like(expected), args, scheme.dtype)
    exact = weight != 0
    assert_bits(quantized[exact], pointed[exact])
    assert (pointed[~exact].view(torch.uint8) == 0).all()
    assert torch.equal(
        dequantize(quantized, scale, args=args), dequantize(theirs, expected, args=args)
    )


@given(weight=weights())
def test_int8_has_the_oracles_bits_given_the_scale(
    calibrated: Calibrated, weight: torch.Tensor
) -> None:
    """With our scale, its own times 127.5 / 127, compressed-tensors gives our INT8 numbers."""
    scheme = ONLINE["int8_per_channel_weight_only"]
    args = args_of(scheme)
    quantized, scale = ours(weight, scheme)
    assert_bits(quantized, quantize(weight, scale, None, args, torch.int8))
    assert_bits(quantized, quantize(weight, scale, torch.zeros_like(scale), args, torch.int8))
    assert_bits(scale, (weight.abs().amax(1, keepdim=True) / 127).clamp(min=TINY))
    theirs = calibrated(weight, args)
    some = scale != TINY
    torch.testing.assert_close(scale[some], theirs[some] * (127.5 / 127), rtol=2.0**-22, atol=0)
    assert (quantized != -128).all()


@given(
    weight=weights(), scheme=schemes(list(ONLINE)), dtype=st.sampled_from(["bfloat16", "float16"])
)
def test_sixteen_bits_are_those_of_the_same_numbers_in_float32(
    weight: torch.Tensor, scheme: Scheme, dtype: str
) -> None:
    """A 16-bit weight gives the oracle's bits for the same numbers in float32."""
    weight = weight.clamp(-6e4, 6e4).to(getattr(torch, dtype))
    quantized, scale = ours(weight, scheme)
    wide, of_wide = ours(weight.float(), scheme)
    assert_bits(scale, of_wide)
    assert_bits(quantized, wide)
    assert_bits(quantized, quantize(weight.float(), scale, None, args_of(scheme), scheme.dtype))


@pytest.mark.parametrize("name", FP8)
def test_in_sixteen_bits_the_oracle_rounds_more(calibrated: Calibrated, name: str) -> None:
    """For bfloat16 weights the oracle rounds scales and quotients to bfloat16, and we do not."""
    weight = torch.randn(64, 64).bfloat16()
    scheme = replace(ONLINE[name], block=(16, 16))
    args = args_of(scheme)
    quantized, scale = ours(weight, scheme)
    theirs = calibrated(weight, args).view(scale.shape)
    assert theirs.dtype == torch.bfloat16
    assert_bits(calibrated(weight.float(), args).view(scale.shape), scale)
    assert not torch.equal(theirs.float(), scale)
    torch.testing.assert_close(theirs.float(), scale, rtol=2.0**-8, atol=0)
    coarse = quantize(weight, theirs, None, args, scheme.dtype)
    assert (coarse.float() != quantized.float()).any()


@pytest.mark.parametrize("name", list(ONLINE))
def test_zeros_and_numbers_below_normal(calibrated: Calibrated, name: str) -> None:
    """Zeros and subnormal scales give the smallest normal scale; the oracle's scales differ."""
    scheme = replace(ONLINE[name], block=(2, 8))
    args = args_of(scheme)
    quantized, scale = ours(torch.zeros(4, 8), scheme)
    assert (quantized.view(torch.uint8) == 0).all()
    assert (scale == TINY).all()
    assert (calibrated(torch.zeros(4, 8), args) == torch.finfo(torch.float32).eps).all()
    small = torch.full((4, 8), TINY * 8)
    quantized, scale = ours(small, scheme)
    assert (scale == TINY).all()
    assert (quantized.float() == 8).all()
    theirs = calibrated(small, args)
    assert ((theirs > 0) & (theirs < TINY)).all()


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=3),
    columns=st.integers(1, 24),
    scheme=schemes(list(ONLINE)),
    seed=st.integers(0, 2**32),
)
def test_each_slot_of_a_fused_layer_is_quantized_for_itself(
    sizes: list[int], columns: int, scheme: Scheme, seed: int
) -> None:
    """Each slot of a fused layer has the oracle's bits for its tensor alone."""
    if scheme.strategy == "block":  # blocks must not cross the edge of a slot
        sizes = [size * scheme.block[0] for size in sizes]
    names = ["a", "b", "c"][: len(sizes)]

    layer = MergedColumnParallelLinear(columns, sizes, False, shard_names=names)
    layer.quantize(EightBitMethod(scheme))
    generator = torch.Generator().manual_seed(seed)
    stored = {
        f"{name}.weight": torch.randn(size, columns, generator=generator) * 10.0**power
        for power, (name, size) in enumerate(zip(names, sizes, strict=True))
    }
    layer.load_weights(stored)
    for name in names:
        weight = stored[f"{name}.weight"]
        quantized, scale = ours(weight, scheme)
        assert_bits(layer.weight.region(name), quantized)
        assert_bits(_scale(layer, scheme, name), scale)
        theirs = quantize(weight, scale, None, args_of(scheme), scheme.dtype)
        assert_bits(layer.weight.region(name), theirs)


def _scale(layer: QuantizableLayer, scheme: Scheme, slot: str) -> Any:
    parameter: Any = getattr(layer, scheme.scale_name)
    return parameter.region(slot)
