"""Products with the codes of quantized weights beside plain torch in float64."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from vllm_module.kernels.experts.grouped_matmul_mxfp4 import grouped_matmul_mxfp4
from vllm_module.kernels.matmul import code_rows_matmul as home
from vllm_module.kernels.matmul import compiled_rows
from vllm_module.kernels.matmul.code_rows import eight_bit_rows
from vllm_module.kernels.matmul.code_rows_matmul import fastest_code_rows
from vllm_module.kernels.matmul.gguf_blocks import blocks_matmul
from vllm_module.kernels.matmul.packed_matmul import packed_matmul
from vllm_module.kernels.matmul.packed_words import Packing
from vllm_module.kernels.matmul.products import Products, products
from vllm_module.kernels.matmul.scaled_matmul import scaled_matmul

pytest.importorskip("numba")
AS_MULTIPLIED = runpy.run_path(str(Path(__file__).parent / "in_loops.py"))["as_multiplied"]
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
OUTPUT, INPUT = 37, 256  # the last part of a thread has fewer outputs
Case = tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def chosen() -> Iterator[None]:
    with torch.inference_mode(), products(Products(codes=64)):
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the kinds of weights that the loops have multiplied by."""
    seen: list[int] = []
    loops = home._multiply

    def multiply(kind: int, ordered: bool) -> Callable[..., None]:
        multiplied = loops(kind, ordered)

        def call(*arguments: Any) -> None:
            seen.append(kind)
            multiplied(*arguments)

        return call

    monkeypatch.setattr(home, "_multiply", multiply)
    return seen


def scaled(dtype: torch.dtype, block: tuple[int, int]) -> Case:
    weight = torch.randint(256, (OUTPUT, INPUT)).to(torch.uint8)
    weight[weight & 0x7F == 0x7F] = 0  # NaN in FP8
    weight = weight.view(dtype)
    count = -(-OUTPUT // block[0]), INPUT // block[1]
    scale = torch.rand(count) * 2.0 ** torch.randint(-20, 20, count)
    spread = scale.repeat_interleave(block[0], 0)[:OUTPUT].repeat_interleave(block[1], 1)
    return lambda x: scaled_matmul(x, weight, scale, block), weight.double() * spread


def packed(
    bits: int,
    group: int,
    order: tuple[int, ...] | None = None,
    *,
    zeros: bool = False,
    table: bool = False,
    dtype: torch.dtype = torch.int32,
) -> Case:
    codes = torch.randint(1 << bits, (OUTPUT, INPUT))
    count = dtype.itemsize * 8 // bits
    places = torch.tensor(order or range(count)) * bits
    words = (codes.view(OUTPUT, -1, count) << places).sum(-1)
    words = (words - (words >> 31 << 32) if dtype == torch.int32 else words).to(dtype)
    scales, values = torch.rand(OUTPUT, INPUT // group), torch.randn(1 << bits)
    zero = torch.randint(1 << bits, scales.shape).to(torch.uint8) if zeros else None
    less = torch.full_like(scales, 1 << (bits - 1)) if zero is None else zero
    plain = codes - less.double().repeat_interleave(group, 1)
    expected = (values[codes] if table else plain) * scales.double().repeat_interleave(group, 1)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        packing, codebook = Packing(bits, 1, order), values if table else None
        return packed_matmul(x, words, scales, packing, group, zeros=zero, codebook=codebook)

    return multiply, expected.double()


def down(order: tuple[int, ...] | None) -> Case:
    """Return a weight whose words have eight outputs, as AWQ stores them, with zeros."""
    codes = torch.randint(16, (OUTPUT + 3, INPUT))
    places = torch.tensor(order or range(8)).view(1, 8, 1) * 4
    words = (codes.view(-1, 8, INPUT) << places).sum(1)
    words = (words - (words >> 31 << 32)).to(torch.int32)
    scales = torch.rand(len(codes), INPUT // 64)
    zero = torch.randint(16, scales.shape).to(torch.uint8)
    less, scale = (each.double().repeat_interleave(64, 1) for each in (zero, scales))

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return packed_matmul(x, words, scales, Packing(4, 0, order), 64, zeros=zero)

    return multiply, (codes - less) * scale


def anywhere(bits: int, order: tuple[int, ...] | None, zeros: bool) -> Case:
    """Return a weight with the inputs of groups anywhere, and a group that has none."""
    codes, count = torch.randint(1 << bits, (OUTPUT, INPUT)), 32 // bits
    places = torch.tensor(order or range(count)) * bits
    words = (codes.view(OUTPUT, -1, count) << places).sum(-1)
    words = (words - (words >> 31 << 32)).to(torch.int32)
    group_of = torch.randint(5, (INPUT,)).int()
    group_of[group_of == 3] = 0
    scales = torch.rand(OUTPUT, 5)
    zero = torch.randint(1 << bits, scales.shape).to(torch.uint8) if zeros else None
    less = torch.full_like(scales, 1 << (bits - 1)) if zero is None else zero
    expected = (codes - less.double()[:, group_of]) * scales.double()[:, group_of]

    def multiply(x: torch.Tensor) -> torch.Tensor:
        packing = Packing(bits, 1, order)
        return packed_matmul(x, words, scales, packing, 64, zeros=zero, group_of=group_of)

    return multiply, expected


def of_bytes(kind: str) -> Case:
    """Return blocks of random bytes, for types that gguf-py reads and does not write."""
    quantization = gguf.GGMLQuantizationType[kind]
    held = torch.randint(256, (OUTPUT, 1, gguf.GGML_QUANT_SIZES[quantization][1])).byte()
    for at in (0, 2) if kind != "Q6_K" else (208,):
        held[..., at + 1] = 0x20 + held[..., at + 1] % 8  # a float16 of about 0.01
    values = gguf.quants.dequantize(held.view(OUTPUT, -1).numpy(), quantization)
    return lambda x: blocks_matmul(x, held, kind), torch.from_numpy(values).double()


def blocks(kind: str) -> Case:
    quantization = gguf.GGMLQuantizationType[kind]
    values = torch.randn(OUTPUT, INPUT).numpy()
    rows = gguf.quants.quantize(values, quantization)
    values = torch.from_numpy(gguf.quants.dequantize(rows, quantization)).double()
    count = INPUT // gguf.GGML_QUANT_SIZES[quantization][0]
    held = torch.from_numpy(rows).view(OUTPUT, count, -1)
    return lambda x: blocks_matmul(x, held, kind), values


CASES: dict[str, Callable[[], Case]] = {
    "int8 by channel": lambda: scaled(torch.int8, (1, INPUT)),
    "int8 by block": lambda: scaled(torch.int8, (16, 64)),
    "int8 by tensor": lambda: scaled(torch.int8, (OUTPUT, INPUT)),
    "fp8 by channel": lambda: scaled(torch.float8_e4m3fn, (1, INPUT)),
    "fp8 by block": lambda: scaled(torch.float8_e4m3fn, (16, 128)),
    "int4": lambda: packed(4, 128),
    "int4, one group": lambda: packed(4, INPUT),
    "int4, groups of 64": lambda: packed(4, 64, zeros=True),
    "int4, groups of 8": lambda: packed(4, 8, zeros=True),
    "int4, groups of 32 with zeros": lambda: packed(4, 32, zeros=True),
    "int4 in another order": lambda: packed(4, 64, AWQ, zeros=True),
    "nf4": lambda: packed(4, 64, (1, 0), table=True, dtype=torch.uint8),
    "int8 in words": lambda: packed(8, 64, zeros=True),
    "int8 in words, symmetric": lambda: packed(8, 128),
    "int2": lambda: packed(2, 64),
    "Q8_0": lambda: blocks("Q8_0"),
    "Q4_0": lambda: blocks("Q4_0"),
    "Q4_K": lambda: of_bytes("Q4_K"),
    "Q5_K": lambda: of_bytes("Q5_K"),
    "Q6_K": lambda: of_bytes("Q6_K"),
    "AWQ": lambda: down(AWQ),
    "AWQ in plain order": lambda: down(None),
    "GPTQ in activation order": lambda: anywhere(4, None, zeros=True),
    "in activation order, symmetric": lambda: anywhere(4, AWQ, zeros=False),
    "8 bits in activation order": lambda: anywhere(8, None, zeros=True),
}
# Of a value that is the difference of two terms, the bound has both: these are offsets at most.
OFFSETS = {"Q4_K": 63 * 0.032, "Q5_K": 63 * 0.032}


@pytest.mark.parametrize(
    ("case", "threads"), [*((case, 1) for case in CASES), ("int4", 2), ("Q8_0", 2)]
)
def test_products_are_those_of_the_dequantized_weight(
    case: str, threads: int, calls: list[int]
) -> None:
    """For any number of rows, errors are within the bound of sums of so many products in float32.

    The bound is (n + 4) units in the last place of the sum of absolute products: one for each of n
    products and sums, and some for dequantizing.
    """
    torch.manual_seed(len(case))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        multiply, weight = CASES[case]()
        for shape in ((1,), (6,), (2, 1, 2)):
            x = torch.randn(*shape, INPUT)
            y = multiply(x)
            terms = weight.abs() + 2 * OFFSETS.get(case, 0.0)
            bound = (INPUT + 4) * 2.0**-24 * (x.double().abs() @ terms.T)
            assert ((y.double() - x.double() @ weight.T).abs() <= bound).all()
            assert torch.equal(y, multiply(x))
    finally:
        torch.set_num_threads(before)
    assert len(calls) == 6


@pytest.mark.parametrize(
    ("bits", "group", "loops"), [(4, 2, 0), (4, 4, 0), (4, 8, 1), (8, 2, 0), (8, 4, 1), (2, 8, 0)]
)
def test_an_order_moves_codes_from_group_to_group(
    bits: int, group: int, loops: int, calls: list[int]
) -> None:
    """If a group is part of a word, its codes in another order are in several groups."""
    torch.manual_seed(group)
    order = tuple(torch.randperm(32 // bits).tolist())
    multiply, weight = packed(bits, group, order, zeros=True)
    x = torch.randn(3, INPUT)
    torch.testing.assert_close(multiply(x).double(), x.double() @ weight.T, rtol=1e-4, atol=1e-3)
    assert len(calls) == loops


def odd(outputs: int, inputs: int) -> Case:
    weight, scale = torch.randint(-128, 128, (outputs, inputs)).to(torch.int8), torch.rand(outputs)
    scale = scale.unsqueeze(1)
    block = 1, inputs
    return lambda x: scaled_matmul(x, weight, scale, block), weight.double() * scale


@pytest.mark.parametrize("case", [*CASES, "odd sizes", "half a register more"])
def test_rows_of_bfloat16_are_multiplied_by_weights_rounded_to_it(
    case: str, calls: list[int]
) -> None:
    """Where the processor multiplies such numbers; elsewhere, and for one row, by the weight.

    Beyond that, errors are those of sums in float32, and of one rounding of the result.
    """
    torch.manual_seed(len(case))
    sizes = {"odd sizes": (9, 250), "half a register more": (41, 272)}
    multiply, weight = odd(*sizes[case]) if case in sizes else CASES[case]()
    for rows in (1, 2, 4, 7, 64):
        x = torch.randn(rows, weight.shape[1], dtype=torch.bfloat16)
        y, given = multiply(x).double(), AS_MULTIPLIED(weight, x)
        exact, terms = x.double() @ given.T, given.abs() + 2 * OFFSETS.get(case, 0.0)
        bound = (weight.shape[1] + 4) * 2.0**-24 * (x.double().abs() @ terms.T)
        assert ((y - exact).abs() <= bound + exact.abs() * 2.0**-8 + 1e-30).all()
        assert torch.equal(y, multiply(x).double())
    assert len(calls) == 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_multiplied_in_float32(dtype: torch.dtype, calls: list[int]) -> None:
    """The result, with a bias, is that of float32, rounded once."""
    weight, scale = torch.randint(-9, 9, (5, 64), dtype=torch.int8), torch.ones(5, 1)
    x, bias = torch.randint(-3, 4, (3, 64)).to(dtype), torch.ones(5, dtype=dtype)
    y = scaled_matmul(x, weight, scale, (1, 64), bias)
    assert torch.equal(y, (x.double() @ weight.double().T + 1).to(dtype))
    assert len(calls) == 1


def test_a_product_reads_what_an_update_wrote(calls: list[int]) -> None:
    """Nothing is held beside the weight: numbers that are written in place are multiplied by."""
    weight, scale = torch.ones(5, 64, dtype=torch.int8), torch.ones(5, 1)
    for value in (1, 2):
        weight.fill_(value)
        scale.fill_(value)
        y = scaled_matmul(torch.ones(1, 64), weight, scale, (1, 64))
        assert y.eq(64 * value * value).all()
    assert len(calls) == 2


def test_what_the_loops_do_not_take_is_dequantized(calls: list[int]) -> None:
    """More rows than chosen, derivatives, three bits, and weights that are no rows in memory."""
    weight, scale = torch.ones(5, 64, dtype=torch.int8), torch.ones(5, 1)
    block = 1, 64
    assert scaled_matmul(torch.ones(65, 64), weight, scale, block).eq(64).all()
    with products(Products()):
        scaled_matmul(torch.ones(1, 64), weight, scale, block)
    columns = weight.t().contiguous().t()
    assert scaled_matmul(torch.ones(1, 64), columns, scale, block).eq(64).all()
    assert scaled_matmul(torch.ones(0, 64), weight, scale, block).shape == (0, 5)
    with torch.inference_mode(False):
        x = torch.ones(1, 64, requires_grad=True)
        scaled_matmul(x, weight.clone(), scale.clone(), block).sum().backward()
        assert x.grad is not None
    words = torch.zeros(5, 6, dtype=torch.int32)
    packed_matmul(torch.ones(1, 64), words, torch.ones(5, 1), Packing(3), 64)
    assert calls == []
    assert scaled_matmul(torch.ones(64, 64), weight, scale, block).eq(64).all()
    assert len(calls) == 1


def test_a_last_group_that_is_shorter_is_not_half_of_the_inputs(calls: list[int]) -> None:
    """Of 192 inputs in groups of 128, the second scale is of 64: the loops do not take it."""
    x, scale = torch.randn(2, 192), torch.tensor([[1.0, 100.0]]).expand(8, 2).contiguous()
    spread = torch.tensor([1.0] * 128 + [100.0] * 64).double()
    weight = torch.randint(-9, 9, (8, 192), dtype=torch.int8)
    y = scaled_matmul(x, weight, scale, (1, 128))
    torch.testing.assert_close(y.double(), x.double() @ (weight * spread).T, rtol=1e-4, atol=1e-2)
    codes = (weight.int() + 8).clamp(0, 15).view(8, -1, 8).long()
    words = (codes << torch.arange(0, 32, 4)).sum(-1)
    words = (words - (words >> 31 << 32)).to(torch.int32)
    y = packed_matmul(x, words, scale, Packing(4), 128)
    expected = x.double() @ ((codes.view(8, -1) - 8) * spread).T
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-2)
    assert calls == []


def test_what_is_not_finite_stays_in_its_row() -> None:
    """A NaN or an infinity of the input is in the results of its own row."""
    x, weight = torch.randn(6, 64), torch.ones(5, 64, dtype=torch.int8)
    x[1, 7], x[5, 63] = torch.nan, torch.inf
    y = scaled_matmul(x, weight, torch.ones(5, 1), (1, 64))
    assert y.isfinite().all(-1).tolist() == [True, False, True, True, True, False]


@pytest.mark.parametrize(("slow_from", "most"), [(0, 0), (8, 1), (32, 8), (33, 32)])
def test_the_loops_are_chosen_where_they_take_less_time(slow_from: int, most: int) -> None:
    """By a clock of the test's, the largest number of rows is found for which they are faster."""

    def seconds(work: Any) -> float:
        way, (x, _) = work.func, work.args
        return 1.0 if way.__name__ == "dequantized" or len(x) >= slow_from else 0.85

    assert fastest_code_rows(1, seconds) == most


@pytest.fixture
def _narrow_by_default() -> Iterator[None]:
    """Have another default dtype, as a program may set it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_narrow_by_default")
def test_the_default_dtype_is_not_that_of_numbers(calls: list[int]) -> None:
    """The loops are timed, and multiply by experts in MXFP4, in float32."""
    assert fastest_code_rows(1, lambda work: 1.0) == 0
    seen = len(calls)
    x = torch.ones(2, 64, dtype=torch.float32)
    ones = torch.full((1, 5, 2, 16), 0x22, dtype=torch.uint8)
    scales, offsets = torch.full((1, 5, 2), 127, dtype=torch.uint8), torch.tensor([0, 2]).int()
    y = grouped_matmul_mxfp4(x, ones, scales, offsets)
    assert torch.equal(y, torch.full((2, 5), 64, dtype=torch.float32))
    assert len(calls) == seen + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scales_of_another_dtype_are_the_same_numbers(dtype: torch.dtype) -> None:
    """The loops see addresses, so what they are given has to be in the dtypes that they read."""
    weight, x = torch.randint(-9, 9, (OUTPUT, 64)).to(torch.int8), torch.randn(2, 64)
    scale = torch.rand(OUTPUT, 1).to(dtype)
    rows = eight_bit_rows(weight, scale, (1, 64))
    assert rows is not None
    expected = x.double() @ (weight * scale.double()).T
    torch.testing.assert_close(home.code_rows_matmul(x, rows).double(), expected, rtol=0, atol=1e-4)


def test_threads_share_the_outputs(calls: list[int]) -> None:
    """Bits do not depend on the number of torch's threads, nor on who else multiplies."""
    weight = torch.randint(-128, 128, (1000, INPUT)).to(torch.int8)
    scale, x = torch.rand(1000, 1), torch.randn(5, INPUT)
    own = [x, x[:1]]

    def product(rows: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), products(Products(codes=64)):
            return scaled_matmul(rows, weight, scale, (1, INPUT))

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = [product(rows) for rows in own]
        assert len(calls) == 2
        for count in (2, 3):  # which do not divide the 32 parts of 1,000 outputs alike
            torch.set_num_threads(count)
            with ThreadPoolExecutor(3) as pool:
                for given, rows in zip(pool.map(product, own * 4), expected * 4, strict=True):
                    assert torch.equal(given, rows)
    finally:
        torch.set_num_threads(before)


def test_without_numba_nothing_is_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights are dequantized first, and the log and a call of the loops name the extra."""
    # An environment without the extra.
    monkeypatch.setitem(sys.modules, "numba", None)
    home._loops.cache_clear()
    compiled_rows.compiled_multiply.cache_clear()
    assert fastest_code_rows(1, lambda _: pytest.fail("it was measured")) == 0
    assert "vllm-module[cpu]" in caplog.text
    codes = eight_bit_rows(torch.ones(1, 8, dtype=torch.int8), torch.ones(1, 1), (1, 8))
    assert codes is not None
    with pytest.raises(ImportError, match=r"vllm-module\[cpu\]"):
        home.code_rows_matmul(torch.ones(1, 8), codes)
