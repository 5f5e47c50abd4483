"""Sorting rows by expert, against sorting lists."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.kernels.experts import sort_by_expert as kernel
from vllm_module.kernels.experts.sort_by_expert import (
    sort_by_expert,
    sort_by_expert_reference,
    sort_by_expert_triton,
)

in_loops: Any = runpy.run_path(str(Path(__file__).with_name("in_loops.py")))["in_loops"]


@given(
    st.integers(0, 40),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(0, 6),
    st.integers(0, 7),
    st.integers(0, 2**16),
)
@settings(max_examples=20)
def test_any_experts_of_any_rank(tokens, top_k, experts, first, count, seed) -> None:
    """Rows are in the order of this rank's experts, in their own order within each; others follow.

    Experts without rows, ranks without experts, and padding of -1 are no exceptions.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(-1, experts, (top_k, tokens), generator=generator).int().t()
    flat = chosen.flatten().tolist()
    own = range(first, first + count)
    expected = sorted(range(len(flat)), key=lambda r: flat[r] if flat[r] in own else 99)
    starts = [sum(e in own and e < expert for e in flat) for expert in (*own, first + count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_TILE", 32)  # several steps
        (looped,) = in_loops(sort_by_expert_reference).values
        for run in (sort_by_expert, sort_by_expert_reference, sort_by_expert_triton, looped):
            order, offsets = run(chosen, first, count)
            assert (order.dtype, offsets.dtype) == (torch.int32, torch.int32)
            assert order.tolist() == expected
            assert offsets.tolist() == starts


def test_bad_input() -> None:
    """Other shapes, dtypes and negative numbers are refused."""
    with pytest.raises(ValueError, match=r"experts must have the shape \[any, any\], got \[3\]"):
        sort_by_expert(torch.zeros(3, dtype=torch.int32), 0, 1)
    with pytest.raises(ValueError, match=r"experts must be torch.int32, got torch.int64"):
        sort_by_expert(torch.zeros(3, 1, dtype=torch.int64), 0, 1)
    with pytest.raises(ValueError, match="must not be negative, got 0 and -1"):
        sort_by_expert(torch.zeros(3, 1, dtype=torch.int32), 0, -1)


def test_the_operator_is_one() -> None:
    """It has a schema and a fake, and works with meta tensors and torch.compile."""
    experts = torch.tensor([[1, 0], [2, 1]], dtype=torch.int32)
    order, offsets = sort_by_expert(experts.to("meta"), 0, 3)
    assert (order.shape, offsets.shape, order.dtype) == ((4,), (4,), torch.int32)
    for one in (experts, experts.t()):
        torch.library.opcheck(torch.ops.vllm_module.sort_by_expert.default, (one, 1, 2))
    compiled = torch.compile(sort_by_expert, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(experts, 0, 3), sort_by_expert(experts, 0, 3), strict=True):
        assert torch.equal(one, other)
