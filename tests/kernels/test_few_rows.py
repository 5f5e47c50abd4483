"""Norms and activations of a few rows in the loops: beside formulas in float64, and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vllm_module.kernels.matmul.products import Products, products
from vllm_module.kernels.rows import act_and_mul as act_and_mul_module
from vllm_module.kernels.rows import few_rows
from vllm_module.kernels.rows import rms_norm as rms_norm_module
from vllm_module.kernels.rows.act_and_mul import gelu_and_mul, silu_and_mul
from vllm_module.kernels.rows.rms_norm import (
    fused_add_rms_norm,
    rms_norm,
    rms_norm_reference,
)

pytest.importorskip("numba")
BOUND = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-7}
SHAPES = [(1,), (1, 5), (7, 64), (2, 3, 513), (1, 12288), (33, 129)]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.fixture(autouse=True)
def _in_loops() -> Iterator[None]:
    with torch.inference_mode(), products(Products(pages=True)):
        yield


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Divide rows of any size among some threads, which few numbers would not gain from."""
    monkeypatch.setattr(few_rows, "_PER_THREAD", 1)  # else one thread takes all of small rows
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
def test_the_norm_written_out(
    dtype: torch.dtype, shape: tuple[int, ...], offset: float | None
) -> None:
    x, residual = (torch.randn(shape).mul(3).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1]).to(dtype)
    assert few_rows.takes_few_rows(x, residual, weight)

    def written_out(x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        normed = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        return normed * (weight.double() + (offset or 0.0))

    close = {"rtol": BOUND[dtype], "atol": 1e-6}
    result = rms_norm(x, weight, 1e-5, offset)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), written_out(x), **close)
    result, total = fused_add_rms_norm(x, residual, weight, 1e-5, offset)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(result.double(), written_out(total), **close)
    differ = result != rms_norm_reference(total, weight, 1e-5, offset)  # a sum in another order
    assert dtype == torch.float32 or differ.float().mean() < 0.02  # 0.25 if it rounds elsewhere


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("strided", ["x", "residual", "weight"])
def test_a_tensor_with_gaps_counts_as_its_copy(strided: str, dtype: torch.dtype) -> None:
    """The loops read rows without gaps. The expected norm is torch's, of copies."""
    given = {"x": torch.randn(6, 40), "residual": torch.randn(6, 40), "weight": torch.randn(40)}
    given = {name: each.to(dtype) for name, each in given.items()}
    whole = given[strided].repeat_interleave(2, -1)
    given[strided] = whole[..., ::2]
    assert not given[strided].is_contiguous()
    x, residual, weight = given.values()
    result, total = fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x.contiguous() + residual.contiguous())
    wide = [each.contiguous().double() for each in (total, weight)]
    expected = F.rms_norm(wide[0], weight.shape, wide[1], 1e-5)
    torch.testing.assert_close(result.double(), expected, rtol=BOUND[dtype], atol=1e-6)
    single = rms_norm(x, weight, 1e-5)
    expected = F.rms_norm(x.contiguous().double(), weight.shape, wide[1], 1e-5)
    torch.testing.assert_close(single.double(), expected, rtol=BOUND[dtype], atol=1e-6)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", [(2,), (1, 10), (7, 64), (2, 3, 514), (1, 24576)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_beside_torch(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).mul(5).to(dtype)
    assert few_rows.takes_few_rows(x)
    gate, up = x.double().chunk(2, -1)
    result = silu_and_mul(x) if name == "silu" else gelu_and_mul(x, "tanh")
    assert result.dtype == dtype
    expected = ACTIVATIONS[name](gate) * up
    torch.testing.assert_close(result.double(), expected, rtol=BOUND[dtype], atol=1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_any_number_is_activated(name: str) -> None:
    """All bfloat16, among them infinities, NaN and the least ones, as torch computes them."""
    gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.stack((gate.float(), torch.ones(1 << 16)), -1)
    for rows in x.split(1 << 13):
        result = few_rows.activate_few_rows(rows.contiguous(), name)
        expected = ACTIVATIONS[name](rows[:, :1])
        torch.testing.assert_close(result, expected, rtol=2e-6, atol=1e-6, equal_nan=True)


def test_any_sum_is_rounded_as_torch_does() -> None:
    """NaN stays NaN, and a sum in the middle of two bfloat16 becomes the even one."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 15), 1 << 15, (2, 64, 1024), dtype=torch.int16, generator=draw)
    x, residual = bits.view(torch.bfloat16)
    near = x.clone()
    near[32:].view(torch.int16).add_(torch.randint(-300, 300, (32, 1024), generator=draw).short())
    residual = torch.where(torch.arange(64)[:, None] < 32, residual, near)
    _, total = few_rows.norm_few_rows(x.contiguous(), residual, x[0].contiguous(), 1e-5, 0.0)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0, equal_nan=True)


def test_what_the_loops_do_not_take() -> None:
    x = torch.randn(4, 8)
    assert few_rows.takes_few_rows(x, x)
    for other in (x.half(), x.double(), x.T, x[:, :4], x.new_empty(0, 8), x.to("meta")):
        assert not few_rows.takes_few_rows(other)
    assert not few_rows.takes_few_rows(x, x.bfloat16())
    assert not few_rows.takes_few_rows(torch.empty(1 << 9, (1 << 8) + 1))
    with torch.inference_mode(mode=False):
        assert not few_rows.takes_few_rows(x)


def test_they_are_used_where_they_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, called = torch.randn(4, 8), torch.ones(8), list[str]()
    for name in ("norm_few_rows", "activate_few_rows"):
        for module in (rms_norm_module, act_and_mul_module):
            if hasattr(module, name):
                own = getattr(few_rows, name)

                def noted(*given: Any, own: Any = own, name: str = name) -> Any:
                    called.append(name)
                    return own(*given)

                monkeypatch.setattr(module, name, noted)  # to see which way was taken

    def compute() -> list[str]:
        called.clear()
        rms_norm(x, weight, 1e-5), fused_add_rms_norm(x, x, weight, 1e-5)
        silu_and_mul(x), gelu_and_mul(x, "tanh"), gelu_and_mul(x)
        return list(called)

    assert compute() == ["norm_few_rows"] * 2 + ["activate_few_rows"] * 2
    with products(Products()):
        assert not compute()
