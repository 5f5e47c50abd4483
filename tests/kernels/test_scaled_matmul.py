"""Multiplying by eight-bit weights."""

from __future__ import annotations

import mmap
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vllm_module.kernels.choices import trying
from vllm_module.kernels.matmul import scaled_matmul as kernel
from vllm_module.kernels.matmul.matmul_configurations import (
    MatmulConfig,
    ScaledWeight,
    scaled_config_of,
)
from vllm_module.kernels.matmul.scaled_matmul import scaled_matmul, scaled_matmul_triton
from vllm_module.kernels.rows.quantize import dequantize, quantize, quantize_static

_listed = runpy.run_path(str(Path(__file__).parent / "compilation" / "configurations.py"))
scaled_configurations: Any = _listed["scaled_configurations"]
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def quantized(rows: int, columns: int, block: tuple[int, int], dtype=FP8, of=None):
    weight = torch.empty(rows, columns, dtype=dtype)
    scale = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    quantize(torch.randn(rows, columns) if of is None else of, weight, scale, block)
    return weight, scale


def exactly(quantized, scale, block) -> torch.Tensor:
    """Return numbers times scales, in float64."""
    each = scale.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return quantized.double() * each[: quantized.shape[0], : quantized.shape[1]]


def launched(x, weight, scale, block, bias=None, input_scale=None, quantize_input=True, dtype=None):
    return scaled_matmul_triton(
        x, weight, scale, *block, bias, input_scale, quantize_input, dtype or x.dtype
    )


BUCKETS = ["few tokens", "split", "many tokens", "two tiles"]


@pytest.fixture(params=BUCKETS)
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use the configuration of each bucket, with small tiles."""
    rows, two, splits = {
        "few tokens": (16, False, 1),
        "split": (16, False, 3),
        "many tokens": (64, False, 1),
        "two tiles": (64, True, 1),
    }[request.param]
    choose = kernel.scaled_config_of

    def small(*product):
        depth = min(choose(*product).depth, 32)
        return MatmulConfig(rows, 16, depth, 4, 2, splits, two)

    monkeypatch.setattr(kernel, "scaled_config_of", small)
    return request.param


WEIGHTS = [  # dtype, block of the weight, whether the input is quantized
    (FP8, (1, 64), "dynamic"),
    (FP8, (24, 64), "static"),
    (FP8, (16, 32), "dynamic"),
    (FP8, (20, 24), "dynamic"),
    (FP8, (16, 32), "static"),
    (FP8, (1, 64), "none"),
    (FP8, (16, 32), "none"),
    (INT8, (1, 64), "none"),
    (INT8, (7, 33), "dynamic"),
]


@pytest.mark.parametrize("case", range(len(WEIGHTS)))
def test_the_kernel_multiplies_what_is_quantized(as_accurate, bucket, case: int) -> None:
    """Each way of scaling, in each bucket, is as exact as torch in the output's dtype.

    Each meets each dtype in some bucket.
    """
    dtype, block, activations = WEIGHTS[case]
    wide = (torch.float32, torch.float16, torch.bfloat16)[(case + BUCKETS.index(bucket)) % 3]
    weight, scale = quantized(24, 64, block, dtype)
    x, bias = torch.randn(5, 64).to(wide), torch.randn(24).to(wide)
    x[0] *= 100
    static = x.abs().max().float() / 448 if activations == "static" else None
    y = launched(x, weight, scale, block, bias, static, activations != "none")
    assert (y.shape, y.dtype) == ((5, 24), wide)
    rows = x.double()
    if activations != "none" and dtype == FP8:
        shared = (1, block[1])
        rounded, scales = quantized(5, 64, shared, of=x)
        if static is not None:
            scales = static.expand(scales.shape)
            quantize_static(x, rounded, scales, shared)
        rows = exactly(rounded, scales, shared)
    exact = F.linear(rows, exactly(weight, scale, block), bias.double())
    twin = F.linear(rows.to(wide), dequantize(weight, scale, block, wide), bias)
    as_accurate(y, exact, twin)


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 70),
    st.tuples(st.integers(1, 50), st.integers(1, 80)),
    st.sampled_from([(FP8, True), (FP8, False), (INT8, False)]),
)
@settings(max_examples=15)
def test_any_sizes_and_blocks(tokens, outputs, inputs, block, how) -> None:
    """With the shipped configurations, no size has to divide another."""
    dtype, rounds = how
    weight, scale = quantized(outputs, inputs, block, dtype)
    x, shared = torch.randn(tokens, inputs), (1, block[1])
    y = launched(x, weight, scale, block, quantize_input=rounds)
    rows = exactly(*quantized(tokens, inputs, shared, of=x), shared) if rounds else x.double()
    exact = rows @ exactly(weight, scale, block).t()
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5 * inputs**0.5)


@pytest.mark.parametrize(
    ("tokens", "inputs", "block", "dtype", "wide"),
    [
        (4, 96, 64, INT8, torch.float32),
        (65, 320, 128, FP8, torch.bfloat16),
        (65, 320, 128, INT8, torch.bfloat16),
        (4, 384, 256, FP8, torch.bfloat16),
    ],
)
def test_nothing_is_read_beyond_the_last_columns(tokens, inputs, block, dtype, wide) -> None:
    """An incomplete group does not read NaN beyond the last columns."""
    weight, scale = quantized(16, inputs, (block, block), dtype)
    rows = torch.full((tokens, 2 * inputs), torch.nan, dtype=wide)
    held = torch.zeros(16, 2 * inputs).fill_(torch.nan if dtype == FP8 else 99).to(dtype)
    x, around = rows[:, :inputs], held[:, :inputs]
    x.copy_(torch.randn(tokens, inputs))
    around.copy_(weight)
    rounds = dtype == FP8 and tokens == 4
    y = launched(x, around, scale, (block, block), quantize_input=rounds)
    exact = x.double()
    if rounds:
        exact = exactly(*quantized(tokens, inputs, (1, block), of=x), (1, block))
    exact = exact @ exactly(weight, scale, (block, block)).t()
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=1e-4 * inputs**0.5)


def test_defaults_change_nothing() -> None:
    """Scales of tokens are float32 on the tensors' device, whatever torch's defaults are."""
    weight, scale = quantized(16, 64, (1, 64))
    x = torch.randn(5, 64)
    expected = launched(x, weight, scale, (1, 64))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            got = launched(x, weight, scale, (1, 64))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("tokens", [128, 200])
def test_each_tile_is_somewhere(monkeypatch: pytest.MonkeyPatch, tokens: int, two: bool) -> None:
    """Every tile is computed if there are several bands of them, the last one incomplete."""
    config = MatmulConfig(16, 16, 32, 4, 2, two=two)
    monkeypatch.setattr(kernel, "scaled_config_of", lambda *product: config)
    weight, scale = quantized(40, 32, (1, 32))
    x = torch.randn(tokens, 32)
    y = launched(x, weight, scale, (1, 32), quantize_input=False)
    exact = x.double() @ exactly(weight, scale, (1, 32)).t()
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 4096), (28672, 8192), (4096, 14336)])
def test_splits_are_those_of_the_weight(shape: tuple[int, int], wide: torch.dtype) -> None:
    """Up to 128 tokens, the splits of a sum do not depend on the number of tokens."""
    x = torch.empty(1, dtype=wide)
    weight = ScaledWeight(*shape, (1, shape[1]), wide)
    splits = {scaled_config_of(tokens, weight, x).splits for tokens in range(1, 129)}
    assert len(splits) == 1
    programs = splits.pop() * shape[0] // 64
    assert programs >= 256 or shape == (1024, 4096)
    assert scaled_config_of(129, weight, x).splits == 1


@pytest.mark.parametrize("tokens", [1, 33, 65])
def test_splits_are_added_up(as_accurate, tokens: int) -> None:
    """A long sum for few outputs is split; scales and bias are applied after adding up."""
    weight, scale = quantized(48, 2048, (1, 2048))
    described = ScaledWeight(*weight.shape, (1, 2048), weight.dtype)
    assert scaled_config_of(tokens, described, weight).splits == 4
    x, bias = torch.randn(tokens, 2048).bfloat16(), torch.randn(48).bfloat16()
    y = launched(x, weight, scale, (1, 2048), bias)
    rows = exactly(*quantized(tokens, 2048, (1, 2048), of=x), (1, 2048))
    exact = F.linear(rows, exactly(weight, scale, (1, 2048)), bias.double())
    wide = dequantize(weight, scale, (1, 2048), torch.bfloat16)
    as_accurate(y, exact, F.linear(rows.bfloat16(), wide, bias))


@pytest.mark.parametrize("block", [(1, 96), (40, 96), (16, 32), (16, 64)])
def test_tiles_that_descriptors_load(as_accurate, monkeypatch, block) -> None:
    """They are as exact as torch, of tensors with NaN around them that do not fill tiles."""
    config = MatmulConfig(16, 16, 32, 4, 2, way="descriptors")
    monkeypatch.setattr(kernel, "scaled_config_of", lambda *product: config)
    monkeypatch.setattr(kernel, "multiply_tiles", None)
    held, scale = quantized(40, 96, block)
    around = torch.full((48, 128), torch.nan).to(FP8)
    around[:40, :96] = held
    wide, bias = torch.randn(150, 96), torch.randn(40).bfloat16()
    wide[3] *= 1000
    x = torch.full((160, 112), torch.nan).to(FP8)[:150, :96]
    scales = torch.empty(150, -(-96 // block[1]))
    quantize(wide, x, scales, (1, block[1]))
    y = launched(x, around[:40, :96], scale, block, bias, scales, dtype=torch.bfloat16)
    rows = exactly(x, scales, (1, block[1]))
    exact = F.linear(rows, exactly(held, scale, block), bias.double())
    low = F.linear(rows.bfloat16(), dequantize(held, scale, block, torch.bfloat16), bias)
    as_accurate(y, exact, low)


@pytest.mark.parametrize("way", ["descriptors", "torch"])
def test_what_a_candidate_does_not_take_is_multiplied_by_the_default(monkeypatch, way) -> None:
    """Rows that are not whole 16 bytes apart have no descriptor, and torch refuses them."""
    weight, scale = quantized(32, 64, (1, 64))
    x = torch.zeros(130, 72).to(FP8)[:, :64]
    x.copy_(torch.randn(130, 64))
    arguments = (weight, scale, (1, 64), None, torch.tensor(0.5))
    expected = launched(x, *arguments, dtype=torch.bfloat16)
    config = MatmulConfig(64, 64, 32, 4, 2, way=way)
    monkeypatch.setattr(kernel, "scaled_config_of", lambda *product: config)
    assert torch.equal(launched(x, *arguments, dtype=torch.bfloat16), expected)


@pytest.fixture
def _rows_by_torch() -> None:
    """Skip where torch multiplies no rows with scales of their own on a CPU: in 2.11."""
    x, scales = torch.ones(16, 16).to(FP8), torch.ones(16, 1)
    try:
        torch._scaled_mm(x, x.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(str(error).split(":")[0])


@pytest.mark.usefixtures("_rows_by_torch")
@pytest.mark.parametrize(
    ("block", "given"),
    [
        ((1, 512), "rows"),
        ((1, 512), "one"),
        ((32, 512), "rows"),
        ((32, 512), "one"),
        ((128, 128), "groups"),
    ],
)
def test_torch_multiplies_as_the_default_does(as_accurate, monkeypatch, block, given) -> None:
    """Scales reach torch in the layout that it has for them; one call replaces the kernel."""
    weight, scale = quantized(32, 512, block)
    wide, bias = torch.randn(132, 512).bfloat16(), torch.randn(32).bfloat16()
    shared = (132, 512) if given == "one" else (1, block[1])
    rounded, scales = quantized(132, 512, shared, of=wide)
    exact = exactly(rounded, scales, shared)
    real, calls = torch._scaled_mm, []

    def multiply(x, other, *, scale_a, scale_b, bias, out_dtype, out):
        calls.append((scale_a.shape, scale_a.stride(), scale_b.stride()))
        if scale_b.shape[0] == 1:
            return real(
                x, other, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype, out=out
            )
        product = exactly(x, scale_a, (1, 128)) @ exactly(other.t(), scale_b.t(), (128, 128)).t()
        return out.copy_(product + bias)  # torch multiplies by blocks on CUDA only

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    with trying({"scaled_matmul": "torch"}):
        y = launched(
            rounded, weight, scale, block, bias, scales.view(()) if given == "one" else scales,
            dtype=torch.bfloat16,
        )  # fmt: skip
    ((shape, stride, other_stride),) = calls
    one, groups = given == "one" and block[0] == 32, scales.shape[1]
    assert shape == ((1, 1) if one else (132, groups))
    assert groups == 1 or (stride, other_stride) == ((1, 132), (1, groups))
    low = F.linear(exact.bfloat16(), dequantize(weight, scale, block, torch.bfloat16), bias)
    as_accurate(y, F.linear(exact, exactly(weight, scale, block), bias.double()), low)


def test_torch_is_not_asked_for_blocks_of_other_rows(as_accurate, monkeypatch) -> None:
    """Scales of blocks go to torch in multiples of four rows, as cuBLAS takes them."""
    monkeypatch.setattr(torch, "_scaled_mm", None)
    weight, scale = quantized(32, 512, (128, 128))
    rounded, scales = quantized(131, 512, (1, 128))
    with trying({"scaled_matmul": "torch"}):
        y = launched(rounded, weight, scale, (128, 128), None, scales, dtype=torch.bfloat16)
    wide, exact = exactly(weight, scale, (128, 128)), exactly(rounded, scales, (1, 128))
    low = F.linear(exact.bfloat16(), wide.bfloat16())
    as_accurate(y, F.linear(exact, wide), low)


def test_torch_is_not_asked_for_blocks_that_have_all_inputs(as_accurate) -> None:
    """It has one scale or one for each output, and no block for some outputs and all inputs."""
    weight, scale = quantized(160, 112, (128, 128))
    rounded, scales = quantized(257, 112, (1, 128))
    y = launched(rounded, weight, scale, (128, 128), None, scales, dtype=torch.bfloat16)
    wide, exact = exactly(weight, scale, (128, 128)), exactly(rounded, scales, (1, 128))
    as_accurate(y, F.linear(exact, wide), F.linear(exact.bfloat16(), wide.bfloat16()))


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [(1, 4096), (128, 128), (64, 64)])
def test_configurations_list_what_any_batch_meets(block: tuple[int, int], dtype) -> None:
    """A bucket's tokens meet one configuration, which is listed with the bucket's other ones."""
    weight, x = ScaledWeight(6144, 4096, block, dtype), torch.empty(0, dtype=dtype)
    listed = scaled_configurations(weight)
    by_bucket: dict[int, dict[str, MatmulConfig]] = {}
    for each in listed:
        assert by_bucket.setdefault(each.tokens, {}).setdefault(each.name, each.config) is not None
    assert len(listed) == len({(each.case, each.name) for each in listed})
    for tokens in range(1, 2100):
        bucket = next((most for most in by_bucket if tokens <= most), max(by_bucket))
        assert scaled_config_of(tokens, weight, x) == next(iter(by_bucket[bucket].values()))
        if tokens in (7, 500, 2000):
            for name, config in by_bucket[bucket].items():
                with trying({"scaled_matmul": name}):
                    assert scaled_config_of(tokens, weight, x) == config
    described = {most for most, named in by_bucket.items() if next(iter(named)) != "tiles"}
    assert described == ({512, 1024} if dtype == FP8 and block != (64, 64) else set())
    names = {each.name for each in listed}
    assert ("descriptors" in names) == (dtype == FP8 and block != (64, 64))
    assert ("torch" in names) == (dtype == FP8 and block != (64, 64))


@pytest.mark.parametrize("shape", ["one", "rows", "groups"])
@pytest.mark.parametrize("run", [scaled_matmul, "kernel"])
def test_input_that_is_quantized_already(shape: str, run) -> None:
    """Input that a kernel has quantized to FP8 is used with its scales."""
    block = (16, 32)
    weight, scale = quantized(24, 80, block)
    x = torch.randn(2, 3, 80)
    shared = {"one": (6, 80), "rows": (1, 80), "groups": (1, 32)}[shape]
    rounded, scales = quantized(6, 80, shared, of=x.view(6, 80))
    exact = exactly(rounded, scales, shared) @ exactly(weight, scale, block).t()
    given = scales.view(()) if shape == "one" else scales
    how = launched if run == "kernel" else run
    y = how(rounded.view(2, 3, 80), weight, scale, block, None, given, dtype=torch.float32)
    assert (y.shape, y.dtype) == ((2, 3, 24), torch.float32)
    torch.testing.assert_close(y.double().view(6, 24), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("block", [(1, 24), (5, 7), (40, 24)])
def test_the_cpu_multiplies_by_the_dequantized_weight(block, dtype: torch.dtype) -> None:
    """On the CPU activations are not quantized, and keep their dtype."""
    weight, scale = quantized(40, 24, block, dtype)
    for wide in (torch.float32, torch.bfloat16):
        x, bias = torch.randn(2, 3, 24, dtype=wide), torch.randn(40, dtype=wide)
        y = scaled_matmul(x, weight, scale, block, bias)
        assert y.dtype == wide
        expected = x.double() @ dequantize(weight, scale, block, wide).double().t() + bias
        eps = torch.finfo(wide).eps
        torch.testing.assert_close(y.double(), expected, rtol=eps, atol=24 * eps)


@pytest.mark.usefixtures("_rows_by_torch")
@pytest.mark.parametrize("static", [False, True])
def test_the_kernel_is_what_torch_multiplies_by_rows(static: bool) -> None:
    """torch's own scaled matmul, of the same FP8 numbers and scales, gives the same bfloat16."""
    weight, scale = quantized(48, 32, (1, 32))
    x, bias = torch.randn(5, 32).bfloat16(), torch.randn(48).bfloat16()
    rounded, scales = quantized(5, 32, (5, 32) if static else (1, 32), of=x)
    y = launched(x, weight, scale, (1, 32), bias, scales.view(()) if static else None)
    theirs = torch._scaled_mm(
        rounded,
        weight.t(),
        scale_a=scales.expand(5, 1).contiguous(),
        scale_b=scale.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
    )
    torch.testing.assert_close(y, theirs, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("rounds", [False, True])
def test_a_token_of_zeros_stays_zero(rounds: bool) -> None:
    """Padding in a batch does not become NaN."""
    weight, scale = quantized(16, 16, (1, 16))
    y = launched(torch.zeros(2, 16), weight, scale, (1, 16), quantize_input=rounds)
    assert torch.equal(y, torch.zeros(2, 16))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("rounds", [False, True])
def test_what_is_not_finite_stays_in_its_token(bad: float, rounds: bool) -> None:
    """One token's NaN or infinity stays in its own outputs."""
    weight, scale = quantized(20, 32, (1, 32))
    x = torch.randn(18, 32)
    clean = launched(x, weight, scale, (1, 32), quantize_input=rounds)
    x[17, 3] = bad
    y = launched(x, weight, scale, (1, 32), quantize_input=rounds)
    assert torch.equal(y[:17], clean[:17])
    assert not y[17].isfinite().any()


@pytest.mark.parametrize("rounds", [False, True])
def test_views_with_poison_around_them(rounds: bool) -> None:
    """Tokens, weight, scales and bias may be parts of larger tensors, or transposed; NaN stays out.

    Of a contiguous copy of them all, the product is the same.
    """
    around = torch.full((12, 60), torch.nan)
    x = around[2:9, 5:43]
    x.copy_(torch.randn(7, 38))
    held, scale = quantized(20, 38, (1, 38))
    weight = torch.full((44, 25), torch.nan).to(FP8)[3:41, 2:22].t()
    weight.copy_(held)
    scales = torch.full((20, 3), torch.nan)[:, 1:2]
    scales.copy_(scale)
    bias = torch.full((40,), torch.nan)[::2]
    bias.copy_(torch.randn(20))
    y = launched(x, weight, scales, (1, 38), bias, quantize_input=rounds)
    expected = launched(
        x.contiguous(), held, scale, (1, 38), bias.contiguous(), quantize_input=rounds
    )
    assert torch.equal(y, expected)
    assert torch.equal(
        launched(x.t().contiguous().t(), held, scale, (1, 38), bias, quantize_input=rounds), y
    )


def test_rows_that_are_far_apart() -> None:
    """Tokens and rows of the weight are found if their offsets exceed 32 bits."""
    apart = 2**30 + 64
    memory = mmap.mmap(-1, 2 * apart + 64)
    weight = torch.frombuffer(memory, dtype=INT8).as_strided((3, 32), (apart, 1))
    weight.copy_(torch.arange(96).view(3, 32))
    memory = mmap.mmap(-1, 4 * (2 * apart + 64))
    x = torch.frombuffer(memory, dtype=torch.float32).as_strided((3, 32), (apart, 1))
    x.copy_(torch.randn(3, 32))
    y = launched(x, weight, torch.ones(3, 1), (1, 32))
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    """Without tokens there are no outputs; without features, the output is the bias."""
    weight, scale = quantized(8, 16, (1, 16))
    bias = torch.randn(8)
    for run in (scaled_matmul, launched):
        y = run(torch.empty(shape), weight, scale, (1, 16), bias)
        assert y.shape == (*shape[:-1], 8)
        y = run(torch.empty(2, 0), weight[:, :0], scale[:, :0], (1, 16), bias)
        assert torch.equal(y, bias.expand(2, 8))


def test_bad_input_is_refused() -> None:
    """Arguments that do not fit are named, with the numbers."""
    weight, scale = quantized(8, 16, (1, 16))
    x, rounded = torch.randn(2, 3, 16), torch.zeros(2, 3, 16).to(FP8)
    one = torch.ones(())
    refused = [
        (r"weight must have the shape \[any, 12\], got \[8, 16\]", (x[..., :12], weight, scale)),
        (r"x must be .*, got torch.float64", (x.double(), weight, scale, torch.float32)),
        (r"the output must be .*, got torch.int8", (x, weight, scale, INT8)),
        (r"weight must be .*int8, got torch.float32", (x, weight.float(), scale)),
        (r"scale must have the shape \[8, 1\], got \[1, 8\]", (x, weight, scale.t())),
        (r"scale must be torch.float32, got torch.float16", (x, weight, scale.half())),
        (r"scale is on meta, and must be on cpu", (x, weight, scale.to("meta"))),
        (r"x is quantized, and its scale is missing", (rounded, weight, scale, torch.half)),
    ]
    for message, (tokens, held, scales, *dtype) in refused:
        with pytest.raises(ValueError, match=message):
            scaled_matmul(tokens, held, scales, (1, 16), dtype=dtype[0] if dtype else None)
    with pytest.raises(ValueError, match=r"a block rows and columns, got \(0, 16\)"):
        scaled_matmul(x, weight, scale, (0, 16))
    with pytest.raises(ValueError, match=r"bias must have the shape \[8\], got \[7\]"):
        scaled_matmul(x, weight, scale, (1, 16), torch.zeros(7))
    with pytest.raises(ValueError, match=r"bias must be torch.float32, got torch.float16"):
        scaled_matmul(x, weight, scale, (1, 16), torch.zeros(8).half())
    with pytest.raises(ValueError, match=r"input_scale must have the shape \[\], got \[6, 1\]"):
        scaled_matmul(x, weight, scale, (1, 16), None, one.expand(6, 1))
    with pytest.raises(ValueError, match=r"input_scale must have the shape \[6, 1\], got \[5\]"):
        scaled_matmul(rounded, weight, scale, (1, 16), None, torch.ones(5), dtype=torch.half)
    with pytest.raises(ValueError, match=r"its weight must be torch.float8_e4m3fn, got torch.int8"):
        scaled_matmul(rounded, weight.to(INT8), scale, (1, 16), None, one, dtype=torch.half)


def test_the_operator_is_one() -> None:
    """It has a schema and a fake, and works with meta tensors and torch.compile."""
    weight, scale = quantized(8, 16, (1, 16))
    x, bias = torch.randn(2, 3, 16), torch.randn(8)
    y = scaled_matmul(
        x.to("meta"), weight.to("meta"), scale.to("meta"), (1, 16), dtype=torch.float16
    )
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 8), torch.float16, "meta")
    torch.library.opcheck(
        torch.ops.vllm_module.scaled_matmul.default,
        (x, weight.to(INT8), scale, 1, 16, bias, None, True, torch.float32),  # it has no FP8 itself
    )
    permuted = torch.randn(3, 2, 16).transpose(0, 1)
    for one in (permuted, permuted.to(torch.bfloat16), torch.randn(16, 5).t()):
        torch.library.opcheck(
            torch.ops.vllm_module.scaled_matmul.default,
            (one, weight.to(INT8), scale, 1, 16, None, None, True, one.dtype),
        )
    compiled = torch.compile(scaled_matmul, fullgraph=True, backend="aot_eager")
    assert torch.equal(
        compiled(x, weight, scale, (1, 16), bias), scaled_matmul(x, weight, scale, (1, 16), bias)
    )
