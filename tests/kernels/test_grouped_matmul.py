"""Products of sorted rows with their experts' weights, against float64."""

from __future__ import annotations

import mmap
import runpy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.kernels import dtypes as formats
from vllm_module.kernels.choices import trying
from vllm_module.kernels.experts import grouped_matmul as kernel
from vllm_module.kernels.experts.grouped_matmul import (
    grouped_matmul,
    grouped_matmul_reference,
    grouped_matmul_triton,
)
from vllm_module.kernels.experts.grouped_tile import tiles_of
from vllm_module.kernels.experts.sort_by_expert import sort_by_expert
from vllm_module.kernels.matmul.matmul_configurations import (
    MatmulConfig,
    ScaledWeight,
    grouped_config_of,
)
from vllm_module.kernels.rows.quantize import dequantize, quantize, quantize_static

_listed = runpy.run_path(str(Path(__file__).parent / "compilation" / "configurations.py"))
grouped_configurations: Any = _listed["grouped_configurations"]
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def offsets_of(*counts: int) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def quantized(wide: torch.Tensor, block: tuple[int, int], dtype: torch.dtype):
    """Quantize each matrix of ``wide [count, rows, columns]``."""
    count, rows, columns = wide.shape
    weight = torch.empty(wide.shape, dtype=dtype)
    scale = torch.empty(count, -(-rows // block[0]), -(-columns // block[1]))
    for matrices in zip(wide, weight, scale, strict=True):
        quantize(*matrices, block)
    return weight, scale


def widened(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return numbers times scales, in float64."""
    each = scale.double().repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    return weight.double() * each[:, : weight.shape[1], : weight.shape[2]]


def exactly(x, weight, offsets, bias=None, rows=None, top_k=1) -> torch.Tensor:
    """Multiply row by row, in float64 or the dtype of ``x``."""
    y = torch.zeros(len(x) * top_k, weight.shape[1], dtype=x.dtype)
    for expert, (first, last) in enumerate(pairwise(offsets.tolist())):
        for row in range(first, last):
            token = row if rows is None else int(rows[row]) // top_k
            y[row] = weight[expert] @ x[token]
            if bias is not None:
                y[row] += bias[expert]
    return y


def launched(
    x,
    weight,
    offsets,
    bias=None,
    rows=None,
    top_k=1,
    scale=None,
    block=None,
    input_scale=None,
    quantize_input=True,
    dtype=None,
) -> torch.Tensor:
    block = (1, max(1, weight.shape[2])) if block is None else block
    dtype = dtype or x.dtype
    return grouped_matmul_triton(
        x, weight, offsets, bias, rows, top_k, scale, *block, input_scale, quantize_input, dtype
    )


@pytest.fixture
def tile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the rows of a tile, with few columns, and how it is loaded."""
    choose = kernel.grouped_config_of

    def use(rows: int, way: str = "pointers") -> None:
        # The choice depends on sizes that the slow interpreter cannot have.
        monkeypatch.setattr(
            kernel,
            "grouped_config_of",
            lambda *product: MatmulConfig(rows, 16, min(choose(*product).depth, 32), 4, 2, way=way),
        )

    return use


@pytest.mark.parametrize(
    ("rows_of_tile", "counts", "dtype"),
    [
        (16, (5, 0, 1, 18), torch.float32),
        (16, (0, 24, 0, 0), torch.float16),
        (16, (0, 0, 7, 0), torch.bfloat16),
        (64, (5, 0, 1, 18), torch.bfloat16),
        (64, (5, 0, 1, 16), torch.float16),
        (64, (0, 24, 0, 0), torch.float32),
    ],
)
def test_each_row_meets_its_expert(as_accurate, tile, rows_of_tile, counts, dtype) -> None:
    """Rows are as exact as torch's, however they are spread; those beyond are zeros.

    Tokens, weights and biases are parts of larger tensors full of NaN, and sizes are uneven.
    """
    tile(rows_of_tile)
    x = torch.full((20, 90), torch.nan, dtype=dtype)[1::2, 3:80:2][:8]
    x.copy_(torch.randn(x.shape))
    weight = torch.full((5, 60, 50), torch.nan, dtype=dtype)[1:, :39, 2:44].transpose(1, 2)
    weight.copy_(torch.randn(weight.shape))
    bias = torch.full((4, 84), torch.nan, dtype=dtype)[:, ::2]
    bias.copy_(torch.randn(bias.shape))
    offsets, rows = offsets_of(*counts), torch.randperm(24).int()
    y = launched(x, weight, offsets, bias, rows, 3)
    assert (y.dtype, y.shape) == (dtype, (24, 42))
    exact = exactly(x.double(), weight.double(), offsets, bias.double(), rows, 3)
    as_accurate(y, exact, grouped_matmul(x, weight, offsets, bias=bias, rows=rows, top_k=3))
    assert torch.equal(y[sum(counts) :], torch.zeros(24 - sum(counts), 42, dtype=dtype))


WEIGHTS = [  # dtype, block of the weight, how the input is quantized
    (FP8, (1, 64), "dynamic"),
    (FP8, (24, 64), "static"),
    (FP8, (16, 32), "dynamic"),
    (FP8, (20, 24), "given"),
    (FP8, (1, 64), "given"),
    (FP8, (16, 32), "static"),
    (FP8, (16, 32), "none"),
    (FP8, (1, 64), "none"),
    (INT8, (1, 64), "dynamic"),
    (INT8, (7, 33), "none"),
]


@pytest.mark.parametrize(
    ("rows_of_tile", "wide", "described"),
    [
        (16, torch.float32, False),
        (16, torch.float16, True),
        (64, torch.bfloat16, False),
        (64, torch.bfloat16, True),
    ],
)
@pytest.mark.parametrize(("dtype", "block", "how"), WEIGHTS)
def test_eight_bit_weights(
    as_accurate, tile, rows_of_tile, dtype, block, how, wide, described
) -> None:
    """Each way of scaling weights and tokens is as exact as torch in the output's dtype."""
    tile(rows_of_tile, described)
    weight, scale = quantized(torch.randn(3, 24, 64), block, dtype)
    x, bias = torch.randn(6, 64).to(wide), torch.randn(3, 24).to(wide)
    x[0] *= 100
    offsets, rows = offsets_of(4, 0, 7), torch.randperm(12).int()
    shared, numbers, given = (1, block[1]), x, None
    exact_x = x.double()
    if how != "none" and dtype == FP8:
        narrow, scales = quantized(x[None], shared, FP8)
        if how == "static":
            given = x.abs().max().float() / 448
            scales = given.expand(scales.shape).contiguous()
            quantize_static(x, narrow[0], scales[0], shared)
        if how == "given":
            numbers, given = narrow[0], scales[0]
        exact_x = widened(narrow, scales, shared)[0]
    arguments = (weight, offsets, bias, rows, 2, scale, block, given, how != "none", wide)
    y = launched(numbers, *arguments)
    exact = exactly(exact_x, widened(weight, scale, block), offsets, bias.double(), rows, 2)
    low = torch.stack([dequantize(*one, block, wide) for one in zip(weight, scale, strict=True)])
    as_accurate(y, exact, exactly(exact_x.to(wide), low, offsets, bias, rows, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_a_descriptor_loads(as_accurate, tile, monkeypatch, dtype) -> None:
    """A tile that ends beyond an expert's outputs, or all of them, writes only its own ones.

    Weights whose rows are not whole 16 bytes apart are loaded by pointers.
    """
    tile(16, "descriptors")
    x, offsets = torch.randn(9, 40).to(dtype), offsets_of(4, 0, 3)
    made = []
    descriptor = kernel._descriptor
    monkeypatch.setattr(kernel, "_descriptor", lambda *a: made.append(descriptor(*a)) or made[-1])
    for features in (40, 37):
        weight = torch.full((3, 21, 48), torch.nan, dtype=dtype)[..., :features]
        weight.copy_(torch.randn(weight.shape))
        weight = weight if features == 40 else weight.contiguous()
        part = x[:, :features]
        y = launched(part, weight, offsets)
        exact = exactly(part.double(), weight.double(), offsets)
        as_accurate(y, exact, grouped_matmul(part, weight, offsets))
    assert made[0] is not None
    assert made[1] is None


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [(1, 2880), (128, 128), (64, 64)])
def test_configurations_list_what_any_batch_meets(block: tuple[int, int], dtype) -> None:
    """Rows of a bucket meet one configuration, which is listed with the bucket's other ones."""
    weights = ScaledWeight(1536, 2880, block, dtype, experts=32)
    x = torch.empty(0, dtype=dtype)
    by_bucket: dict[int, dict[str, MatmulConfig]] = {}
    listed = grouped_configurations(weights)
    for each in listed:
        by_bucket.setdefault(each.tokens, {})[each.name] = each.config
    assert len(listed) == len({(each.case, each.name) for each in listed})
    assert list(by_bucket) == [512, 1024, 2048, 4096]
    described = {most for most, named in by_bucket.items() if next(iter(named)) != "tiles"}
    scaled = block == (64, 64)  # by pointers, with smaller steps or tiles of fewer rows
    assert described == (set() if dtype == torch.float32 or scaled else {4096})
    for rows in range(1, 8000, 37):
        bucket = next((most for most in by_bucket if rows <= most), 4096)
        for name, config in by_bucket[bucket].items() if rows % 5 == 0 else ():
            with trying({"grouped_matmul": name}):
                assert grouped_config_of(rows, weights, x) == config
        assert grouped_config_of(rows, weights, x) == next(iter(by_bucket[bucket].values()))


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("block", [None, (5, 7)])
def test_the_cpu_dequantizes_an_expert_at_a_time(block, dtype: torch.dtype) -> None:
    """On the CPU tokens are not quantized; those given in FP8 are dequantized, as the weights."""
    shared = block or (1, 24)
    weight, scale = quantized(torch.randn(3, 20, 24), shared, dtype)
    x, offsets = torch.randn(9, 24), offsets_of(2, 0, 5)
    exact = exactly(x.double(), widened(weight, scale, shared), offsets)
    y = grouped_matmul(x, weight, offsets, scale=scale, block=block)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-4)
    if dtype == FP8:
        (narrow,), (scales,) = quantized(x[None], (1, shared[1]), FP8)
        exact_x = widened(narrow[None], scales[None], (1, shared[1]))[0]
        exact = exactly(exact_x, widened(weight, scale, shared), offsets)
        y = grouped_matmul(
            narrow, weight, offsets, scale=scale, block=block, input_scale=scales, dtype=x.dtype
        )
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-4)


def test_the_cpu_calls_torch_once_for_each_expert_with_rows(monkeypatch) -> None:
    """Experts without rows take no product, and those of many rows take one."""
    products = []
    linear = kernel.linear
    # Counted: how many products there are shows in no result.
    monkeypatch.setattr(
        kernel, "linear", lambda x, *rest: products.append(len(x)) or linear(x, *rest)
    )
    grouped_matmul(torch.randn(70, 8), torch.randn(5, 4, 8), offsets_of(0, 60, 0, 9, 0))
    assert products == [60, 9]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(0, 9),
    st.integers(1, 70),
    st.integers(1, 50),
    st.sampled_from([None, (FP8, True), (FP8, False), (INT8, False)]),
    st.tuples(st.integers(1, 50), st.integers(1, 80)),
)
@settings(max_examples=8)
def test_any_sizes(counts, others, outputs, inputs, how, block) -> None:
    """With the shipped configurations, no size has to divide another."""
    offsets, length = offsets_of(*counts), sum(counts) + others
    x, wide = torch.randn(length, inputs), torch.randn(len(counts), outputs, inputs)
    if how is None:
        y, exact_x, weight = launched(x, wide, offsets), x.double(), wide.double()
    else:
        weight, scale = quantized(wide, block, how[0])
        y = launched(x, weight, offsets, None, None, 1, scale, block, None, how[1])
        weight, exact_x = widened(weight, scale, block), x.double()
        if how[1]:
            exact_x = widened(*quantized(x[None], (1, block[1]), FP8), (1, block[1]))[0]
    exact = exactly(exact_x, weight, offsets)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-4 * inputs**0.5)


@given(st.lists(st.integers(0, 300), max_size=20), st.integers(0, 300), st.sampled_from([16, 128]))
def test_there_are_programs_for_every_tile(counts, others, rows) -> None:
    """However rows are spread over experts, the tiles they need are at most those launched."""
    needed = sum(-(-n // rows) for n in (*counts, others))
    assert needed <= tiles_of(sum(counts) + others, len(counts), rows)


@pytest.mark.parametrize("rounds", [None, False, True])
def test_what_is_not_finite_stays_in_its_row(rounds: bool | None) -> None:
    """NaN of a token, of an unused weight or of rows beyond the last reaches no other row."""
    wide = torch.randn(3, 20, 32)
    weight, scale = (wide, None) if rounds is None else quantized(wide, (1, 32), FP8)
    x, offsets = torch.randn(21, 32), offsets_of(9, 0, 9)
    arguments = (None, None, 1, scale, None, None, bool(rounds))
    clean = launched(x, weight, offsets, *arguments)
    x[5, 3] = x[18:] = torch.nan
    weight[1] = torch.nan if rounds is None else torch.tensor(torch.nan).to(FP8)
    y = launched(x, weight, offsets, *arguments)
    assert y[5].isnan().all()
    keep = [r for r in range(18) if r != 5]
    assert torch.equal(y[keep], clean[keep])
    assert torch.equal(y[18:], torch.zeros(3, 20))
    torch.testing.assert_close(grouped_matmul(x, weight, offsets, scale=scale)[18:], y[18:])


def test_each_tile_is_somewhere(tile) -> None:
    """Every tile is computed if there are several bands of them, the last one incomplete."""
    tile(16)
    x, weight = torch.randn(180, 32), torch.randn(4, 40, 32)
    offsets = offsets_of(100, 0, 70, 3)
    exact = exactly(x.double(), weight.double(), offsets)
    torch.testing.assert_close(launched(x, weight, offsets).double(), exact, rtol=1e-5, atol=1e-4)


def test_experts_that_are_far_apart() -> None:
    """Experts, rows of a weight and tokens are found if their offsets exceed 32 bits."""
    apart = 2**30 + 64
    memory = mmap.mmap(-1, 4 * apart + 64)
    weight = torch.frombuffer(memory, dtype=INT8).as_strided((3, 2, 32), (apart, apart + 32, 1))
    weight.copy_(torch.arange(192).view(3, 2, 32) - 96)
    memory = mmap.mmap(-1, 4 * (2 * apart + 64))
    x = torch.frombuffer(memory, dtype=torch.float32).as_strided((3, 32), (apart, 1))
    x.copy_(torch.randn(3, 32))
    offsets, scale = offsets_of(1, 1, 1), torch.ones(3, 2, 1)
    y = launched(x, weight, offsets, scale=scale)
    exact = exactly(x.double(), weight.double(), offsets)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("run", [grouped_matmul, launched])
def test_nothing_to_multiply(run) -> None:
    """Without rows, experts or outputs results are zeros; without inputs they are the bias."""
    for shape in ((0, 4, 6, 8), (5, 0, 6, 8), (5, 4, 0, 8)):
        tokens, count, outputs, inputs = shape
        offsets = torch.zeros(count + 1, dtype=torch.int32)
        y = run(torch.randn(tokens, inputs), torch.randn(count, outputs, inputs), offsets)
        assert torch.equal(y, torch.zeros(tokens, outputs))
    bias = torch.randn(2, 6)
    y = run(torch.empty(3, 0), torch.empty(2, 6, 0), offsets_of(1, 1), bias=bias)
    assert torch.equal(y, torch.stack((bias[0], bias[1], torch.zeros(6))))


@pytest.mark.parametrize("block", [(1, 16), (3, 8)])
@pytest.mark.parametrize("given", [False, True])
def test_a_gpu_without_fp8_multiplies_what_torch_converts(monkeypatch, block, given: bool) -> None:
    """If kernels cannot convert FP8, weights are dequantized, and the host does not wait."""
    weight, scale = quantized(torch.randn(2, 8, 16), block, FP8)
    x, offsets = torch.randn(5, 16), offsets_of(2, 2)
    more = {"dtype": torch.float32}
    if given:
        x, more["input_scale"] = x.to(FP8), torch.tensor(0.5)
    expected = grouped_matmul(x, weight, offsets, scale=scale, block=block, **more)
    # Such a GPU is not here; and what must not be used would be called as None.
    monkeypatch.setattr(formats, "capability", lambda tensor: (8, 6))
    monkeypatch.setattr(kernel, "quantized_input", None)
    monkeypatch.setattr(kernel, "by_expert", None)
    y = launched(x, weight, offsets, scale=scale, block=block, **more)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_sorted_tokens_meet_their_experts() -> None:
    """The order and offsets of sort_by_expert are what the product takes, on every rank."""
    experts = torch.randint(0, 6, (7, 2)).int()
    x, weight = torch.randn(7, 16), torch.randn(6, 5, 16)
    for first, count in ((0, 6), (2, 3), (6, 0)):
        own = weight[first : first + count]
        order, offsets = sort_by_expert(experts, first, count)
        y = launched(x, own, offsets, None, order, 2)
        torch.testing.assert_close(
            y, grouped_matmul(x, own, offsets, rows=order, top_k=2), rtol=1e-5, atol=1e-5
        )
        for row, place in zip(y, order.tolist(), strict=True):
            expert = int(experts[place // 2, place % 2])
            kept = first <= expert < first + count
            exact = weight[expert] @ x[place // 2] if kept else torch.zeros(5)
            torch.testing.assert_close(row, exact, rtol=1e-5, atol=1e-5)


X, W, OFFSETS = torch.randn(6, 16), torch.randn(2, 8, 16), offsets_of(3, 1)
ROWS, SCALE = torch.arange(12, dtype=torch.int32), torch.ones(2, 8, 1)
NARROW = {"weight": W.to(INT8), "scale": SCALE}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[:, :5]}, r"weight must have the shape \[any, any, 5\], got \[2, 8, 16\]"),
        ({"x": X.double()}, r"the output must be .*, got torch.float64"),
        ({"x": X.half()}, r"weight must be torch.float16, got torch.float32"),
        ({"dtype": torch.half, "weight": W.half()}, r"x must be torch.float16, .* torch.float32"),
        ({"weight": W.to(INT8)}, r"weight must be torch.float32, got torch.int8"),
        ({"scale": SCALE}, r"weight must be .*int8, got torch.float32"),
        ({**NARROW, "scale": SCALE[..., 0]}, r"scale must have the shape \[2, 8, 1\]"),
        ({**NARROW, "block": (4, 4)}, r"scale must have the shape \[2, 2, 4\], got \[2, 8, 1\]"),
        ({**NARROW, "block": (0, 4)}, r"a block must have rows and columns, got \(0, 4\)"),
        ({**NARROW, "x": X.to(FP8), "dtype": torch.half}, "x is quantized, and its scale is miss"),
        ({"offsets": OFFSETS[:2]}, r"offsets must have the shape \[3\], got \[2\]"),
        ({"offsets": OFFSETS.long()}, r"offsets must be torch.int32, got torch.int64"),
        ({"offsets": offsets_of(3, 4)}, r"from 0 to at most 6 rows, got \[0, 3, 7\]"),
        ({"offsets": offsets_of(3, -1)}, r"offsets must ascend .* got \[0, 3, 2\]"),
        ({"offsets": OFFSETS + 1}, r"offsets must ascend .* got \[1, 4, 5\]"),
        ({"bias": torch.zeros(8)}, r"bias must have the shape \[2, 8\], got \[8\]"),
        ({"bias": torch.zeros(2, 8).half()}, r"bias must be torch.float32, got torch.float16"),
        ({"rows": ROWS, "top_k": 3}, r"rows must have the shape \[18\], got \[12\]"),
        ({"rows": ROWS, "top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_k": 2}, "top_k must be 1 without rows, got 2"),
        ({**NARROW, "input_scale": SCALE[0]}, r"input_scale must have the shape \[\]"),
    ],
)
def test_bad_input(change, message: str) -> None:
    """Arguments that do not fit are named, with the numbers."""
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**{"x": X, "weight": W, "offsets": OFFSETS, **change})


def test_the_operator_is_one() -> None:
    """It has a schema and a fake, and works with meta tensors and torch.compile."""
    y = grouped_matmul(
        X.to("meta"), W.to("meta"), OFFSETS.to("meta"), rows=ROWS.to("meta"), top_k=2
    )
    assert (y.shape, y.dtype, y.device.type) == ((12, 8), torch.float32, "meta")
    for x in (X, torch.randn(16, 6).t()):
        arguments = (x, W, OFFSETS, None, ROWS, 2, None, 1, 16, None, True, torch.float32)
        torch.library.opcheck(torch.ops.vllm_module.grouped_matmul.default, arguments)
        assert torch.equal(
            grouped_matmul_reference(*arguments),
            grouped_matmul(x, W, OFFSETS, rows=ROWS, top_k=2),
        )
    compiled = torch.compile(grouped_matmul, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X, W, OFFSETS), grouped_matmul(X, W, OFFSETS))
