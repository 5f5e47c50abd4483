"""Products of few rows with weights in floats, in the loops for a CPU, beside float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vllm_module.kernels.matmul import code_rows_matmul as home
from vllm_module.kernels.matmul import compiled_rows
from vllm_module.kernels.matmul import linear as linears
from vllm_module.kernels.matmul.code_rows import float_rows
from vllm_module.kernels.matmul.code_rows_matmul import code_rows_matmul
from vllm_module.kernels.matmul.linear import fastest_float_rows, linear
from vllm_module.kernels.matmul.products import Products, products

pytest.importorskip("numba")
DTYPES = torch.float32, torch.bfloat16, torch.float16
CHOSEN = Products(floats=range(1, 65))


@pytest.fixture(autouse=True)
def _small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests multiply by small weights, to be quick.
    monkeypatch.setattr(linears, "_LARGE_WEIGHT", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of rows that the loops have multiplied."""
    seen: list[int] = []
    product = home._product

    def counted(x: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(x.numel() // x.shape[-1])
        return product(x, *others)

    # Results do not tell what multiplied.
    monkeypatch.setattr(home, "_product", counted)
    return seen


def assert_within(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> None:
    """Compare with float64: sums of n products in float32, and one rounding of the result."""
    x, weight = x.double().view(-1, x.shape[-1]), weight.double()
    exact, most = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        exact, most = exact + bias.double(), most + bias.double().abs()
    bound = (x.shape[-1] + 5) * 2.0**-24 * most
    bound += exact.abs() * torch.finfo(y.dtype).eps / 2 + torch.finfo(y.dtype).smallest_normal
    assert bool(((y.double().view(exact.shape) - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 31, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 3), (7, 33), (64, 37), (96, 136), (515, 130)])
def test_products_are_within_the_bound(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int, calls: list[int]
) -> None:
    """With a bias and without, for inputs of any strides, and a weight whose rows are cut."""
    wide = torch.randn(outputs, inputs + 3).to(dtype)
    x, bias = torch.randn(inputs, rows).to(dtype).T, torch.randn(outputs).to(dtype)
    with torch.inference_mode(), products(CHOSEN):
        for weight in (wide[:, 3:].contiguous(), wide[:, 3:]):  # the latter is for torch
            for added in (None, bias):
                y = linear(x, weight, added)
                assert (y.shape, y.dtype) == ((rows, outputs), dtype)
                assert_within(y, x, weight, added)
        assert linear(x.view(1, rows, 1, inputs), weight).shape == (1, rows, 1, outputs)
    assert calls == [rows] * 2


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("rows", [1, 5])
def test_every_number_of_16_bits_is_read_as_torch_reads_it(dtype: torch.dtype, rows: int) -> None:
    """Subnormal numbers, infinities and NaN among them."""
    weight = torch.arange(1 << 16).to(torch.uint16).view(dtype).view(-1, 1)
    described = float_rows(weight)
    assert described is not None
    y = code_rows_matmul(torch.ones(rows, 1), described)
    expected = weight.float().T.expand(rows, -1)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [2, 9])
def test_bfloat16_has_its_numbers_where_32_are_multiplied_at_once(rows: int) -> None:
    """All that are finite; a processor with an instruction for that takes subnormal ones for 0."""
    numbers = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    weight = torch.where(numbers.isfinite(), numbers, 0).view(-1, 32)
    described = float_rows(weight)
    assert described is not None
    for first in range(0, 32, rows):
        x = torch.eye(32, dtype=torch.bfloat16)[first : first + rows]
        y, expected = code_rows_matmul(x, described), weight[:, first : first + rows].T
        normal = expected.abs() >= torch.finfo(torch.bfloat16).smallest_normal
        assert y[normal].tolist() == expected[normal].tolist()
        assert bool(((y == expected) | (y == 0))[~normal].all())


def test_what_is_not_for_the_loops_is_computed_or_refused_as_by_torch(calls: list[int]) -> None:
    """Derivatives, autocast, other dtypes and shapes, more rows than chosen, and no choice."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(5, 8)
    with products(CHOSEN):
        linear(x, weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1))
    with torch.inference_mode():
        linear(x, weight)
        cases = [
            (torch.randn(65, 8), weight, None),
            (torch.randn(0, 8), weight, None),
            (torch.randn(3, 8), torch.randn(8), None),
            (torch.randn(3, 8).double(), weight.double(), None),
            (torch.randn(3, 7), weight, None),
            (torch.randn(3, 8).bfloat16(), weight, None),
            (torch.randn(3, 8), weight, torch.ones(1)),
            (torch.randn(3, 8), weight, torch.ones(5).double()),
            (torch.randn(3, 8), weight, torch.ones(4)),
        ]
        for given in cases:
            outcomes = []
            for way in (F.linear, linear):
                with products(CHOSEN):
                    try:
                        outcomes.append(way(*given))
                    except RuntimeError as error:
                        outcomes.append(str(error))
            assert type(outcomes[0]) is type(outcomes[1])
            assert str(outcomes[0]) == str(outcomes[1])
        with products(CHOSEN), torch.autocast("cpu"):
            assert linear(torch.randn(3, 8), weight).dtype == torch.bfloat16
    assert calls == []


def test_a_weight_that_is_written_in_place_is_read_anew(calls: list[int]) -> None:
    """What the loops are told of a weight is its address, and not its numbers."""
    weight, x = torch.zeros(6, 4), torch.randn(2, 4)
    with torch.inference_mode(), products(CHOSEN):
        assert not linear(x, weight).any()
        for _ in range(3):
            weight.normal_()
            assert_within(linear(x, weight), x, weight)
    assert calls == [2] * 4


@pytest.mark.parametrize(
    ("faster", "expected"),
    [
        (set(), range(0)),
        ({1}, range(1, 2)),
        ({1, 3, 8, 32, 128}, range(1, 129)),
        ({3, 8}, range(3, 9)),
        ({1, 8, 32}, range(1, 2)),
        ({128}, range(128, 129)),
    ],
)
def test_the_loops_are_chosen_for_the_rows_in_which_they_are_faster(
    faster: set[int], expected: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test's; the numbers of rows follow each other."""
    monkeypatch.setattr(linears, "_WEIGHTS", (2, 8, 8))  # quick to multiply by

    def seconds(work: Any) -> float:
        way, (x, _) = work.func, work.args
        work()
        return 0.9 if way.__name__ == "loops" and len(x) in faster else 1.0

    assert fastest_float_rows(torch.float32, Products(), seconds) == expected


@pytest.fixture
def _no_loops_are_compiled() -> Iterator[None]:
    home._loops.cache_clear()
    compiled_rows.compiled_multiply.cache_clear()
    yield
    home._loops.cache_clear()
    compiled_rows.compiled_multiply.cache_clear()


@pytest.mark.usefixtures("_no_loops_are_compiled")
@pytest.mark.parametrize("missing", ["numba", "folder"])
def test_without_numba_or_its_cache_nothing_is_chosen(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling at each start would take seconds."""
    if missing == "numba":
        # An environment without the extra.
        monkeypatch.setitem(sys.modules, "numba", None)
    else:
        # A machine where no folder can be written.
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(Path(__file__) / "folder"))
    for dtype in DTYPES:
        assert not fastest_float_rows(dtype, Products(), lambda _: pytest.fail("it was measured"))
    described = float_rows(torch.ones(1, 8))
    assert described is not None
    with pytest.raises(ImportError, match=r"pip install numba|NUMBA_CACHE_DIR"):
        code_rows_matmul(torch.ones(1, 8), described)
