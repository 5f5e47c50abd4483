"""Products of few rows: a kernel's beside torch's, and when it is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vllm_module.kernels.choices import trying
from vllm_module.kernels.matmul import few_rows_matmul as module
from vllm_module.kernels.matmul.few_rows_matmul import (
    KERNEL,
    FewRowsConfig,
    config_of,
    few_rows_matmul,
)

SMALL = FewRowsConfig(16, 32, 4, 2)


@given(
    st.integers(1, 16),
    st.sampled_from([1, 15, 16, 17, 50]),
    st.sampled_from([16, 32, 48, 272]),
    st.booleans(),
)
@settings(max_examples=20)
def test_products_are_as_accurate_as_torchs(as_accurate, m: int, n: int, k: int, biased) -> None:
    """With splits and without, for edges of tiles and of steps, in float16."""
    torch.manual_seed(m * n + k)
    x, weight = torch.randn(m, k).half(), torch.randn(n, k).half()
    bias = torch.randn(n).half() if biased else None
    y = module.few_rows_matmul_triton(x, weight, bias, *SMALL)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    as_accurate(y, exact, F.linear(x, weight, bias))


def test_a_row_does_not_depend_on_the_others() -> None:
    """A row alone has the bits that it has among 16, and strides do not matter."""
    x, weight = torch.randn(300, 16).half().t(), torch.randn(40, 300).half()
    whole = module.few_rows_matmul_triton(x, weight, None, *SMALL)
    for row in (0, 7, 15):
        alone = module.few_rows_matmul_triton(x[row : row + 1], weight, None, *SMALL)
        assert torch.equal(alone[0], whole[row])


class OnGpu(torch.Tensor):
    is_cuda = True


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype).as_subclass(OnGpu)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "taken"),
    [
        ((1, 32), (8, 32), None, True),
        ((2, 8, 32), (8, 32), (8,), True),
        ((17, 32), (8, 32), None, False),
        ((1, 24), (8, 24), None, False),
        ((1, 32), (8, 48), None, False),
        ((1, 32), (8, 32), (7,), False),
    ],
)
def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch, x, weight, bias, taken) -> None:
    """Up to 16 rows of whole 16 features; all else, and all errors, are torch's."""
    monkeypatch.setattr(module, "capability", lambda tensor: (9, 0))
    given = on_gpu(*x), on_gpu(*weight), None if bias is None else on_gpu(*bias)
    with torch.no_grad(), trying({KERNEL: "few rows"}):
        assert (config_of(*given) is not None) == taken
        assert config_of(given[0].float(), *given[1:]) is None
    with torch.no_grad():
        assert config_of(*given) is None, "torch's product is the default"
    with trying({KERNEL: "few rows"}):
        assert config_of(*given) is None, "a derivative may be needed"


def test_arguments_that_do_not_fit_are_refused() -> None:
    """Too many rows, another dtype and other features are named."""
    x: Any = torch.ones(17, 32)
    with pytest.raises(ValueError, match="at most 16 rows, got 17"):
        few_rows_matmul(x, torch.ones(8, 32), None, SMALL)
    with pytest.raises(ValueError, match=r"weight must have the shape \[any, 32\]"):
        few_rows_matmul(x[:1], torch.ones(8, 31), None, SMALL)
    with pytest.raises(ValueError, match="bias must be"):
        few_rows_matmul(x[:1], torch.ones(8, 32), torch.ones(8).half(), SMALL)
    assert torch.equal(
        few_rows_matmul(x[:3], torch.ones(8, 32), None, SMALL), torch.full((3, 8), 32.0)
    )
