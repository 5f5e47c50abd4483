"""Products with the weights of experts in one call of the loops for a CPU, beside float64."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from vllm_module.kernels.experts.grouped_matmul import by_expert, grouped_matmul
from vllm_module.kernels.experts.grouped_matmul_mxfp4 import grouped_matmul_mxfp4
from vllm_module.kernels.experts.grouped_matmul_packed import grouped_matmul_packed
from vllm_module.kernels.matmul import code_rows_by_expert as home
from vllm_module.kernels.matmul.code_rows import block_rows
from vllm_module.kernels.matmul.packed_words import Packing
from vllm_module.kernels.matmul.products import Products, products
from vllm_module.kernels.recording import Recording

pytest.importorskip("numba")
CHOSEN = Products(floats=range(1, 33), codes=32)
EXPERTS, OUTPUT, INPUT = 5, 37, 256  # rows of outputs are padded
COUNTS = 3, 0, 1, 9, 0  # rows of each expert; of 16 rows, the last three are other ranks'
ROWS, TOP_K = 16, 2
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
AS_MULTIPLIED = runpy.run_path(str(Path(__file__).parent / "in_loops.py"))["as_multiplied"]
Case = tuple[Any, torch.Tensor]  # a function of rows that are sorted, and weights in float64


@pytest.fixture(autouse=True)
def _chosen() -> Iterator[None]:
    with torch.inference_mode(), products(CHOSEN):
        yield


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the kinds of weights that the loops have multiplied by in one call."""
    seen: list[int] = []
    product = home._product

    def counted(x: torch.Tensor, offsets: torch.Tensor, bias: Any, each: Any) -> torch.Tensor:
        seen.append(each.kind)
        return product(x, offsets, bias, each)

    # Results do not tell what multiplied.
    monkeypatch.setattr(home, "_product", counted)
    return seen


def offsets_of(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def assert_within(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, counts: Any, bias: Any = None
) -> None:
    """Compare with float64: sums in float32 and one rounding of the result; then zeros.

    A weight is what the loops multiply these rows by.
    """
    first, biases = 0, torch.zeros(len(weight), 1) if bias is None else bias.double()
    for own, added, count in zip(weight, biases, counts, strict=True):
        rows, given = y[first : first + count].double(), x[first : first + count].double()
        own = AS_MULTIPLIED(own, x[first : first + count])
        exact, most = given @ own.T + added, given.abs() @ own.abs().T + added.abs()
        bound = (x.shape[1] + 9) * 2.0**-24 * most + exact.abs() * torch.finfo(y.dtype).eps / 2
        assert bool(((rows - exact).abs() <= bound + 1e-30).all())
        first += count
    assert not y[first:].any()


def floats(dtype: torch.dtype) -> Case:
    weight = torch.randn(EXPERTS, OUTPUT, INPUT).to(dtype)
    return (lambda x, offsets, **o: grouped_matmul(x, weight, offsets, **o)), weight.double()


def eight_bits(dtype: torch.dtype, groups: int) -> Case:
    weight = torch.randint(256, (EXPERTS, OUTPUT, INPUT)).to(torch.uint8)
    weight[weight & 0x7F == 0x7F] = 0  # NaN in FP8
    weight, scale = weight.view(dtype), torch.rand(EXPERTS, OUTPUT, groups)
    wide = weight.double() * scale.repeat_interleave(INPUT // groups, 2)
    block = 1, INPUT // groups

    def multiply(x: torch.Tensor, offsets: torch.Tensor, **options: Any) -> torch.Tensor:
        return grouped_matmul(x, weight, offsets, scale=scale, block=block, **options)

    return multiply, wide


def packed(bits: int, order: tuple[int, ...] | None, zeros: bool) -> Case:
    codes = torch.randint(1 << bits, (EXPERTS, OUTPUT, INPUT))
    places = torch.tensor(order or range(32 // bits)) * bits
    words = (codes.view(EXPERTS, OUTPUT, -1, 32 // bits) << places).sum(-1)
    words = (words - (words >> 31 << 32)).to(torch.int32)
    scales = torch.rand(EXPERTS, OUTPUT, INPUT // 64)
    zero = torch.randint(1 << bits, scales.shape).to(torch.uint8) if zeros else None
    less = torch.full_like(scales, 1 << (bits - 1)) if zero is None else zero.float()
    wide = (codes - less.repeat_interleave(64, 2)).double() * scales.repeat_interleave(64, 2)

    def multiply(x: torch.Tensor, offsets: torch.Tensor, **options: Any) -> torch.Tensor:
        packing = Packing(bits, 1, order)
        return grouped_matmul_packed(x, words, scales, packing, 64, offsets, zeros=zero, **options)

    return multiply, wide


def blocks(kind: str) -> Case:
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    stored = torch.randint(256, (EXPERTS, OUTPUT, INPUT // values, nbytes), dtype=torch.uint8)
    stored[..., (1, 3) if kind == "Q4_K" else -1 if kind == "Q6_K" else 1] = 0x20  # small scales
    given = stored.view(EXPERTS * OUTPUT, -1).numpy()
    wide = np.asarray(gguf.quants.dequantize(given, gguf.GGMLQuantizationType[kind]))

    def multiply(
        x: torch.Tensor, offsets: torch.Tensor, rows: Any = None, top_k: int = 1
    ) -> torch.Tensor:
        described = block_rows, stored, kind
        return by_expert(x, pytest.fail, OUTPUT, offsets, None, rows, top_k, described)

    return multiply, torch.from_numpy(wide).view(EXPERTS, OUTPUT, INPUT).double()


def mxfp4() -> Case:
    codes = torch.randint(16, (EXPERTS, OUTPUT, INPUT))
    exponents = torch.randint(110, 130, (EXPERTS, OUTPUT, INPUT // 32)).to(torch.uint8)
    exponents[:, 0, 0], exponents[:, 1, 1] = 0, 1  # 2^-127 is a subnormal number
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[codes % 8]
    signed = magnitudes * (1 - codes // 8 * 2)
    wide = signed * 2.0 ** (exponents.double() - 127).repeat_interleave(32, 2)
    stored = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    blocks = stored.view(EXPERTS, OUTPUT, INPUT // 32, 16)
    return (lambda x, offsets, **o: grouped_matmul_mxfp4(x, blocks, exponents, offsets, **o)), wide


CASES = {
    "float32": lambda: floats(torch.float32),
    "bfloat16": lambda: floats(torch.bfloat16),
    "float16": lambda: floats(torch.float16),
    "int8": lambda: eight_bits(torch.int8, 1),
    "FP8 in groups": lambda: eight_bits(torch.float8_e4m3fn, 4),
    "int4": lambda: packed(4, None, zeros=False),
    "int4 with zeros": lambda: packed(4, None, zeros=True),
    "int4, in another order": lambda: packed(4, AWQ, zeros=True),
    "int2": lambda: packed(2, None, zeros=False),
    "MXFP4": mxfp4,
    "Q8_0": lambda: blocks("Q8_0"),
    "Q4_K": lambda: blocks("Q4_K"),
    "Q6_K": lambda: blocks("Q6_K"),
}


BLOCKS = "Q8_0", "Q4_K", "Q6_K"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_row_is_multiplied_by_the_weight_of_its_expert(
    case: str, dtype: torch.dtype, told: list[int]
) -> None:
    """Experts without rows are left out, and rows of experts elsewhere are zeros."""
    if case in ("float32", "bfloat16", "float16"):
        dtype = getattr(torch, case)
    multiply, weight = CASES[case]()
    x, offsets = torch.randn(ROWS, INPUT).to(dtype), offsets_of(COUNTS)
    y = multiply(x, offsets)
    assert (y.shape, y.dtype) == ((ROWS, OUTPUT), dtype)
    assert_within(y, x, weight, COUNTS)
    rows = torch.randperm(ROWS).int()  # each token has two
    assert_within(
        multiply(x[: ROWS // TOP_K], offsets, rows=rows, top_k=TOP_K),
        x[rows.long() // TOP_K],
        weight,
        COUNTS,
    )
    if case not in BLOCKS:
        bias = torch.randn(EXPERTS, OUTPUT).to(dtype)
        assert_within(multiply(x, offsets, bias=bias), x, weight, COUNTS, bias)
    assert len(told) == 2 + (case not in BLOCKS)


@pytest.mark.parametrize("counts", [(16, 0, 0, 0, 0), (0, 0, 0, 0, 16), (0, 0, 0, 0, 0)])
def test_one_expert_has_all_rows_or_none(counts: tuple[int, ...], told: list[int]) -> None:
    """The average number of rows chooses, so an expert may have more rows than were chosen."""
    multiply, weight = floats(torch.float32)
    x = torch.randn(ROWS, INPUT)
    assert_within(multiply(x, offsets_of(counts)), x, weight, counts)
    assert len(told) == 1


def test_what_is_not_for_one_call_is_multiplied_an_expert_at_a_time(told: list[int]) -> None:
    """Groups of inputs anywhere, scales of several rows, many rows, and no choice."""
    x, offsets = torch.randn(ROWS, INPUT), offsets_of(COUNTS)
    multiply, weight = floats(torch.float32)
    many = torch.randn(40 * EXPERTS, INPUT)
    assert_within(multiply(many, offsets_of((40,) * EXPERTS)), many, weight, (40,) * EXPERTS)
    with products(Products()):
        assert_within(multiply(x, offsets), x, weight, COUNTS)
    eight, scale = torch.randint(-128, 128, weight.shape).to(torch.int8), torch.rand(EXPERTS, 5, 1)
    wide = eight.double() * scale.repeat_interleave(8, 1)[:, :OUTPUT]
    y = grouped_matmul(x, eight, offsets, scale=scale, block=(8, INPUT))
    assert_within(y, x, wide, COUNTS)
    words = torch.randint(-(2**31), 2**31, (EXPERTS, OUTPUT, INPUT // 8), dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> torch.arange(0, 32, 4) & 15).flatten(2) - 8
    group_of = torch.randint(4, (EXPERTS, INPUT)).int()
    scales = torch.rand(EXPERTS, OUTPUT, 4)
    wide = codes.double() * scales.gather(2, group_of.long()[:, None].expand(-1, OUTPUT, -1))
    given = words, scales, Packing(4), 64
    y = grouped_matmul_packed(x, *given, offsets, group_of=group_of)
    assert_within(y, x, wide, COUNTS)
    assert told == []


def test_weights_are_read_when_the_loops_run(told: list[int]) -> None:
    """What is kept of weights is their addresses: not their numbers, nor those of other weights."""
    x, offsets = torch.randn(ROWS, INPUT), offsets_of(COUNTS)
    weight = torch.randn(EXPERTS, OUTPUT, INPUT)
    grouped_matmul(x, weight, offsets)
    weight.copy_(torch.randn_like(weight))
    assert_within(grouped_matmul(x, weight, offsets), x, weight.double(), COUNTS)
    turned = weight.flip(0).contiguous()
    assert_within(grouped_matmul(x, turned, offsets), x, turned.double(), COUNTS)
    fewer = weight[1:3]
    counts = 2, 14
    y = grouped_matmul(x, fewer, offsets_of(counts))
    assert_within(y, x, fewer.double(), counts)
    assert len(told) == 4


def test_what_is_kept_may_be_dropped_at_any_time(
    told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines in threads of one process share it, and each drops it when it has become much."""

    class Dropped(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            self.clear()

    monkeypatch.setattr(home, "_told", Dropped())  # no test can stop a thread between two lines
    multiply, weight = floats(torch.float32)
    x = torch.randn(ROWS, INPUT)
    assert_within(multiply(x, offsets_of(COUNTS)), x, weight, COUNTS)
    assert len(told) == 1


def test_a_recording_goes_where_tokens_go_now(told: list[int]) -> None:
    """Numbers of rows are read when the recording runs, and none of its Python code runs again."""
    weight, x = torch.randn(EXPERTS, OUTPUT, INPUT), torch.randn(ROWS, INPUT)
    offsets = offsets_of(COUNTS)
    recording = Recording([weight, x, offsets])
    with recording.running():
        y = grouped_matmul(x, weight, offsets)
    for counts in ((0, 5, 2, 0, 9), (1, 1, 1, 1, 1), COUNTS):
        x.copy_(torch.randn_like(x))
        offsets.copy_(offsets_of(counts))
        recording.again()
        assert_within(y, x, weight.double(), counts)
    assert len(told) == 1
