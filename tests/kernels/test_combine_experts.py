"""The weighted sum of what a token's experts computed, against float64."""

from __future__ import annotations

import mmap
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.kernels.experts import combine_experts as kernel
from vllm_module.kernels.experts.combine_experts import (
    combine_experts,
    combine_experts_reference,
    combine_experts_triton,
)
from vllm_module.kernels.experts.sort_by_expert import sort_by_expert

in_loops: Any = runpy.run_path(str(Path(__file__).with_name("in_loops.py")))["in_loops"]
RUNS = pytest.mark.parametrize(
    "run",
    [combine_experts_reference, combine_experts_triton, in_loops(combine_experts_reference)],
)


def exactly(y, order, offsets, weights) -> torch.Tensor:
    """Add up row by row, in float64."""
    out = torch.zeros(len(weights), y.shape[1], dtype=torch.float64)
    for place in range(int(offsets[-1])):
        row = int(order[place])
        out[row // weights.shape[1]] += y[place].double() * weights.flatten()[row].double()
    return out


@RUNS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("first", "count"), [(0, 6), (2, 3), (6, 0), (5, 1)])
def test_rows_go_back_to_their_tokens(monkeypatch, run, first, count, dtype) -> None:
    """Sums are float64's, rounded once; rows of other ranks' experts count nothing, even as NaN."""
    # Smaller tiles, so that a few features, as the slow interpreter wants, fill several.
    monkeypatch.setattr(kernel, "_TILE", 16)
    experts = torch.randint(0, 6, (9, 3)).int()
    order, offsets = sort_by_expert(experts, first, count)
    y = torch.full((54, 120), torch.nan, dtype=dtype)[::2, 10:114:2]
    y[: offsets[-1]] = torch.randn(int(offsets[-1]), 52).to(dtype)
    weights = torch.rand(3, 9).t()
    weights[~((experts >= first) & (experts < first + count))] = torch.inf
    out = run(y, order, offsets, weights)
    assert (out.shape, out.dtype) == ((9, 52), dtype)
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(out.double(), exactly(y, order, offsets, weights), **tolerance)


@RUNS
def test_what_is_not_finite_stays_in_its_token(run) -> None:
    """NaN in a row that counts is NaN in its token alone."""
    order, offsets = sort_by_expert(torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), 0, 2)
    y, weights = torch.randn(4, 5), torch.rand(2, 2)
    y[0] = torch.nan
    out = run(y, order, offsets, weights)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@RUNS
@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 2, 0), (3, 0, 8)])
def test_nothing_to_combine(run, shape: tuple[int, ...]) -> None:
    """Without tokens or features results are empty; without experts they are zeros."""
    tokens, top_k, features = shape
    order = torch.arange(tokens * top_k, dtype=torch.int32)
    offsets = torch.tensor([0, tokens * top_k], dtype=torch.int32)
    out = run(torch.randn(tokens * top_k, features), order, offsets, torch.rand(tokens, top_k))
    assert torch.equal(out, torch.zeros(tokens, features))


def test_rows_that_are_far_apart() -> None:
    """Rows are found if their offsets exceed 32 bits."""
    apart = 2**30 + 64
    memory = mmap.mmap(-1, 4 * (3 * apart + 64))
    y = torch.frombuffer(memory, dtype=torch.float32).as_strided((4, 32), (apart, 1))
    y.copy_(torch.randn(4, 32))
    order, offsets = torch.tensor([2, 0, 3, 1]).int(), torch.tensor([0, 3]).int()
    arguments = order, offsets, torch.rand(2, 2)
    torch.testing.assert_close(
        combine_experts_triton(y, *arguments), combine_experts_reference(y.clone(), *arguments)
    )


def test_bad_input() -> None:
    """Arguments that do not fit are named, with the numbers."""
    y, order, offsets = torch.randn(6, 4), torch.arange(6).int(), torch.tensor([0, 6]).int()
    weights = torch.rand(3, 2)
    for message, arguments in (
        (r"weights must be torch.float32, got torch.float16", (y, order, offsets, weights.half())),
        (r"y must have the shape \[6, any\], got \[5, 4\]", (y[1:], order, offsets, weights)),
        (r"y must be .*, got torch.float64", (y.double(), order, offsets, weights)),
        (r"order must be torch.int32, got torch.int64", (y, order.long(), offsets, weights)),
        (r"order must have the shape \[6\], got \[5\]", (y, order[1:], offsets, weights)),
        (r"one element more than there are experts, got 0", (y, order, offsets[2:], weights)),
    ):
        with pytest.raises(ValueError, match=message):
            combine_experts(*arguments)


def test_the_operator_is_one() -> None:
    """It has a schema and a fake, and works with meta tensors and torch.compile."""
    y, order, offsets = torch.randn(6, 4), torch.randperm(6).int(), torch.tensor([0, 4]).int()
    arguments = (y, order, offsets, torch.rand(3, 2))
    out = combine_experts(*(tensor.to("meta") for tensor in arguments))
    assert (out.shape, out.dtype, out.device.type) == ((3, 4), torch.float32, "meta")
    torch.library.opcheck(torch.ops.vllm_module.combine_experts.default, arguments)
    compiled = torch.compile(combine_experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), combine_experts(*arguments))
