"""The quantizer against its definition, number by number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_module.kernels import quantize as kernel
from vllm_module.kernels.quantize import dequantize, greatest, quantize

FP8, INT8 = torch.float8_e4m3fn, torch.int8


def defined(wide: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple:
    """Quantize block by block, in the words of the docstring."""
    rows, columns = wide.shape
    quantized = torch.empty_like(wide, dtype=dtype)
    scale = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    most = greatest(dtype)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            values = wide[here].float()
            scale[i, j] = (values.abs().max() / most).clamp(min=torch.finfo(torch.float32).tiny)
            values = values / scale[i, j]
            quantized[here] = (
                (values if dtype == FP8 else values.round()).clamp(-most, most).to(dtype)
            )
    return quantized, scale


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 50), st.integers(1, 50)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.sampled_from([FP8, INT8]),
    st.sampled_from([1, 7, 64, 1 << 19]),
    st.integers(0, 2**16),
)
def test_each_block_is_quantized_by_its_largest_number(
    shape, block, wide, dtype, chunk, seed
) -> None:
    """Any shape, blocks that do not divide it, any dtype, converted in chunks of any size."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).to(wide)
    values[0, 0] = -5  # the largest is negative
    quantized = torch.empty(shape, dtype=dtype)
    scale = torch.full((-(-shape[0] // block[0]), -(-shape[1] // block[1])), torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_CPU_CHUNK", chunk)
        quantize(values, quantized, scale, block)
        wide_again = dequantize(quantized, scale, block, torch.float32)
    expected, scales = defined(values, block, dtype)
    assert torch.equal(scale, scales)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    assert torch.equal(wide_again, expected.float() * spread[: shape[0], : shape[1]])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("block", [(4, 6), (1, 6), (2, 3)])
def test_what_is_not_finite_shows_in_the_scale(bad: float, block: tuple[int, int]) -> None:
    """A block with NaN or infinity has a scale that is not finite; the others are as they were."""
    values = torch.randn(4, 6)
    clean = torch.empty(-(-4 // block[0]), -(-6 // block[1]))
    quantize(values, torch.empty(4, 6, dtype=FP8), clean, block)
    for row, column in ((0, 0), (3, 5), (2, 1)):
        damaged = values.clone()
        damaged[row, column] = bad
        scale = torch.empty_like(clean)
        quantize(damaged, torch.empty(4, 6, dtype=FP8), scale, block)
        finite = scale.isfinite()
        assert not finite[row // block[0], column // block[1]]
        assert (~finite).sum() == 1
        assert torch.equal(scale[finite], clean[finite])


@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    """A block of zeros has no 0 / 0 in it."""
    quantized, scale = torch.ones(3, 4).to(dtype), torch.empty(3, 1)
    quantize(torch.zeros(3, 4), quantized, scale, (1, 4))
    assert torch.equal(quantized.float(), torch.zeros(3, 4))
    assert torch.equal(
        dequantize(quantized, scale, (1, 4), torch.bfloat16).float(), torch.zeros(3, 4)
    )


def test_views_are_written_in_place() -> None:
    """Parts of larger tensors, with strides of their own, are read and written; the rest stays."""
    values = torch.randn(8, 10).t()[2:8, 1:7]
    whole, scales = torch.zeros(9, 9, dtype=torch.int8), torch.zeros(9, 1)
    quantize(values, whole[2:8, 1:7], scales[2:8], (1, 6))
    expected, scale = defined(values, (1, 6), INT8)
    assert torch.equal(whole[2:8, 1:7], expected)
    assert torch.equal(scales[2:8], scale)
    assert int(whole.count_nonzero()) == int(expected.count_nonzero())
    assert int(scales.count_nonzero()) == 6
