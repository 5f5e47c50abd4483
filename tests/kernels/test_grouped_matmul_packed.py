"""Products with the packed weights of experts, against float64 of codes."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module.kernels.experts import grouped_matmul_packed as kernel
from vllm_module.kernels.experts.grouped_matmul_packed import (
    grouped_matmul_packed,
    grouped_matmul_packed_triton,
)
from vllm_module.kernels.matmul.matmul_configurations import MatmulConfig
from vllm_module.kernels.matmul.packed_words import Packing

dense = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("test_packed_matmul.py"))))
LAYOUTS = {name: each for name, each in dense.LAYOUTS.items() if not each.get("codebook")}
OFFSETS = torch.tensor([0, 5, 5, 11], dtype=torch.int32)  # the second expert has no rows
ROWS = torch.tensor([3, 9, 0, 13, 6, 1, 12, 2, 7, 4, 11, 5, 8, 10], dtype=torch.int32)


def stacked(count: int = 3, **how: Any) -> tuple[Any, ...]:
    """Return the operands of experts, and their weights in float64."""
    each = [dense.packed(**how) for _ in range(count)]
    words, scales, exact = (
        torch.stack([getattr(one, name) for one in each]) for name in ("words", "scales", "exact")
    )
    zeros, group_of = (
        None if each[0].options[name] is None else torch.stack([one.options[name] for one in each])
        for name in ("zeros", "group_of")
    )
    return words, scales, each[0].packing, each[0].group_size, zeros, group_of, exact


def expected(x: torch.Tensor, exact: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the product of two experts of each token in float64, zeros beyond the last expert."""
    y = torch.zeros(len(ROWS), exact.shape[1], dtype=torch.float64)
    for row in range(int(OFFSETS[-1])):
        expert = 0 if row < 5 else 2
        y[row] = exact[expert] @ x[ROWS[row] // 2].double() + bias[expert].double()
    return y


@pytest.mark.parametrize(
    ("layout", "sums"), [(name, at % 2 == 0) for at, name in enumerate(LAYOUTS)]
)
def test_each_row_meets_its_expert(as_accurate, monkeypatch, layout: str, sums: bool) -> None:
    """The kernel and the CPU are as exact as torch, in every layout, where tiles are partial."""
    config = MatmulConfig(16, 32, 32, 4, 2, scale_sums=sums)
    monkeypatch.setattr(kernel, "packed_tiles", lambda *_: config)
    words, scales, packing, group, zeros, group_of, exact = stacked(
        outputs=96, inputs=160, **{"group": 64, **LAYOUTS[layout]}
    )
    dtype = torch.float16 if sums else torch.bfloat16
    x, bias = torch.randn(7, 160).to(dtype), torch.randn(3, 96).to(dtype)
    wide = expected(x, exact, bias)
    low = expected(x, exact.to(dtype).double(), bias).to(dtype)
    y = grouped_matmul_packed_triton(
        x, words, scales, *packing, group, zeros, group_of, OFFSETS, bias, ROWS, 2
    )
    as_accurate(y, wide, low)
    y = grouped_matmul_packed(
        x, words, scales, packing, group, OFFSETS,
        zeros=zeros, group_of=group_of, bias=bias, rows=ROWS, top_k=2,
    )  # fmt: skip
    as_accurate(y, wide, low)
    assert torch.equal(y[11:], torch.zeros_like(y[11:]))


@pytest.mark.parametrize(("dtype", "along"), [(torch.float32, 0), (torch.float16, 1)])
@pytest.mark.parametrize("tokens", [2, 40, 200])
def test_shipped_configurations(tokens: int, dtype: torch.dtype, along: int) -> None:
    """Of any number of rows, of parts of larger tensors, and without an order or a bias."""
    words, scales, packing, group, zeros, _, exact = stacked(
        2, outputs=72, inputs=96, packing=Packing(4, along), group=64, zeros=True
    )
    offsets = torch.tensor([0, tokens // 2, tokens - 1], dtype=torch.int32)
    parted = torch.stack((words, words + 1), -1)[..., 0]
    x = torch.full((tokens, 200), torch.nan, dtype=dtype)[:, 4:196:2]
    x.copy_(torch.randn(tokens, 96))
    y = grouped_matmul_packed_triton(
        x, parted, scales.mT.contiguous().mT, *packing, group, zeros, None, offsets, None, None, 1
    )
    half = tokens // 2
    wide = torch.cat((x[:half].double() @ exact[0].T, x[half:].double() @ exact[1].T))
    wide[tokens - 1 :] = 0
    within = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(y.double(), wide, rtol=within, atol=within)


def test_what_is_not_finite_stays_in_its_row() -> None:
    """NaN of a token or in an unused expert reaches no other row."""
    words, scales, packing, group, _, _, _ = stacked(outputs=16, inputs=64)
    x = torch.randn(14, 64)

    def multiplied() -> torch.Tensor:
        return grouped_matmul_packed_triton(
            x, words, scales, *packing, group, None, None, OFFSETS, None, None, 1
        )

    clean = multiplied()
    x[1, 3] = torch.nan
    scales[1] = torch.nan
    y = multiplied()
    assert y[1].isnan().all()
    assert torch.equal(y[torch.arange(14) != 1], clean[torch.arange(14) != 1])


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("shape", [(0, 3, 32, 64), (4, 0, 32, 64), (4, 3, 0, 64), (4, 3, 32, 0)])
def test_nothing_to_multiply(shape: tuple[int, ...], bits: int) -> None:
    """Without tokens, experts, outputs or inputs, the product is empty, zeros or the bias."""
    tokens, count, outputs, inputs = shape
    words = torch.zeros(count, outputs, inputs * bits // 32, dtype=torch.int32)
    scales = torch.ones(count, outputs, inputs // 32)
    x, bias = torch.randn(tokens, inputs), torch.randn(count, outputs)
    offsets = torch.full((count + 1,), tokens if count else 0, dtype=torch.int32)
    offsets[0] = 0
    arguments = 32, None, None, offsets, bias, None, 1
    y = grouped_matmul_packed_triton(x, words, scales, bits, 1, None, *arguments)
    expected = grouped_matmul_packed(x, words, scales, Packing(bits), 32, offsets, bias=bias)
    assert torch.equal(y, expected)
    assert y.shape == (tokens, outputs)


def test_bad_input_is_refused() -> None:
    """Arguments that do not fit are named, with the numbers."""
    words, scales, packing, group, _, _, _ = stacked(outputs=16, inputs=64)
    x = torch.randn(11, 64)
    good = {
        "x": x, "words": words, "scales": scales, "packing": packing, "group_size": group,
        "offsets": OFFSETS,
    }  # fmt: skip
    for message, changed in (
        (r"x must have the shape \[any, 64\], got \[11, 60\]", {"x": x[:, :60]}),
        (r"words must have the shape \[any, any, any\]", {"words": words[0]}),
        (r"scales must have the shape \[3, 16, any\], got \[2, 16, 2\]", {"scales": scales[1:]}),
        (r"one column for each group of 32 of 64 inputs", {"scales": scales[..., :1]}),
        (r"a group must have one input or more, got 0", {"group_size": 0}),
        (r"zeros must have the shape \[3, 16, 2\]", {"zeros": torch.zeros(16, 2).byte()}),
        (r"group_of must have the shape \[3, 64\]", {"group_of": torch.zeros(64).int()}),
        (r"2, 3, 4 or 8 bits", {"packing": Packing(5)}),
        (r"8 words of 32 bits hold no whole codes of 3", {"packing": Packing(3)}),
        (r"offsets must have the shape \[4\]", {"offsets": OFFSETS[1:]}),
        (r"offsets must ascend", {"offsets": OFFSETS.flip(0)}),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_matmul_packed(**{**good, **changed})


def test_the_operator_is_one() -> None:
    """It has a schema and a fake, and works with meta tensors."""
    words, scales, packing, group, zeros, group_of, _ = stacked(
        outputs=16, inputs=64, zeros=True, unordered=True
    )
    x, bias = torch.randn(7, 64), torch.randn(3, 16)
    operator = torch.ops.vllm_module.grouped_matmul_packed.default
    torch.library.opcheck(
        operator,
        (x, words, scales, *packing, group, zeros, group_of, OFFSETS, bias, ROWS, 2),
    )
