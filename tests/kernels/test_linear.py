"""Products by oneDNN and by torch differ in speed alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vllm_module.kernels.matmul import linear as home
from vllm_module.kernels.matmul.linear import fastest_products, linear
from vllm_module.kernels.matmul.products import Products, products

ONEDNN = Products(one=True, few=True, many=True)


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch) -> Iterator[None]:
    """Send all products to oneDNN, small ones too, in inference mode."""
    monkeypatch.setattr(home, "_LARGE", 0)
    with torch.inference_mode(), products(ONEDNN):
        yield


def cut(shape: tuple[int, ...], step: int, generator: torch.Generator) -> torch.Tensor:
    """Return normal numbers that are every ``step``-th of a larger tensor's last dimension."""
    *outer, last = shape
    return torch.randn(*outer, last * step, generator=generator)[..., ::step]


@given(
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 70),
    st.integers(0, 70),
    st.booleans(),
    st.integers(1, 2),
    st.booleans(),
)
@settings(suppress_health_check=["function_scoped_fixture"])
def test_any_shape_and_strides(outer, columns, rows, biased, step, transposed) -> None:
    """The result is as near to float64 as torch's, for empty, cut or transposed tensors too."""
    generator = torch.Generator().manual_seed(columns * 71 + rows)
    x = cut((*outer, columns), step, generator)
    weight = cut((rows, columns), step, generator)
    if transposed:
        weight = weight.t().contiguous().t()
    bias = cut((rows,), step, generator) if biased else None
    y = linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert y.shape == exact.shape
    assert y.dtype == torch.float32
    error, torchs = ((each - exact).norm() for each in (y, F.linear(x, weight, bias)))
    assert error <= 3 * torchs + 1e-6 * exact.norm()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_onednn_is_what_multiplies(monkeypatch) -> None:
    """oneDNN is used in float32 on the CPU, and only in inference mode."""
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    calls = []
    monkeypatch.setattr(home.F, "linear", lambda *args: calls.append(args))
    linear(x, weight)
    assert not calls
    linear(x.double(), weight.double())
    linear(x.bfloat16(), weight.bfloat16())
    linear(x.to("meta"), weight.to("meta"))
    assert len(calls) == 3
    with products(Products()):
        linear(x, weight)
    assert len(calls) == 4
    calls.pop()
    with torch.inference_mode(False):
        linear(x.clone(), weight.clone())
    with torch.autocast("cpu", torch.bfloat16):
        linear(x, weight)
    linear(x.to_sparse(), weight)
    linear(x, weight.to_sparse_csr())
    assert len(calls) == 7
    torch.backends.mkldnn.enabled = False
    try:
        linear(x, weight)
    finally:
        torch.backends.mkldnn.enabled = True
    assert len(calls) == 8


def test_few_numbers_of_rows_are_multiplied() -> None:
    """Prompts of any length share few programs, with little padding."""
    sizes = {rows: home._padded(rows) for rows in range(1, 4097)}
    assert all(rows <= padded for rows, padded in sizes.items())
    assert all(padded <= max(8, 1.125 * rows + 7) for rows, padded in sizes.items())
    assert len(set(sizes.values())) <= 64
    assert [sizes[rows] for rows in (1, 2, 8, 64, 256, 2048)] == [1, 2, 8, 64, 256, 2048]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch itself
@torch.inference_mode(False)
def test_derivatives() -> None:
    """Derivatives are torch's, backward and forward."""
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    for asked in (x, weight, bias):
        asked.requires_grad_()
        linear(x, weight, bias).sum().backward()
        assert asked.grad is not None
        asked.requires_grad_(False)
    with torch.no_grad():
        (_, tangent) = torch.func.jvp(lambda x: linear(x, weight), (x,), (torch.ones(3, 4),))
    torch.testing.assert_close(tangent, torch.ones(3, 4) @ weight.t())


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, weight = torch.randn(40, 100), torch.randn(60, 100)
    x[3, 7], x[5, 99] = torch.nan, torch.inf
    y = linear(x, weight)
    assert not y[[3, 5]].isfinite().any()
    assert y[[row for row in range(40) if row not in (3, 5)]].isfinite().all()


@pytest.mark.parametrize(
    "shapes",
    [((3, 4), (5, 6)), ((3, 4), (5, 4), (6,)), ((3, 4), (5, 4), (5, 1)), ((3, 4), (2, 5, 4))],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_torch(shapes) -> None:
    with pytest.raises(RuntimeError):
        linear(*(torch.zeros(shape) for shape in shapes))


def test_other_dtypes_and_devices_are_refused_by_torch() -> None:
    x, weight = torch.zeros(3, 4), torch.zeros(5, 4)
    with pytest.raises(RuntimeError):
        linear(x, weight.double())
    with pytest.raises(RuntimeError):
        linear(x, weight, torch.zeros(5, dtype=torch.float64))


@torch.inference_mode(False)
def test_it_compiles() -> None:
    """torch.compile traces it without a graph break."""
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), F.linear(x, weight))


def test_strides_of_the_bias_alone() -> None:
    """A bias that is a view of a larger tensor is added correctly."""
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(10)[::2]
    torch.testing.assert_close(linear(x, weight, bias), x @ weight.t() + bias)


@pytest.mark.parametrize("rows", [1, 15, 40])
def test_rows_are_padded(monkeypatch, rows) -> None:
    """Rows are padded to a few sizes, and the output has the rows of the input."""
    x, weight, seen = torch.randn(rows, 4), torch.randn(5, 4), []

    def padded(count: int) -> int:
        seen.append(count)
        return 64

    monkeypatch.setattr(home, "_padded", padded)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    assert seen == [rows]


def test_a_bias_of_one_is_for_torch() -> None:
    """A bias of one element is broadcast or refused, as in torch."""
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    outcomes = []
    for way in (F.linear, linear):
        try:
            outcomes.append(way(x, weight, torch.ones(1)))
        except RuntimeError as error:
            outcomes.append(str(error))
    assert str(outcomes[0]) == str(outcomes[1])


@pytest.mark.parametrize("faster", [set(), {1}, {16}, {128}, {1, 16}, {16, 128}, {1, 16, 128}])
def test_each_class_of_rows_goes_to_the_faster_library(faster, monkeypatch) -> None:
    """By a clock of the test's, oneDNN gets the classes of rows in which it takes less time."""
    monkeypatch.setattr(home, "_WEIGHTS", (2, 8, 8))

    def seconds(work) -> float:
        way, (x, _) = work.func, work.args
        work()
        return 1.0 if way is F.linear else 0.8 if len(x) in faster else 0.95

    chosen = fastest_products(seconds)
    assert chosen == Products(*(rows in faster for rows in (1, 16, 128)))
    by_rows = {1: 1, 2: 16, 64: 16, 65: 128, 4096: 128}
    assert {rows: chosen.use_onednn(rows) for rows in by_rows} == {
        rows: tried in faster for rows, tried in by_rows.items()
    }


def test_one_slow_measurement_decides_nothing(monkeypatch) -> None:
    """The least of several times counts, so a process that takes the CPU meanwhile does not."""
    monkeypatch.setattr(home, "_WEIGHTS", (2, 8, 8))
    count = 0

    def seconds(work) -> float:
        nonlocal count
        count += 1
        return 9.0 if count % 5 == 0 else 1.0 if work.func is F.linear else 0.5

    assert fastest_products(seconds) == ONEDNN


def test_nothing_is_measured_where_onednn_is_off() -> None:
    """Torch computes all products where oneDNN is switched off."""
    torch.backends.mkldnn.enabled = False
    try:
        assert fastest_products(lambda _: pytest.fail("it was measured")) == Products()
    finally:
        torch.backends.mkldnn.enabled = True


def test_a_choice_is_its_threads_own() -> None:
    """Another thread, and what comes after the context, multiply as before."""
    seen = []
    thread = threading.Thread(target=lambda: seen.append(home.products_in_use.get()))
    thread.start()
    thread.join()
    with products(Products(few=True)):
        seen.append(home.products_in_use.get())
    assert [*seen, home.products_in_use.get()] == [Products(), Products(few=True), ONEDNN]
