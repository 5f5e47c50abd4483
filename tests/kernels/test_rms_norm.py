"""The norm, with and without a residual and quantization, against float64 and its definition."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.kernels import dtypes as formats
from vllm_module.kernels.rows import quantized_rows
from vllm_module.kernels.rows import rms_norm as kernel
from vllm_module.kernels.rows.quantize import quantize, quantize_static
from vllm_module.kernels.rows.rms_norm import fused_add_rms_norm, rms_norm, rms_norm_quantize

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPS = 1e-6
dtypes = pytest.mark.parametrize("dtype", DTYPES)
OPS = torch.ops.vllm_module
# Of infinities and NaN, of which numpy warns, a device makes what they are worth.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def exact(x: torch.Tensor, weight: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (weight.double() + offset)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def fused_qkv(tokens: int, heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a view of some heads, of every other token."""
    whole = torch.full((2 * tokens, heads + 2, size), torch.nan, dtype=dtype).flatten(1)
    view = whole[::2, size : (heads + 1) * size].unflatten(-1, (heads, size))
    view.copy_(torch.randn(tokens, heads, size))
    return view


VIEWS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "vector": lambda dtype: torch.randn(96).to(dtype),
    "one row": lambda dtype: torch.randn(1, 200).to(dtype),
    "one column": lambda dtype: torch.randn(5, 1).to(dtype),
    "rows of a power of two": lambda dtype: torch.randn(7, 1024).to(dtype),
    "a long row": lambda dtype: torch.randn(2, 5000).to(dtype),
    "four dimensions": lambda dtype: torch.randn(2, 3, 2, 40).to(dtype),
    "heads": lambda dtype: fused_qkv(70, 3, 80, dtype),
    "transposed": lambda dtype: torch.randn(72, 9).to(dtype).t(),
    "large": lambda dtype: (torch.randn(3, 48) * 300).to(dtype),
    "small": lambda dtype: (torch.randn(3, 48) * 1e-4).to(dtype),
}
views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())


@dtypes
@views
def test_it_is_as_accurate_as_torch(view, dtype: torch.dtype, as_accurate) -> None:
    """For any shape and strides, the norm is as near to float64's as torch's is."""
    x = view(dtype)
    weight = torch.randn(x.shape[-1]).to(dtype)
    y = kernel.rms_norm_triton(x, weight, EPS)
    assert y.dtype == dtype
    as_accurate(y, exact(x, weight), kernel.rms_norm_reference(x, weight, EPS))


@dtypes
@views
def test_the_sum_is_rounded_and_then_normalized(view, dtype: torch.dtype, as_accurate) -> None:
    """The new residual is torch's sum bit for bit, and is normalized; arguments stay."""
    x, residual = view(dtype), view(dtype)
    kept, weight = (x.clone(), residual.clone()), torch.randn(x.shape[-1]).to(dtype)
    y, total = kernel.fused_add_rms_norm_triton(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    as_accurate(y, exact(total, weight), kernel.rms_norm_reference(total, weight, EPS))
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_the_norm_is_rounded_before_it_is_multiplied() -> None:
    """With a wide weight the norm has the values of the narrow dtype, as transformers rounds it."""
    x, weight = torch.randn(4, 64).bfloat16(), torch.full((64,), 1 / 3)
    y = kernel.rms_norm_triton(x, weight, EPS)
    assert y.dtype == torch.float32
    narrow = kernel.rms_norm_triton(x, torch.ones(64).bfloat16(), EPS)
    assert torch.equal(y, narrow.float() * weight)


@pytest.mark.parametrize("others", [(torch.bfloat16, torch.float32), (torch.float32,) * 2])
def test_dtypes_promote(others: tuple[torch.dtype, torch.dtype], as_accurate) -> None:
    """A residual and a weight of other dtypes promote the results as torch does."""
    x, residual = torch.randn(5, 64).bfloat16(), torch.randn(5, 64).to(others[0])
    weight = torch.randn(64).to(others[1])
    got = kernel.fused_add_rms_norm_triton(x, residual, weight, EPS)
    reference = kernel.fused_add_rms_norm_reference(x, residual, weight, EPS)
    assert [t.dtype for t in got] == [t.dtype for t in reference]
    assert torch.equal(got[1], reference[1])
    as_accurate(got[0], exact(got[1], weight), reference[0])


@dtypes
@views
def test_an_offset_is_added_to_the_weight_in_float32(view, dtype: torch.dtype, as_accurate) -> None:
    """With an offset the result is rounded once, after the multiplication, with a residual too."""
    x, residual = view(dtype), view(dtype)
    weight = (torch.randn(x.shape[-1]) * 1e-2).to(dtype)  # 16 bits lose it beside 1
    y = kernel.rms_norm_triton(x, weight, EPS, 1.0)
    assert y.dtype == dtype
    as_accurate(y, exact(x, weight, 1.0), kernel.rms_norm_reference(x, weight, EPS, 1.0))
    y, total = kernel.fused_add_rms_norm_triton(x, residual, weight, EPS, 1.0)
    assert torch.equal(total, x + residual)
    reference = kernel.rms_norm_reference(total, weight, EPS, 1.0)
    as_accurate(y, exact(total, weight, 1.0), reference)


@dtypes
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("columns", [300, 2048, 5000])
def test_rows_that_cannot_be_held(
    monkeypatch, dtype: torch.dtype, columns: int, offset: float | None
) -> None:
    """Torch's norm of a long row is that of a row in registers, with residual and quantized."""
    x, residual = torch.randn(2, 3, columns).to(dtype)
    weight = torch.randn(columns).to(dtype)
    held = kernel.fused_add_rms_norm_triton(x, residual, weight, EPS, offset)
    monkeypatch.setattr(kernel, "_HELD", 512)
    y, total = kernel.fused_add_rms_norm_triton(x, residual, weight, EPS, offset)
    assert torch.equal(total, held[1])
    torch.testing.assert_close(y, held[0])
    assert torch.equal(kernel.rms_norm_triton(total, weight, EPS, offset), y)
    args = residual, weight, EPS, E4M3, columns, None, offset
    quantized, scale, again = kernel.rms_norm_quantize_triton(x, *args)
    assert torch.equal(again, total)
    assert torch.equal(bits(quantized), bits(by_definition(y, E4M3, None, None)[0]))
    assert torch.equal(scale, by_definition(y, E4M3, None, None)[1])


@pytest.mark.parametrize("columns", [16384, 16385, 65536])  # registers hold 16384 in float32
def test_the_longest_row(as_accurate, columns: int) -> None:
    """A row of 65536 columns is normalized, and a longer one is refused with the numbers."""
    x, weight = torch.randn(1, columns), torch.randn(columns)
    y = kernel.rms_norm_triton(x, weight, EPS)
    as_accurate(y, exact(x, weight), kernel.rms_norm_reference(x, weight, EPS))
    with pytest.raises(ValueError, match="at most 65536 columns, got 65537"):
        rms_norm(torch.empty(1, 65537), torch.empty(65537), EPS)


def by_definition(
    y: torch.Tensor, dtype: torch.dtype, group: int | None, static: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = y.reshape(-1, y.shape[-1])
    rows, columns = wide.shape
    group = columns if group is None else group
    quantized = torch.empty(wide.shape, dtype=dtype)
    if static is None:
        scale = torch.empty(rows, -(-columns // group))
        quantize(wide, quantized, scale, (1, group))
    else:
        scale = static.expand(rows, 1).clone()
        quantize_static(wide, quantized, scale, (1, columns))
    return quantized.view(y.shape), scale


@given(
    shape=st.one_of(
        st.tuples(st.integers(1, 70), st.integers(1, 300)),
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 70)),
    ),
    dtype=st.sampled_from(DTYPES),
    weight=st.sampled_from(DTYPES),
    quantized=st.sampled_from([E4M3, E5M2]),
    group=st.sampled_from([None, 1, 16, 128, 512, "static"]),
    residual=st.booleans(),
    offset=st.sampled_from([None, 0.0, 1.0]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_fused_quantization_is_that_of_the_norm(
    shape, dtype, weight, quantized, group, residual, offset, seed
) -> None:
    """Quantizing in the kernel gives the bits of quantizing its written norm."""
    generator = torch.Generator().manual_seed(seed)
    x, other = (torch.randn(2, *shape, generator=generator) * 5).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(weight)
    static = torch.tensor(0.01) if group == "static" else None
    width = {None: shape[-1], "static": 0}.get(group, group)
    got = kernel.rms_norm_quantize_triton(
        x, other if residual else None, weight, EPS, quantized, width, static, offset
    )
    if residual:
        y, total = kernel.fused_add_rms_norm_triton(x, other, weight, EPS, offset)
        assert torch.equal(got[2], total)
    else:
        y = kernel.rms_norm_triton(x, weight, EPS, offset)
    expected = by_definition(y, quantized, None if static is not None else group, static)
    assert torch.equal(got[1], expected[1])
    assert torch.equal(bits(got[0]), bits(expected[0]))


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("residual", [False, True])
def test_the_public_functions(group: int | None, residual: bool) -> None:
    """On the CPU, they are the references: norm, sum and scales by their definitions."""
    x, other = torch.randn(2, 3, 5, 40).bfloat16()
    weight = torch.randn(40).bfloat16()
    total = x + other if residual else x
    y = rms_norm(total, weight, EPS)
    assert torch.equal(y, kernel.rms_norm_reference(total, weight, EPS))
    if residual:
        for got, expected in zip(
            fused_add_rms_norm(x, other, weight, EPS), (y, total), strict=True
        ):
            assert torch.equal(got, expected)
    for static in (None, torch.tensor([0.5])):
        if static is not None and group:
            continue
        quantized, scale, summed = rms_norm_quantize(
            x, other if residual else None, weight, EPS, group=group, scale=static
        )
        expected = by_definition(y, E4M3, group, static)
        assert quantized.shape == x.shape
        assert torch.equal(bits(quantized), bits(expected[0]))
        assert torch.equal(scale, expected[1])
        assert (summed is None) is (not residual)
        assert summed is None or torch.equal(summed, total)
        assert static is None or scale.data_ptr() != static.data_ptr()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("group", [0, 16, 48])
def test_what_is_not_finite_stays_in_its_row(bad: float, group: int) -> None:
    """NaN and infinity give what the reference gives, in their own row only."""
    x, weight = torch.randn(5, 48), torch.randn(48)
    x[2, 7] = bad
    static = None if group else torch.ones(1)
    for by in ("triton", "reference"):
        y = getattr(kernel, f"rms_norm_{by}")(x, weight, EPS)
        assert y[[0, 1, 3, 4]].isfinite().all()
        assert y[2].isnan().sum() == (48 if bad != bad else 1)
        assert (y[2].nan_to_num() == 0).all()
        args = None, weight, EPS, E4M3, group, static
        quantized, scale, _ = getattr(kernel, f"rms_norm_quantize_{by}")(x, *args)
        assert quantized[[0, 1, 3, 4]].float().isfinite().all()
        assert scale[[0, 1, 3, 4]].isfinite().all()
        assert torch.equal(quantized[2].float().isnan(), y[2].isnan()) or group
        assert scale[2].isfinite().any() == (group == 0 or (group == 16 and bad == bad))


@pytest.mark.parametrize("eps", [0.0, EPS])
def test_rows_of_zeros(eps: float) -> None:
    """Zeros stay zeros, in eight bits too; without eps they are 0 / 0, as in the reference."""
    x, weight = torch.zeros(3, 40), torch.ones(40)
    y = kernel.rms_norm_triton(x, weight, eps)
    assert torch.equal(y, kernel.rms_norm_reference(x, weight, eps)) or (
        not eps and y.isnan().all()
    )
    quantized, scale, _ = kernel.rms_norm_quantize_triton(x, None, weight, eps, E4M3, 40, None)
    assert quantized.float().isnan().all() == (not eps)
    assert (scale > 0).all() or not eps


def test_squares_that_vanish() -> None:
    """If all squares are 0 the scale is infinite, and padding beside the row adds no NaN."""
    x, weight = torch.full((1, 40), 1e-30), torch.ones(40)
    _, scale, _ = kernel.rms_norm_quantize_triton(x, None, weight, 0.0, E4M3, 16, None)
    assert torch.equal(scale, torch.full((1, 3), torch.inf))


def test_nothing_is_written_outside(monkeypatch) -> None:
    """A kernel writes nothing around its results."""
    guards = []

    def between(shape, dtype=None, device=None) -> torch.Tensor:
        size = shape.numel() if isinstance(shape, torch.Size) else shape
        whole = torch.full((size + 128,), 77, dtype=torch.float32).to(dtype)
        guards.append(whole)
        return whole[64 : size + 64]

    def empty(*shape, dtype=None, device=None) -> torch.Tensor:
        shape = torch.Size(shape[0] if len(shape) == 1 else shape)
        return between(shape, dtype).view(shape)

    x, residual, weight = torch.randn(9, 72), torch.randn(9, 72), torch.randn(72)
    for module in (kernel, quantized_rows):
        fake = type("fake", (), {"__getattr__": lambda _, name: getattr(torch, name)})()
        fake.empty = empty
        monkeypatch.setattr(module, "torch", fake)
    kernel.rms_norm_triton(x, weight, EPS)
    kernel.rms_norm_quantize_triton(x, residual, weight, EPS, E4M3, 16, None)
    kernel.fused_add_rms_norm_triton(x, residual, weight, EPS)
    assert len(guards) == 6
    for whole in guards:
        edge = torch.full((64,), 77.0).to(whole.dtype).float()
        assert torch.equal(whole[:64].float(), edge)
        assert torch.equal(whole[-64:].float(), edge)
        assert (whole[64:-64].float() != 77).any()


def test_offsets_beyond_32_bits() -> None:
    """Rows are found if their index times the stride exceeds 32 bits."""
    stride = 1 << 30
    memory = torch.frombuffer(mmap.mmap(-1, 2 * (3 * stride + 64)), dtype=torch.bfloat16)
    x = memory.as_strided((4, 64), (stride, 1))
    x.copy_(torch.randn(4, 64))
    weight = torch.ones(64).bfloat16()
    near = x.clone()
    assert torch.equal(
        kernel.rms_norm_triton(x, weight, EPS), kernel.rms_norm_triton(near, weight, EPS)
    )


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0,), (2, 0, 8)])
def test_empty(shape: tuple[int, ...]) -> None:
    """Without rows or columns, nothing is launched and results are empty, like the reference's."""
    x, weight = torch.empty(shape), torch.empty(shape[-1])
    assert rms_norm(x, weight, EPS).shape == shape
    assert kernel.rms_norm_triton(x, weight, EPS).shape == shape
    for static, group in ((None, None), (None, 16), (torch.tensor(2.0), None)):
        public = rms_norm_quantize(x, x, weight, EPS, group=group, scale=static)
        inner = 0 if static is not None else group or max(1, shape[-1])
        got = kernel.rms_norm_quantize_triton(x, x, weight, EPS, E4M3, inner, static)
        assert [t.shape for t in got] == [t.shape for t in public]
        for one, other in zip(got, public, strict=True):
            assert torch.equal(bits(one), bits(other))


X, W = torch.randn(3, 16), torch.randn(16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: rms_norm(X, torch.ones(15), EPS),
            r"weight must have the shape \[16\], got \[15\]",
        ),
        (
            lambda: rms_norm(X, W.view(1, 16), EPS),
            r"weight must have the shape \[16\], got \[1, 16",
        ),
        (lambda: rms_norm(X.int(), W, EPS), r"x must be .*bfloat16.*, got torch\.int32"),
        (lambda: rms_norm(X, W.to("meta"), EPS), "weight is on meta, and must be on cpu"),
        (lambda: rms_norm(torch.tensor(1.0), W, EPS), r"got the shape \[\]"),
        (lambda: fused_add_rms_norm(X, X[:2], W, EPS), r"residual .*\[3, 16\], got \[2, 16\]"),
        (lambda: rms_norm_quantize(X, None, W, EPS, torch.int8), r"float8_e4m3fn or .*torch\.int8"),
        (lambda: rms_norm_quantize(X, None, W, EPS, group=48), "power of two, got 48"),
        (lambda: rms_norm_quantize(X, None, W, EPS, group=0), "power of two, got 0"),
        (lambda: rms_norm_quantize(X, None, W, EPS, scale=W), r"scale .*\[1\], got \[16\]"),
        (lambda: rms_norm_quantize(X, None, W, EPS, scale=torch.ones(1).half()), "float16"),
        (
            lambda: rms_norm_quantize(X, None, W, EPS, group=16, scale=torch.ones(1)),
            "no groups, got group=16",
        ),
        (lambda: rms_norm_quantize(X.double(), None, W, EPS), r"x must be .*got torch\.float64"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    """Arguments that do not fit are refused, with what was expected and what came."""
    with pytest.raises(ValueError, match=message):
        call()


CALLS = {
    "rms_norm": lambda x, w: rms_norm(x, w, EPS),
    "fused_add_rms_norm": lambda x, w: fused_add_rms_norm(x, x, w, EPS),
    "offset": lambda x, w: fused_add_rms_norm(x, x, w, EPS, 1.0),
    "offset, quantized": lambda x, w: rms_norm_quantize(x, x, w, EPS, weight_offset=1.0),
    "per token": lambda x, w: rms_norm_quantize(x, x, w, EPS),
    "per group": lambda x, w: rms_norm_quantize(x, None, w, EPS, E5M2, 8)[:2],
    "static": lambda x, w: rms_norm_quantize(x, x, w, EPS, scale=w[:1].float()),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@calls
def test_meta_tensors(call: Callable[..., object]) -> None:
    """On the meta device, results have the same shapes and dtypes as elsewhere."""
    x, weight = torch.randn(2, 3, 40).bfloat16(), torch.ones(40)
    real = call(x, weight)
    meta = call(x.to("meta"), weight.to("meta"))
    for one, other in zip(
        *((t,) if isinstance(t, torch.Tensor) else t for t in (real, meta)), strict=True
    ):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert other.is_meta


@calls
def test_compiled_whole(call: Callable[..., object]) -> None:
    """torch.compile traces the calls without a graph break, with the same bits."""
    x, weight = torch.randn(4, 40), torch.ones(40)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, expected = compiled(x, weight), call(x, weight)
    for one, other in zip(
        *((t,) if isinstance(t, torch.Tensor) else t for t in (got, expected)), strict=True
    ):
        assert torch.equal(bits(one), bits(other))


# The last traces with symbolic sizes, and takes most of the time.
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def test_operators_are_what_they_say() -> None:
    """The operators' schemas and fakes pass PyTorch's own check, compiled for one layout of x."""
    weight = torch.ones(40)
    for x in (torch.randn(4, 40), torch.randn(40, 4).t(), torch.randn(3, 4, 40).transpose(0, 1)):
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (OPS.rms_norm.default, (x, weight, EPS)),
            (OPS.fused_add_rms_norm.default, (x, x.clone(), weight, EPS, 1.0)),
        ]
        for group, static in ((40, None), (8, None), (0, torch.ones(()))):
            args = x, x.clone(), weight, EPS, E4M3, group, static
            calls.append((OPS.rms_norm_quantize.default, args))
        for operator, args in calls:
            torch.library.opcheck(
                operator, args, test_utils=CHECKS[: 4 if x.is_contiguous() else 3]
            )


def test_a_gpu_without_fp8_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """If kernels cannot convert to FP8, torch quantizes the written norm."""
    x, weight = torch.randn(4, 40), torch.ones(40)
    calls = [
        (x, residual, weight, EPS, dtype, group, static)
        for dtype in (E4M3, E5M2)
        for residual in (None, x.clone())
        for group, static in ((8, None), (0, torch.ones(1)))
    ]
    fused = [kernel.rms_norm_quantize_triton(*call) for call in calls]
    monkeypatch.setattr(formats, "capability", lambda tensor: (8, 6))
    monkeypatch.setattr(kernel, "store_quantized", None)
    for call, expected in zip(calls, fused, strict=True):
        for one, other in zip(kernel.rms_norm_quantize_triton(*call), expected, strict=True):
            assert torch.equal(bits(one), bits(other))
