"""Products with packed weights, against float64 of codes that Python's integers hold."""

from __future__ import annotations

import mmap
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vllm_module.kernels.choices import trying
from vllm_module.kernels.matmul import packed_matmul as kernel
from vllm_module.kernels.matmul import packed_words
from vllm_module.kernels.matmul.matmul_configurations import (
    MatmulConfig,
    PackedWeight,
    packed_config_of,
)
from vllm_module.kernels.matmul.packed_matmul import packed_matmul, packed_matmul_triton
from vllm_module.kernels.matmul.packed_words import Packing, dequantize_packed, pack

_listed = runpy.run_path(str(Path(__file__).parent / "compilation" / "configurations.py"))
packed_configurations: Any = _listed["packed_configurations"]
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
U8 = torch.uint8
FOUR = Packing(4)


class Packed(NamedTuple):
    """A weight as an operator takes it, and in float64."""

    words: torch.Tensor
    scales: torch.Tensor
    packing: Packing
    group_size: int
    options: dict[str, torch.Tensor | None]
    exact: torch.Tensor


def packed(
    outputs: int,
    inputs: int,
    packing: Packing = FOUR,
    group: int = 32,
    *,
    words: torch.dtype = torch.int32,
    scales: torch.dtype = FP16,
    zeros: bool = False,
    unordered: bool = False,
    codebook: bool = False,
) -> Packed:
    """Return random codes in words, and what they stand for by the definition of the format."""
    codes = torch.randint(0, 1 << packing.bits, (outputs, inputs)).to(U8)
    group_of = torch.arange(inputs) // group
    count = -(-inputs // group)
    factors = (torch.rand(outputs, count) + 0.5).to(scales) / 10
    if unordered:
        group_of = group_of[torch.randperm(inputs)]
    given: dict[str, torch.Tensor | None] = {"zeros": None, "group_of": None, "codebook": None}
    values = codes.double() - 2 ** (packing.bits - 1)
    if codebook:
        given["codebook"] = torch.randn(1 << packing.bits)
        values = given["codebook"].double()[codes.long()]
    elif zeros:
        given["zeros"] = torch.randint(0, 1 << packing.bits, (outputs, count)).to(U8)
        values = codes.double() - given["zeros"].double()[:, group_of]
    if unordered:
        given["group_of"] = group_of.int()
    exact = values * factors.double()[:, group_of]
    return Packed(pack(codes, packing, words), factors, packing, group, given, exact)


def launched(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by the kernel, in Triton's interpreter."""
    words, scales, packing, group_size, options, _ = weight
    return packed_matmul_triton(x, words, scales, *packing, group_size, *options.values(), bias)


def multiplied(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply as the CPU does."""
    return packed_matmul(x, *weight[:4], **weight.options, bias=bias)


def judge(as_accurate: Any, y: torch.Tensor, x: torch.Tensor, weight: Packed, bias: Any) -> None:
    """Compare with float64, and with torch's product of the dequantized weight."""
    exact = F.linear(x.double(), weight.exact, None if bias is None else bias.double())
    as_accurate(y, exact, F.linear(x, weight.exact.to(x.dtype), bias))


LAYOUTS: dict[str, dict[str, Any]] = {
    "midpoint": {},
    "zeros": {"zeros": True},
    "eight bits": {"packing": Packing(8), "zeros": True},
    "two bits": {"packing": Packing(2), "zeros": True},
    "AWQ": {"packing": Packing(4, 0, AWQ), "zeros": True},
    "along outputs": {"packing": Packing(4, 0)},
    "AWQ's order of inputs": {"packing": Packing(4, 1, AWQ), "zeros": True},
    "bytes": {"words": U8, "scales": BF16},
    "eight bits in bytes": {"packing": Packing(8, 1, (0,)), "words": U8},
    "two bits in bytes": {"packing": Packing(2, 0, (3, 1, 0, 2)), "words": U8, "zeros": True},
    "NF4": {"packing": Packing(4, 1, (1, 0)), "words": U8, "scales": FP32, "codebook": True},
    "MXFP4": {"words": U8, "scales": BF16, "codebook": True},
    "unordered": {"zeros": True, "unordered": True},
    "unordered, no zeros": {"unordered": True, "packing": Packing(8, 0)},
    "unordered codebook": {"unordered": True, "codebook": True},
    "one group": {"group": 1000, "zeros": True},
    "small groups": {"group": 24, "zeros": True},
    "three bits": {"packing": Packing(3), "zeros": True},
}


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_multiplied(as_accurate, monkeypatch, layout: str, sums: bool) -> None:
    """The kernel and the CPU are as exact as torch, where tiles, groups and splits are partial."""
    config = MatmulConfig(16, 32, 32, 4, 2, 3 if sums else 1, scale_sums=sums)
    monkeypatch.setattr(kernel, "packed_config_of", lambda *_: config)
    weight = packed(96, 160, **{"group": 64, **LAYOUTS[layout]})
    dtype = FP16 if sums else BF16
    x, bias = torch.randn(3, 160).to(dtype), torch.randn(96).to(dtype)
    for run in (launched, multiplied):
        judge(as_accurate, run(x, weight, bias), x, weight, bias)
    wide = dequantize_packed(*weight[:4], torch.float32, *weight.options.values())
    torch.testing.assert_close(wide.double(), weight.exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("tokens", [1, 3, 17, 64, 70])
def test_any_number_of_tokens(as_accurate, tokens: int, dtype: torch.dtype) -> None:
    """With the shipped configurations of their buckets, tokens of every dtype are multiplied."""
    weight = packed(72, 104, group=64, zeros=True)
    x = torch.randn(2, tokens, 104).to(dtype)[1:]
    y = launched(x, weight)
    assert (y.shape, y.dtype) == ((1, tokens, 72), dtype)
    assert torch.equal(launched(x[0, 0], weight), launched(x[:, :1], weight)[0, 0])
    judge(as_accurate, y, x, weight, None)


@given(
    st.integers(1, 5).map(lambda n: 8 * n),
    st.integers(1, 9).map(lambda n: 8 * n),
    st.integers(1, 90),
    st.sampled_from([0, 1]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=12)
def test_any_sizes_and_groups(outputs, inputs, group, along, zeros, unordered) -> None:
    """No size has to divide another, apart from whole words."""
    weight = packed(
        outputs, inputs, Packing(4, along), group, zeros=zeros, unordered=unordered, scales=FP32
    )
    x = torch.randn(3, inputs)
    for run in (launched, multiplied):
        exact = x.double() @ weight.exact.T
        torch.testing.assert_close(run(x, weight).double(), exact, rtol=1e-5, atol=1e-5)


def test_fewer_splits(as_accurate) -> None:
    """The candidate is as exact as the default; a split may have no steps."""
    weight = packed(64, 1088, Packing(4, 0, AWQ), 64, zeros=True)
    x = torch.randn(2, 1088).to(FP16)
    with trying({"packed_matmul": "fewer splits"}):
        judge(as_accurate, launched(x, weight), x, weight, None)


def test_torch_may_be_chosen() -> None:
    """The candidate of that name is torch's product of the dequantized weight."""
    weight, x = packed(16, 64), torch.randn(129, 64)
    with trying({"packed_matmul": "torch"}):
        y = launched(x, weight)
    torch.testing.assert_close(y, F.linear(x, weight.exact.float()))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("group", [128, 64, 0, 48, 4096])
def test_configurations_list_what_any_batch_meets(group: int, dtype: torch.dtype) -> None:
    """A bucket's tokens meet one configuration, which is listed with the bucket's other ones."""
    weight = PackedWeight(6144, 4096, 4, 1, group, False, dtype)
    listed = packed_configurations(weight)
    assert len(listed) == len({(each.case, each.name) for each in listed})
    by_bucket: dict[int, dict[str, MatmulConfig]] = {}
    for each in listed:
        by_bucket.setdefault(each.tokens, {})[each.name] = each.config
    x = torch.empty(0, dtype=dtype)
    for tokens in range(1, 1100, 3):
        bucket = next((most for most in by_bucket if tokens <= most), max(by_bucket))
        assert packed_config_of(tokens, weight, x) == by_bucket[bucket]["tiles"]
    assert {each.name for each in listed} == {"tiles", "fewer splits", "torch"}


def test_bits_do_not_depend_on_other_tokens() -> None:
    """A token's output has the same bits in every batch of its bucket."""
    weight, x = packed(40, 1040, group=128, zeros=True), torch.randn(9, 1040).to(BF16)
    together = launched(x, weight)
    for tokens in (slice(0, 1), slice(4, 9)):
        assert torch.equal(launched(x[tokens], weight), together[tokens])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("unordered", [False, True])
def test_views_with_poison_around_them(unordered: bool) -> None:
    """Parts of larger tensors, transposed ones too, are read and nothing around them is."""
    weight = packed(40, 88, Packing(4), 32, zeros=True, unordered=unordered, scales=FP32)
    x = torch.full((9, 120), torch.nan)[1:6, 7:95]
    x.copy_(torch.randn(5, 88))
    words = torch.full((13, 44), -1, dtype=torch.int32)[1:12, 2:42].T
    words.copy_(weight.words)
    scales = torch.full((6, 44), torch.nan)[1:4, 3:43].T
    scales.copy_(weight.scales)
    zeros = torch.full((40, 9), 255, dtype=U8)[:, 1:7:2]
    zeros.copy_(weight.options["zeros"])
    bias = torch.full((80,), torch.nan)[::2]
    bias.copy_(torch.randn(40))
    options = {**weight.options, "zeros": zeros}
    if unordered:
        options["group_of"] = torch.full((176,), 99, dtype=torch.int32)[::2]
        options["group_of"].copy_(weight.options["group_of"])
    moved = weight._replace(words=words, scales=scales, options=options)
    y = launched(x, moved, bias)
    assert torch.equal(y, launched(x.contiguous(), weight, bias.contiguous()))
    assert torch.equal(launched(x.T.contiguous().T, moved, bias), y)
    torch.testing.assert_close(multiplied(x, moved, bias), y)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_where_it_is(bad: float) -> None:
    """NaN of a token reaches its own outputs, and a scale's those of its output feature."""
    weight, x = packed(24, 64, zeros=True, scales=FP32), torch.randn(18, 64)
    clean = launched(x, weight)
    x[17, 3] = bad
    y = launched(x, weight)
    assert torch.equal(y[:17], clean[:17])
    assert not y[17].isfinite().any()
    weight.scales[5, 1] = bad
    y = launched(x[:17], weight)
    assert not y[:, 5].isfinite().any()
    others = [feature for feature in range(24) if feature != 5]
    assert torch.equal(y[:, others], clean[:17, others])


@pytest.mark.parametrize("along", [0, 1])
def test_rows_that_are_far_apart(along: int) -> None:
    """Tokens, words, scales and zeros are found if their offsets exceed 32 bits."""

    def far(tensor: torch.Tensor) -> torch.Tensor:
        rows, columns = tensor.shape
        apart = 2**31 // (rows - 1) + 64
        memory = mmap.mmap(-1, ((rows - 1) * apart + columns) * tensor.itemsize)
        view = torch.frombuffer(memory, dtype=tensor.dtype).as_strided((rows, columns), (apart, 1))
        return view.copy_(tensor)

    weight = packed(6, 32, Packing(4, along), group=16, zeros=True, words=U8)
    x = torch.randn(4, 32)
    moved = weight._replace(
        words=far(weight.words),
        scales=far(weight.scales),
        options={**weight.options, "zeros": far(weight.options["zeros"])},
    )
    assert torch.equal(launched(far(x), moved), launched(x, weight))


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("shape", [(0, 32, 64), (2, 0, 64), (2, 32, 0)])
def test_nothing_to_multiply(shape: tuple[int, int, int], bits: int, along: int) -> None:
    """Without tokens or outputs there is nothing; without inputs, the output is the bias."""
    tokens, outputs, inputs = shape
    held = [outputs, inputs]
    held[along] = held[along] * bits // 32
    words, scales = torch.zeros(held, dtype=torch.int32), torch.ones(outputs, -(-inputs // 16))
    x, bias, packing = torch.randn(tokens, inputs), torch.randn(outputs), Packing(bits, along)
    y = packed_matmul_triton(x, words, scales, *packing, 16, None, None, None, bias)
    assert torch.equal(y, packed_matmul(x, words, scales, packing, 16, bias=bias))
    assert y.shape == (tokens, outputs)
    if not inputs:
        assert torch.equal(y, bias.expand(tokens, outputs))


@pytest.mark.parametrize("packing", [Packing(4), Packing(4, 0, AWQ), Packing(3), Packing(3, 0)])
def test_memory_of_a_product_is_bounded(monkeypatch, packing: Packing) -> None:
    """No more rows are dequantized at once than a cache holds, and results are the same."""
    weight = packed(160, 96, packing, zeros=True)
    x, bias = torch.randn(2, 96), torch.randn(160)
    whole = multiplied(x, weight, bias)
    monkeypatch.setattr(packed_words, "_CHUNK", 96 * 64)
    rows = packed_words.dequantized_rows(*weight[:4], torch.float32, *weight.options.values())
    assert [len(some) for some in rows] == [64, 64, 32]
    torch.testing.assert_close(multiplied(x, weight, bias), whole)


def test_gradients_reach_the_input() -> None:
    """Where a gradient is needed, the reference computes the product and its derivative."""
    weight = packed(32, 64, zeros=True)
    x = torch.randn(3, 64, requires_grad=True)
    multiplied(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.exact.float().sum(0).expand(3, 64))


def test_bad_input_is_refused() -> None:
    """Arguments that do not fit are named, with the numbers."""
    words, scales, packing, group, _, _ = packed(16, 64, scales=FP32)
    x = torch.randn(2, 64)
    zeros, groups = torch.zeros(16, 2, dtype=U8), torch.zeros(64, dtype=torch.int32)
    good = {"x": x, "words": words, "scales": scales, "packing": packing, "group_size": group}
    for message, changed in (
        (r"x must be .*, got torch.float64", {"x": x.double()}),
        (r"x must have 64 features, as the weight, got \[2, 60\]", {"x": x[:, :60]}),
        (r"words must be torch.int32 or torch.uint8, got torch.int64", {"words": words.long()}),
        (r"words must have the shape \[any, any\], got \[128\]", {"words": words.flatten()}),
        (r"words is on meta, and must be on cpu", {"words": words.to("meta")}),
        (r"scales must have the shape \[16, any\], got \[15, 2\]", {"scales": scales[1:]}),
        (r"scales must be .*, got torch.float64", {"scales": scales.double()}),
        (r"one column for each group of 32 of 64 inputs, got \[16, 1\]", {"scales": scales[:, :1]}),
        (r"a group must have one input or more, got 0", {"group_size": 0}),
        (r"2, 3, 4 or 8 bits along 0 or 1, got .*bits=5", {"packing": Packing(5)}),
        (r"2, 3, 4 or 8 bits along 0 or 1, got .*along=2", {"packing": Packing(4, 2)}),
        (r"an order must have each place .* 32 bits once", {"packing": Packing(4, 1, (1, 0))}),
        (r"an order must have each place .* 32 bits once", {"packing": Packing(4, 1, AWQ[:7] * 2)}),
        (r"an order must have each place", {"packing": Packing(3, 1, AWQ), "words": words[:, :3]}),
        (r"8 words of 32 bits hold no whole codes of 3", {"packing": Packing(3)}),
        (r"zeros must have the shape \[16, 2\], got \[16, 1\]", {"zeros": zeros[:, :1]}),
        (r"zeros must be torch.uint8, got torch.int32", {"zeros": zeros.int()}),
        (r"group_of must have the shape \[64\], got \[63\]", {"group_of": groups[1:]}),
        (r"group_of must be torch.int32, got torch.int64", {"group_of": groups.long()}),
        (r"group_of must be of 0 to 1, got 0 to 2", {"group_of": torch.arange(64).int() % 3}),
        (r"group_of must be of 0 to 1, got -1 to -1", {"group_of": groups - 1}),
        (r"codebook must have the shape \[16\], got \[8\]", {"codebook": torch.zeros(8)}),
        (r"a codebook have no zeros", {"codebook": torch.zeros(16), "zeros": zeros}),
        (r"bias must have the shape \[16\], got \[7\]", {"bias": torch.zeros(7)}),
        (r"bias must be torch.float32, got torch.float16", {"bias": torch.zeros(16).half()}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            packed_matmul(**{**good, **changed})


def test_the_operator_is_one() -> None:
    """It has a schema and a fake, and works with meta tensors and torch.compile."""
    weight = packed(16, 64, Packing(4, 0, AWQ), zeros=True)
    words, scales, packing, group_size, options, _ = weight
    x, bias = torch.randn(2, 3, 64), torch.randn(16)
    y = packed_matmul(*(each.to("meta") for each in (x, words, scales)), packing, group_size)
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 16), torch.float32, "meta")
    operator = torch.ops.vllm_module.packed_matmul.default
    for one in (x, x.transpose(0, 1), torch.randn(64, 5).half().T):
        torch.library.opcheck(
            operator, (one, words, scales, *packing, group_size, *options.values(), None)
        )
    compiled = torch.compile(multiplied, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight, bias), multiplied(x, weight, bias))
