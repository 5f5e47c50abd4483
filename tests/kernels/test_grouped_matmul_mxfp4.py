"""MXFP4 weights and products with them, against float64 and transformers."""

from __future__ import annotations

import mmap

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from vllm_module.kernels.experts import grouped_matmul_mxfp4 as kernel
from vllm_module.kernels.experts.grouped_matmul_mxfp4 import (
    dequantize_mxfp4,
    grouped_matmul_mxfp4,
    grouped_matmul_mxfp4_triton,
)
from vllm_module.kernels.matmul.matmul_configurations import MatmulConfig

U8 = torch.uint8
MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def weights(count: int, outputs: int, inputs: int, scale: int = 127) -> tuple[torch.Tensor, ...]:
    blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16)).to(U8)
    scales = torch.randint(scale - 5, scale + 5, blocks.shape[:-1]).to(U8)
    return blocks, scales


def exactly(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the elements in float64, by the table of e2m1."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64)
    halves = torch.stack((blocks & 15, blocks >> 4), -1)
    elements = table[halves.flatten(-2).int()]
    factors = torch.where(scales == 255, torch.nan, 2.0 ** (scales.double() - 127))
    return (elements * factors[..., None]).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_every_byte_and_every_scale(monkeypatch: pytest.MonkeyPatch, dtype) -> None:
    """Elements are exact in bfloat16 and float32; a scale of 0 is 2**-127, of 255 NaN."""
    # Smaller chunks, so that these few elements fill several.
    monkeypatch.setattr(kernel, "_CHUNK", 100)
    blocks = torch.arange(256).to(U8).view(16, 16).repeat(1, 256).view(16, 256, 16)
    scales = torch.arange(256).to(U8).expand(16, 256)
    got = dequantize_mxfp4(blocks, scales, dtype)
    assert (got.shape, got.dtype) == ((16, 256 * 32), dtype)
    # Six times the largest scale is infinite in float32, too.
    assert torch.equal(got.isnan(), exactly(blocks, scales).isnan())
    torch.testing.assert_close(
        got, exactly(blocks, scales).to(dtype), rtol=0, atol=0, equal_nan=True
    )


def test_it_is_what_transformers_dequantizes() -> None:
    """transformers has the same elements, transposed."""
    blocks, scales = weights(2, 6, 96)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(dequantize_mxfp4(blocks, scales, torch.bfloat16), theirs.transpose(1, 2))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (None, torch.float32),
        (MatmulConfig(16, 16, 128, 4, 2), torch.float16),
        (MatmulConfig(16, 16, 32, 4, 2), torch.bfloat16),
        (MatmulConfig(64, 32, 64, 4, 2), torch.bfloat16),
    ],
)
def test_each_row_meets_its_expert(
    as_accurate,
    monkeypatch: pytest.MonkeyPatch,
    config: MatmulConfig | None,
    dtype: torch.dtype,
) -> None:
    """Rows are as exact as torch's, with blocks beyond the last step's; others are zeros.

    Tokens, blocks, scales and biases are parts of larger tensors.
    """
    if config is not None:
        monkeypatch.setattr(kernel, "mxfp4_config_of", lambda *_: config)
    x = torch.full((7, 300), torch.nan, dtype=dtype)[:, 4:196:2]
    x.copy_(torch.randn(7, 96))
    blocks, scales = weights(5, 42, 128)
    blocks, scales = blocks[1:4, 1:41:2, :3], scales[1:4, 1:41:2, :3]
    bias = torch.randn(3, 20).to(dtype)
    offsets, rows = torch.tensor([0, 5, 5, 11]).int(), torch.randperm(14).int()
    y = grouped_matmul_mxfp4_triton(x, blocks, scales, offsets, bias, rows, 2)
    wide, exact = exactly(blocks, scales), torch.zeros(14, 20, dtype=torch.float64)
    for row in range(11):
        expert = 0 if row < 5 else 2
        exact[row] = wide[expert] @ x[rows[row] // 2].double() + bias[expert].double()
    low = grouped_matmul_mxfp4(x, blocks, scales, offsets, bias=bias, rows=rows, top_k=2)
    as_accurate(y, exact, low)
    assert torch.equal(y[11:], torch.zeros(3, 20, dtype=dtype))


def test_the_kernel_takes_every_byte_and_extreme_scales() -> None:
    """Multiplied by a unit matrix, the kernel's elements are exact, subnormal and NaN ones too."""
    blocks = torch.arange(256).to(U8).view(1, 16, 1, 16).repeat(1, 5, 1, 1)
    scales = torch.tensor([0, 1, 140, 254, 255]).to(U8).repeat_interleave(16).view(1, 80, 1)
    offsets = torch.tensor([0, 32], dtype=torch.int32)
    y = grouped_matmul_mxfp4_triton(torch.eye(32), blocks, scales, offsets, None, None, 1)
    elements = dequantize_mxfp4(blocks, scales, torch.float32)[0].t()
    expected = torch.eye(32) @ elements  # an infinite element is NaN in its whole column
    assert torch.equal(expected[:, :48], elements[:, :48])
    assert expected[:, 64:].isnan().all()
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_not_finite_stays_in_its_row() -> None:
    """NaN of a token or in an unused expert reaches no other row, and rows beyond are zeros."""
    blocks, scales = weights(3, 8, 64)
    x, offsets = torch.randn(8, 64), torch.tensor([0, 3, 3, 6], dtype=torch.int32)
    clean = grouped_matmul_mxfp4_triton(x, blocks, scales, offsets, None, None, 1)
    x[1, 3] = x[6:] = torch.nan
    scales[1] = 255
    y = grouped_matmul_mxfp4_triton(x, blocks, scales, offsets, None, None, 1)
    assert y[1].isnan().all()
    keep = [0, 2, 3, 4, 5, 6, 7]
    assert torch.equal(y[keep], clean[keep])


def test_experts_that_are_far_apart() -> None:
    """Experts and their rows are found if their offsets exceed 32 bits."""
    apart = 2**30 + 64
    memory = mmap.mmap(-1, 4 * apart + 64)
    far = torch.frombuffer(memory, dtype=U8).as_strided((3, 2, 1, 16), (apart, apart + 64, 16, 1))
    blocks, scales = weights(3, 2, 32)
    far.copy_(blocks)
    x, offsets = torch.randn(3, 32), torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    both = (
        grouped_matmul_mxfp4_triton(x, one, scales, offsets, None, None, 1) for one in (far, blocks)
    )
    assert torch.equal(*both)


@pytest.mark.parametrize("shape", [(0, 4, 6, 32), (5, 0, 6, 32), (5, 4, 0, 32), (5, 4, 6, 0)])
def test_nothing_to_multiply(shape: tuple[int, ...]) -> None:
    """Without rows, experts, outputs or inputs, results are zeros."""
    tokens, count, outputs, inputs = shape
    blocks, scales = weights(count, outputs, inputs)
    offsets = torch.zeros(count + 1, dtype=torch.int32)
    x = torch.randn(tokens, inputs)
    y = grouped_matmul_mxfp4_triton(x, blocks, scales, offsets, None, None, 1)
    assert torch.equal(y, torch.zeros(tokens, outputs))
    assert torch.equal(grouped_matmul_mxfp4(x, blocks, scales, offsets), y)


def test_bad_input() -> None:
    """Arguments that do not fit are named, with the numbers."""
    blocks, scales = weights(2, 8, 64)
    x, offsets = torch.randn(5, 64), torch.tensor([0, 2, 5], dtype=torch.int32)
    for message, arguments in (
        (r"x must be .*, got torch.float64", (x.double(), blocks, scales, offsets)),
        (r"must divide into blocks of 32, got 63", (x[:, 1:], blocks, scales, offsets)),
        (r"blocks must have the shape .*\[2, 8, 1, 16\]", (x, blocks[:, :, 1:], scales, offsets)),
        (r"scales must have the shape \[2, 8, 2\], got", (x, blocks, scales[:, 1:], offsets)),
        (r"scales must be torch.uint8, got torch.float32", (x, blocks, scales.float(), offsets)),
        (r"offsets must have the shape \[3\], got \[2\]", (x, blocks, scales, offsets[:2])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            grouped_matmul_mxfp4(*arguments)
    with pytest.raises(ValueError, match=r"blocks must have the shape .*\[2, 8, 2, 15\]"):
        dequantize_mxfp4(blocks[..., 1:], scales, x.dtype)


def test_the_operator_is_one() -> None:
    """It has a schema and a fake, and works with meta tensors and torch.compile."""
    blocks, scales = weights(2, 8, 64)
    x, offsets = torch.randn(5, 64), torch.tensor([0, 2, 5], dtype=torch.int32)
    arguments = (x, blocks, scales, offsets)
    y = grouped_matmul_mxfp4(*(tensor.to("meta") for tensor in arguments))
    assert (y.shape, y.dtype, y.device.type) == ((5, 8), torch.float32, "meta")
    operator = torch.ops.vllm_module.grouped_matmul_mxfp4.default
    torch.library.opcheck(operator, (*arguments, None, None, 1))
    compiled = torch.compile(grouped_matmul_mxfp4, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), grouped_matmul_mxfp4(*arguments))
