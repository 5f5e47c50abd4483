"""Operations of a few rows in the loops for a CPU, as tests call them beside plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_module.kernels.experts.few_tokens import takes_few_tokens
from vllm_module.kernels.matmul.products import Products, products
from vllm_module.kernels.rows.compiled_vectors import has_bfloat16


def in_loops(reference: Callable[..., Any]) -> Any:
    """Return a parameter: an operation's function in torch, called where loops were chosen."""

    def run(*arguments: Any) -> Any:
        pytest.importorskip("numba")
        first = arguments[0]
        with torch.inference_mode(), products(Products(pages=True)):
            # float16 and nothing are left to torch.
            assert takes_few_tokens(first) == (first.dtype != torch.float16 and first.numel() > 0)
            return reference(*arguments)

    return pytest.param(run, id=f"{reference.__name__} in loops")


def as_multiplied(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return what the loops multiply rows ``x`` by, of a weight in codes, in float64.

    Where the processor multiplies bfloat16, it is rounded to that for more rows than one of it.
    """
    rounds = x.dtype == torch.bfloat16 and x.numel() > x.shape[-1] and has_bfloat16()
    return weight.float().bfloat16().double() if rounds else weight
