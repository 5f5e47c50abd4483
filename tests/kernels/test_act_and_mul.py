"""Gated activations, quantized or not, against float64 and their definition."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vllm_module.kernels import dtypes as formats
from vllm_module.kernels.rows import act_and_mul as kernel
from vllm_module.kernels.rows import quantized_rows
from vllm_module.kernels.rows.act_and_mul import (
    gelu_and_mul,
    gelu_and_mul_quantize,
    silu_and_mul,
    silu_and_mul_quantize,
    swiglu_oai_and_mul,
)
from vllm_module.kernels.rows.quantize import quantize, quantize_static

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
dtypes = pytest.mark.parametrize("dtype", DTYPES)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)
OPS = torch.ops.vllm_module
# Of exponentials beyond float32, of which numpy warns, a device makes what they are worth.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def exact(x: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = x.double().chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def between(dtype: torch.dtype) -> torch.Tensor:
    whole = torch.full((24, 200), torch.nan, dtype=dtype)
    view = whole[::2, 32:112]
    view.copy_(torch.randn(12, 80))
    return view


VIEWS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "vector": lambda dtype: torch.randn(640).to(dtype),
    "one row": lambda dtype: torch.randn(1, 600).to(dtype),
    "one column": lambda dtype: torch.randn(500, 2).to(dtype),
    "odd": lambda dtype: torch.randn(9, 2 * 77).to(dtype),
    "longer than a tile": lambda dtype: torch.randn(3, 2 * 5000).to(dtype),
    "four dimensions": lambda dtype: torch.randn(2, 3, 7, 40).to(dtype),
    "between others": between,
    "of three dimensions": lambda dtype: torch.randn(6, 5, 64).to(dtype)[::2, 1:4],
    "transposed": lambda dtype: torch.randn(72, 30).to(dtype).t(),
    "small": lambda dtype: (torch.randn(200, 96) * 0.1).to(dtype),
}


@activations
@pytest.mark.parametrize("view", VIEWS)
def test_it_is_as_accurate_as_torch(view: str, activation: str, as_accurate) -> None:
    """For any shape and strides, the result is as near to float64's as torch's is.

    Each of them and each activation meets each dtype.
    """
    dtype = DTYPES[([*VIEWS].index(view) + [*ACTIVATIONS].index(activation)) % 3]
    x = VIEWS[view](dtype)
    y = kernel.act_and_mul_triton(x, activation)
    assert y.dtype == dtype
    as_accurate(y, exact(x, activation), kernel.act_and_mul_reference(x, activation))


@activations
@dtypes
def test_the_whole_range_of_the_gate(dtype: torch.dtype, activation: str, as_accurate) -> None:
    """Gates from the smallest to the largest number do not overflow, and keep their tails."""
    most = torch.finfo(dtype).max / 2
    powers = torch.logspace(-6, 38, 400).clamp(max=most)
    gate = torch.cat((powers, -powers, torch.linspace(-12, 12, 200))).to(dtype)
    x = torch.stack((gate, torch.full_like(gate, 0.5)), -1)
    got = kernel.act_and_mul_triton(x, activation)
    scale = gate.abs().clamp(min=1).unsqueeze(1).double()  # each gate counts alike
    low = kernel.act_and_mul_reference(x, activation).double()
    as_accurate(got.double() / scale, exact(x, activation) / scale, low / scale)


def test_rounding_is_once() -> None:
    """In 16 bits, the kernel's result is nearly always the nearest to float64's."""
    x = torch.randn(64, 256).bfloat16()
    nearest = exact(x, "silu").bfloat16()
    once = kernel.act_and_mul_triton(x, "silu") == nearest
    twice = kernel.act_and_mul_reference(x, "silu") == nearest
    assert once.float().mean() > 0.99
    assert twice.float().mean() < 0.9


@dtypes
def test_clamped_gates_are_as_accurate_as_torch(dtype: torch.dtype, as_accurate) -> None:
    """gpt-oss's gate is float64's, where numbers are clamped and where they are not."""
    x = between(dtype) * 6
    alpha, limit = 1.702, 7.0
    gate, up = x.double().chunk(2, -1)
    assert ((gate > limit).any(), (gate < -limit).any(), (up > limit).any()) == (True, True, True)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    y = kernel.swiglu_oai_and_mul_triton(x, alpha, limit)
    assert y.dtype == dtype
    exact = (up + 1) * gate * torch.sigmoid(alpha * gate)
    as_accurate(y, exact, swiglu_oai_and_mul(x))
    assert not torch.equal(y, swiglu_oai_and_mul(x, alpha=1.0))
    assert not torch.equal(y, swiglu_oai_and_mul(x, limit=1.0))


@pytest.mark.parametrize("half", [3, 20])
def test_clamping_keeps_nan(half: int) -> None:
    """NaN of a gate or of its factor is not clamped to the limit; infinity is."""
    x = torch.randn(4, 32)
    x[0, half], x[1, half] = torch.nan, torch.inf
    got, expected = kernel.swiglu_oai_and_mul_triton(x, 1.702, 7.0), swiglu_oai_and_mul(x)
    assert got.isnan().nonzero().tolist() == [[0, half % 16]]
    torch.testing.assert_close(got, expected, equal_nan=True)


@activations
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_the_references(activation: str, bad: float) -> None:
    """NaN and infinity, in gate or up, give what torch gives, and only in their own element."""
    x = torch.randn(3, 32)
    x[0, 3] = x[1, 20] = bad
    got, expected = (
        getattr(kernel, f"act_and_mul_{by}")(x, activation) for by in ("triton", "reference")
    )
    torch.testing.assert_close(got, expected, equal_nan=True)


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
        st.tuples(st.integers(1, 40), st.integers(1, 300)),
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 70)),
        st.tuples(st.integers(1, 2), st.integers(2000, 4500)),
    ),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(list(ACTIVATIONS)),
    quantized=st.sampled_from([E4M3, E5M2]),
    group=st.sampled_from([None, 1, 16, 128, 4096, "static"]),
    held=st.sampled_from([64, 65536]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_fused_quantization_is_that_of_the_result(
    shape, dtype, activation, quantized, group, held, seed
) -> None:
    """Quantizing in the kernel gives the bits of quantizing its written result."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*shape[:-1], 2 * shape[-1])
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    static = torch.tensor([0.01]) if group == "static" else None
    width = {None: shape[-1] // 2, "static": 0}.get(group, group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_HELD", held)  # a row that cannot be held is written first
        got = kernel.act_and_mul_quantize_triton(x, activation, quantized, width, static)
    y = kernel.act_and_mul_triton(x, activation)
    expected = by_definition(y, quantized, None if static is not None else group, static)
    assert got[0].shape == y.shape
    assert torch.equal(got[1], expected[1])
    assert torch.equal(bits(got[0]), bits(expected[0]))


@pytest.mark.parametrize("group", [None, 16])
def test_the_public_functions(group: int | None) -> None:
    """On the CPU, they are torch's activations, with scales by their definition."""
    x = torch.randn(2, 3, 80).bfloat16()
    gate, up = x.chunk(2, -1)
    cases = [
        (silu_and_mul, silu_and_mul_quantize, F.silu(gate) * up, ()),
        (gelu_and_mul, gelu_and_mul_quantize, F.gelu(gate) * up, ()),
        (gelu_and_mul, gelu_and_mul_quantize, F.gelu(gate) * up, ("none",)),
        (
            gelu_and_mul,
            gelu_and_mul_quantize,
            F.gelu(gate, approximate="tanh") * up,
            ("tanh",),
        ),
    ]
    for plain, quantizing, expected, how in cases:
        assert torch.equal(plain(x, *how), expected)
        for static in (None,) if group else (None, torch.tensor([0.5])):
            got = quantizing(x, *how, dtype=E5M2, group=group, scale=static)
            wanted = by_definition(expected, E5M2, group, static)
            assert torch.equal(bits(got[0]), bits(wanted[0]))
            assert torch.equal(got[1], wanted[1])


def test_nothing_is_written_outside(monkeypatch) -> None:
    """A kernel writes nothing around its results."""
    guards = []

    def empty(*shape, dtype=None, device=None) -> torch.Tensor:
        shape = torch.Size(shape[0] if len(shape) == 1 else shape)
        whole = torch.full((shape.numel() + 128,), 77, dtype=torch.float32).to(dtype)
        guards.append(whole)
        return whole[64:-64].view(shape)

    for module in (kernel, quantized_rows):
        fake = type("fake", (), {"__getattr__": lambda _, name: getattr(torch, name)})()
        fake.empty = empty
        monkeypatch.setattr(module, "torch", fake)
    x = torch.randn(9, 144)
    kernel.act_and_mul_triton(x, "silu")
    for group, static in ((72, None), (16, None), (0, torch.ones(1))):
        kernel.act_and_mul_quantize_triton(x, "gelu", E4M3, group, static)
    assert len(guards) == 1 + 3 * 2
    for whole in guards:
        edge = torch.full((64,), 77.0).to(whole.dtype).float()
        assert torch.equal(whole[:64].float(), edge)
        assert torch.equal(whole[-64:].float(), edge)


def test_offsets_beyond_32_bits() -> None:
    """Rows are found if their index times the stride exceeds 32 bits."""
    stride = 1 << 30
    memory = torch.frombuffer(mmap.mmap(-1, 2 * (3 * stride + 64)), dtype=torch.bfloat16)
    x = memory.as_strided((4, 64), (stride, 1))
    x.copy_(torch.randn(4, 64))
    near = x.clone()
    assert torch.equal(
        kernel.act_and_mul_triton(x, "silu"), kernel.act_and_mul_triton(near, "silu")
    )


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0,), (2, 0, 8)])
def test_empty(shape: tuple[int, ...]) -> None:
    """Without rows or columns, nothing is launched and results are empty, like the reference's."""
    x, half = torch.empty(shape), (*shape[:-1], shape[-1] // 2)
    assert silu_and_mul(x).shape == kernel.act_and_mul_triton(x, "silu").shape == half
    for static, group in ((None, None), (None, 16), (torch.tensor(2.0), None)):
        public = silu_and_mul_quantize(x, group=group, scale=static)
        inner = 0 if static is not None else group or max(1, half[-1])
        got = kernel.act_and_mul_quantize_triton(x, "silu", E4M3, inner, static)
        for one, other in zip(got, public, strict=True):
            assert one.shape == other.shape
            assert torch.equal(bits(one), bits(other))


X = torch.randn(3, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: silu_and_mul(X[:, :15]), r"gate and up .*got the shape \[3, 15\]"),
        (lambda: silu_and_mul(torch.tensor(1.0)), r"gate and up .*got the shape \[\]"),
        (lambda: swiglu_oai_and_mul(X[:, :15]), r"gate and up .*got the shape \[3, 15\]"),
        (lambda: silu_and_mul(X.int()), r"x must be .*bfloat16.*, got torch\.int32"),
        (lambda: gelu_and_mul(X, "erf"), "approximate must be 'none' or 'tanh', got 'erf'"),
        (lambda: gelu_and_mul_quantize(X, ""), "approximate must be 'none' or 'tanh', got ''"),
        (lambda: silu_and_mul_quantize(X, torch.int8), r"float8_e4m3fn or .*torch\.int8"),
        (lambda: silu_and_mul_quantize(X, group=48), "power of two, got 48"),
        (lambda: silu_and_mul_quantize(X, scale=X[0]), r"scale .*\[1\], got \[16\]"),
        (lambda: silu_and_mul_quantize(X, group=8, scale=X[0, :1]), "no groups, got group=8"),
        (lambda: silu_and_mul_quantize(X.double()), r"x must be .*got torch\.float64"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    """Arguments that do not fit are refused, with what was expected and what came."""
    with pytest.raises(ValueError, match=message):
        call()


CALLS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "silu": lambda x: (silu_and_mul(x),),
    "gelu": lambda x: (gelu_and_mul(x, "tanh"),),
    "swiglu of gpt-oss": lambda x: (swiglu_oai_and_mul(x),),
    "per token": silu_and_mul_quantize,
    "per group": lambda x: gelu_and_mul_quantize(x, dtype=E5M2, group=8),
    "static": lambda x: silu_and_mul_quantize(x, scale=x.new_ones((), dtype=torch.float32)),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@calls
def test_meta_tensors(call) -> None:
    """On the meta device, results have the same shapes and dtypes as elsewhere."""
    x = torch.randn(2, 3, 80).bfloat16()
    for one, other in zip(call(x), call(x.to("meta")), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert other.is_meta


@calls
def test_compiled_whole(call) -> None:
    """torch.compile traces the calls without a graph break, with the same bits."""
    x = torch.randn(4, 80)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(x), call(x), strict=True):
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
    for x in (torch.randn(4, 80), torch.randn(80, 4).t(), torch.randn(3, 4, 80).transpose(0, 1)):
        calls = [
            (OPS.act_and_mul.default, (x, "gelu")),
            (OPS.act_and_mul.default, (x, "silu")),
            (OPS.swiglu_oai_and_mul.default, (x, 1.702, 7.0)),
        ]
        for group, static in ((40, None), (8, None), (0, torch.ones(()))):
            calls.append((OPS.act_and_mul_quantize.default, (x, "silu", E4M3, group, static)))
        for operator, args in calls:
            torch.library.opcheck(
                operator, args, test_utils=CHECKS[: 4 if x.is_contiguous() else 3]
            )


def test_a_gpu_without_fp8_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """If kernels cannot convert to FP8, torch quantizes the written result."""
    x = torch.randn(4, 80)
    calls = [
        (x, "silu", dtype, group, static)
        for dtype in (E4M3, E5M2)
        for group, static in ((8, None), (0, torch.ones(1)))
    ]
    fused = [kernel.act_and_mul_quantize_triton(*call) for call in calls]
    monkeypatch.setattr(formats, "capability", lambda tensor: (8, 6))
    monkeypatch.setattr(kernel, "store_quantized", None)
    for call, expected in zip(calls, fused, strict=True):
        for one, other in zip(kernel.act_and_mul_quantize_triton(*call), expected, strict=True):
            assert torch.equal(bits(one), bits(other))
