"""The quantizer against its definition, number by number."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from vllm_module.kernels import dtypes
from vllm_module.kernels.dtypes import greatest
from vllm_module.kernels.rows import quantize as kernel
from vllm_module.kernels.rows.quantize import dequantize, quantize, quantize_static

FP8, INT8 = torch.float8_e4m3fn, torch.int8


def defined(wide: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple:
    """Quantize block by block, as the docstring defines it."""
    rows, columns = wide.shape
    quantized = torch.empty_like(wide, dtype=dtype)
    scale = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    most = greatest(dtype)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            values = wide[here].float()
            scale[i, j] = (values.abs().max() / most).clamp(min=torch.finfo(torch.float32).tiny)
            values = values / scale[i, j]
            quantized[here] = (
                (values if dtype == FP8 else values.round()).clamp(-most, most).to(dtype)
            )
    return quantized, scale


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 50), st.integers(1, 50)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.sampled_from([FP8, INT8]),
    st.sampled_from([1, 7, 64, 1 << 19]),
    st.integers(0, 2**16),
)
def test_each_block_is_quantized_by_its_largest_number(
    shape, block, wide, dtype, chunk, seed
) -> None:
    """Any shape, blocks that do not divide it, any dtype, converted in chunks of any size."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).to(wide)
    values[0, 0] = -5  # the largest is negative
    quantized = torch.empty(shape, dtype=dtype)
    scale = torch.full((-(-shape[0] // block[0]), -(-shape[1] // block[1])), torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_CPU_CHUNK", chunk)
        quantize(values, quantized, scale, block)
        wide_again = dequantize(quantized, scale, block, torch.float32)
    expected, scales = defined(values, block, dtype)
    assert torch.equal(scale, scales)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    assert torch.equal(wide_again, expected.float() * spread[: shape[0], : shape[1]])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("block", [(4, 6), (1, 6), (2, 3)])
def test_what_is_not_finite_shows_in_the_scale(bad: float, block: tuple[int, int]) -> None:
    """A block with NaN or infinity has a scale that is not finite; other blocks do not change."""
    values = torch.randn(4, 6)
    clean = torch.empty(-(-4 // block[0]), -(-6 // block[1]))
    quantize(values, torch.empty(4, 6, dtype=FP8), clean, block)
    for row, column in ((0, 0), (3, 5), (2, 1)):
        damaged = values.clone()
        damaged[row, column] = bad
        scale = torch.empty_like(clean)
        quantize(damaged, torch.empty(4, 6, dtype=FP8), scale, block)
        finite = scale.isfinite()
        assert not finite[row // block[0], column // block[1]]
        assert (~finite).sum() == 1
        assert torch.equal(scale[finite], clean[finite])


@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    """A block of zeros has no 0 / 0 in it."""
    quantized, scale = torch.ones(3, 4).to(dtype), torch.empty(3, 1)
    quantize(torch.zeros(3, 4), quantized, scale, (1, 4))
    assert torch.equal(quantized.float(), torch.zeros(3, 4))
    assert torch.equal(
        dequantize(quantized, scale, (1, 4), torch.bfloat16).float(), torch.zeros(3, 4)
    )


def test_views_are_written_in_place() -> None:
    """Strided views of larger tensors are read and written, and the rest stays."""
    values = torch.randn(8, 10).t()[2:8, 1:7]
    whole, scales = torch.zeros(9, 9, dtype=torch.int8), torch.zeros(9, 1)
    quantize(values, whole[2:8, 1:7], scales[2:8], (1, 6))
    expected, scale = defined(values, (1, 6), INT8)
    assert torch.equal(whole[2:8, 1:7], expected)
    assert torch.equal(scales[2:8], scale)
    assert int(whole.count_nonzero()) == int(expected.count_nonzero())
    assert int(scales.count_nonzero()) == 6


def run(wide, dtype, block, how, scale=None):
    """Quantize by ``how`` into poisoned memory."""
    rows, columns = wide.shape
    quantized = torch.full(wide.shape, 0x7F, dtype=torch.uint8).view(dtype)
    if scale is None:
        scale = torch.full((-(-rows // block[0]), -(-columns // block[1])), torch.nan)
    how(wide, quantized, scale, *block)
    return quantized, scale


def assert_same(ours: tuple, theirs: tuple) -> None:
    """Compare bit by bit, except that NaN may have any bits of NaN, and be any integer."""
    (quantized, scale), (expected, scales) = ours, theirs
    assert torch.equal(scale.isnan(), scales.isnan())
    assert torch.equal(
        scale.nan_to_num(-1).view(torch.int32), scales.nan_to_num(-1).view(torch.int32)
    )
    if quantized.dtype.is_floating_point:
        assert torch.equal(quantized.float().isnan(), expected.float().isnan())
        there = ~expected.float().isnan()
        quantized, expected = quantized[there], expected[there]
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))


BLOCKS = [(1, 200), (1, 128), (128, 128), (130, 200), (40, 200), (50, 70)]


WIDE = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("wide", WIDE)
def test_the_kernel_gives_the_bits_of_the_reference(block, wide) -> None:
    """Whole and partial blocks, blocks of odd sizes, rows of zeros; also with given scales.

    Each block and each dtype that is quantized meets each dtype of eight bits.
    """
    dtype = [FP8, torch.float8_e5m2, INT8][(BLOCKS.index(block) + WIDE.index(wide)) % 3]
    values = torch.randn(130, 200).to(wide)
    values[3] = 0
    values[5] *= 1e-3
    values[129, 199] = -7
    theirs = run(values, dtype, block, kernel.quantize_reference)
    assert_same(run(values, dtype, block, kernel.quantize_triton), theirs)
    scale = theirs[1] * 0.7  # some are beyond the greatest
    theirs = run(values, dtype, block, kernel.quantize_static_reference, scale)
    assert_same(run(values, dtype, block, kernel.quantize_static_triton, scale), theirs)


@given(
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.tuples(st.integers(1, 15), st.integers(1, 15)),
    st.sampled_from([FP8, torch.float8_e5m2, INT8]),
    st.sampled_from([1, 64, 1 << 15]),
    st.sampled_from([4, 16, 1 << 12]),
    st.integers(-140, 30),
)
@settings(max_examples=25)
def test_tiles_of_any_size_give_the_same_bits(shape, block, dtype, whole, part, power) -> None:
    """Blocks that are read twice, in tiles of any size, and numbers down to the subnormal ones."""
    values = torch.randn(shape) * 2.0**power
    theirs = run(values, dtype, block, kernel.quantize_reference)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_WHOLE", whole)
        patch.setattr(kernel, "_PART", part)
        assert_same(run(values, dtype, block, kernel.quantize_triton), theirs)
        given = run(values, dtype, block, kernel.quantize_static_triton, theirs[1])
    assert_same(given, theirs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter divides as numpy does
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("block", [(4, 6), (1, 6), (2, 3)])
@pytest.mark.parametrize("whole", [1, 1 << 15])
def test_the_kernel_shows_what_is_not_finite(bad, block, whole, monkeypatch) -> None:
    """Scales and numbers are NaN or infinite where the reference's are."""
    monkeypatch.setattr(kernel, "_WHOLE", whole)
    values = torch.randn(4, 6)
    values[2, 4] = bad
    theirs = run(values, FP8, block, kernel.quantize_reference)
    assert not theirs[1].isfinite().all()
    assert_same(run(values, FP8, block, kernel.quantize_triton), theirs)
    scale = torch.ones_like(theirs[1])
    theirs = run(values, FP8, block, kernel.quantize_static_reference, scale)
    assert_same(run(values, FP8, block, kernel.quantize_static_triton, scale), theirs)


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2, INT8])
def test_every_number_between_two_is_rounded_to_even(dtype) -> None:
    """Ties, and the numbers beside them, for each pair of neighbours."""
    bits = torch.arange(256, dtype=torch.uint8).view(torch.uint8 if dtype == INT8 else dtype)
    numbers = torch.arange(-127.0, 128) if dtype == INT8 else bits.float()
    numbers = numbers[numbers.isfinite()].sort().values
    middle = (numbers[1:] + numbers[:-1]) / 2
    up, down = (torch.nextafter(middle, torch.tensor(to)) for to in (torch.inf, -torch.inf))
    values = torch.cat([numbers, middle, up, down])[None]
    one, block = torch.ones(1, 1), (1, values.shape[1])
    theirs = run(values, dtype, block, kernel.quantize_static_reference, one)
    assert_same(run(values, dtype, block, kernel.quantize_static_triton, one), theirs)
    back = theirs[0].float()[0]
    assert torch.equal(back[: len(numbers)], numbers)


def test_fp8_is_rounded_once_where_it_is_cut_to_float16_first(monkeypatch) -> None:
    """GPUs before Hopper truncate float32 to float16 on the way to FP8; the bits are the same."""
    kept = []

    def cut(builder: object, source: object, target: object, *rest: object) -> object:
        if target.scalar.is_fp8():
            numbers = source.data
            kept.append(numbers)
            half = numbers.astype(np.float16)
            beyond = np.abs(half.astype(np.float32)) > np.abs(numbers)
            half = np.where(beyond, np.nextafter(half, np.float16(0)), half)
            source = interpreter.TensorHandle(half.astype(np.float32), source.dtype.scalar)
        return casts(builder, source, target, *rest)

    casts = interpreter.InterpreterBuilder.create_fp_to_fp
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_to_fp", cut)
    for dtype in (FP8, torch.float8_e5m2):
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        numbers = numbers[numbers.isfinite()].sort().values
        middle = (numbers[1:] + numbers[:-1]) / 2
        sides = [torch.nextafter(middle, torch.tensor(to)) for to in (torch.inf, -torch.inf)]
        values = torch.cat([numbers, middle, *sides, torch.randn(9) * 2**-16])[None]
        one, block = torch.ones(1, 1), (1, values.shape[1])
        theirs = run(values, dtype, block, kernel.quantize_static_reference, one)
        assert_same(run(values, dtype, block, kernel.quantize_static_triton, one), theirs)
    assert kept


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_a_gpu_without_fp8_takes_the_reference(dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """If kernels cannot convert to FP8, none is launched; int8 works everywhere."""
    values, block = torch.randn(4, 6), (2, 3)
    expected = run(values, dtype, block, kernel.quantize_reference)
    monkeypatch.setattr(dtypes, "capability", lambda tensor: (8, 6))
    assert dtypes.can_convert(INT8, values)
    monkeypatch.setattr(kernel, "_launch", None)
    assert_same(run(values, dtype, block, kernel.quantize_triton), expected)
    given = run(values, dtype, block, kernel.quantize_static_triton, expected[1])
    assert_same(given, expected)


@pytest.mark.parametrize("how", ["quantize_triton", "quantize_static_triton"])
@pytest.mark.parametrize("block", [(1, 6), (2, 3), (6, 6)])
@pytest.mark.parametrize("whole", [1, 1 << 15])
def test_the_kernel_walks_views(how: str, block: tuple[int, int], whole, monkeypatch) -> None:
    """Tensors may be transposed views of larger ones, whose rest is NaN and stays."""
    monkeypatch.setattr(kernel, "_WHOLE", whole)
    around = torch.full((10, 9), torch.nan)
    values = around.t()[2:8, 1:7]
    values.copy_(torch.randn(6, 6))
    held, scales = torch.full((9, 14), 99, dtype=INT8), torch.full((9, 9), torch.nan)
    quantized = held[2:8, 1:13:2]
    scale = scales.t()[1 : 1 + -(-6 // block[0]), 2 : 2 + -(-6 // block[1])]
    expected, exact = run(values, INT8, block, kernel.quantize_reference)
    if how == "quantize_static_triton":
        scale.copy_(exact)
    getattr(kernel, how)(values, quantized, scale, *block)
    assert torch.equal(quantized, expected)
    assert torch.equal(scale, exact)
    assert int((held != 99).sum()) == int((expected != 99).sum())
    assert int((~scales.isnan()).sum()) == scale.numel()


@pytest.mark.parametrize("block", [(1, 16), (3, 16)])
@pytest.mark.parametrize("whole", [1, 1 << 15])
def test_rows_that_are_far_apart(block: tuple[int, int], whole: int, monkeypatch) -> None:
    """Rows are found if their offsets exceed 32 bits, read and written."""
    monkeypatch.setattr(kernel, "_WHOLE", whole)
    apart = 2**30 + 64
    memory = [mmap.mmap(-1, size * (2 * apart + 64)) for size in (2, 1)]
    wide = torch.frombuffer(memory[0], dtype=torch.float16).as_strided((3, 16), (apart, 1))
    quantized = torch.frombuffer(memory[1], dtype=INT8).as_strided((3, 16), (apart, 1))
    wide.copy_(torch.randn(3, 16))
    scale = torch.empty(-(-3 // block[0]), 1)
    kernel.quantize_triton(wide, quantized, scale, *block)
    expected = run(wide.clone(), INT8, block, kernel.quantize_reference)
    assert_same((quantized, scale), expected)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("static", [False, True])
def test_nothing_to_quantize(shape: tuple[int, int], static: bool) -> None:
    """No rows or no columns: nothing is written, by either implementation."""
    name = "quantize_static" if static else "quantize"
    for how in ("reference", "triton"):
        quantized, scale = run(torch.empty(shape), FP8, (2, 3), getattr(kernel, f"{name}_{how}"))
        assert quantized.numel() == scale.numel() == 0


@pytest.mark.parametrize("how", [quantize, quantize_static])
def test_what_does_not_fit_is_refused(how) -> None:
    """Each tensor is named, with what was expected and what came."""
    wide, quantized, scale = torch.randn(4, 6), torch.empty(4, 6, dtype=FP8), torch.ones(2, 2)
    refused = [
        (r"wide must have the shape \[any, any\], got \[4\]", {"wide": wide[:, 0]}),
        (r"wide must be .*, got torch.int32", {"wide": wide.int()}),
        (r"quantized must have the shape \[4, 6\], got \[4, 5\]", {"quantized": quantized[:, 1:]}),
        (r"quantized must be .*, got torch.uint8", {"quantized": quantized.view(torch.uint8)}),
        (r"quantized is on meta, and must be on cpu", {"quantized": quantized.to("meta")}),
        (r"scale must have the shape \[2, 2\], got \[2, 1\]", {"scale": scale[:, 1:]}),
        (r"scale must be torch.float32, got torch.float16", {"scale": scale.half()}),
        (
            r"quantized is written, and .* \[4, 6\] .* strides \[1, 0\] share memory",
            {"quantized": quantized[:, :1].clone().expand(4, 6)},
        ),
        (r"a block must have rows and columns, got \(0, 3\)", {"block": (0, 3)}),
    ]
    for message, bad in refused:
        given = {"wide": wide, "quantized": quantized, "scale": scale, "block": (2, 3), **bad}
        with pytest.raises(ValueError, match=message):
            how(**given)


@pytest.mark.parametrize("how", [quantize, quantize_static])
def test_the_operators_are_some(how) -> None:
    """They have schemas and fakes, and work with meta tensors and torch.compile."""
    wide, quantized, scale = torch.randn(4, 6), torch.zeros(4, 6, dtype=INT8), torch.ones(2, 2)
    how(wide.to("meta"), quantized.to("meta"), scale.to("meta"), (2, 3))
    operator = getattr(torch.ops.vllm_module, how.__name__).default
    torch.library.opcheck(operator, (wide, quantized, scale, 2, 3))
    torch.compile(how, fullgraph=True, backend="aot_eager")(wide, quantized, scale, (2, 3))
    expected = torch.zeros_like(quantized)
    how(wide, expected, scale.clone(), (2, 3))
    assert torch.equal(quantized, expected)
    assert quantized.any()
