"""The digest of a tensor, against its definition in Python's integers, whatever the boxes."""

from __future__ import annotations

import re
from importlib.util import find_spec
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.kernels.digest import boxes, digest, digest_matrix, keys, on_cpu
from vllm_module.kernels.digest.boxes import matrices
from vllm_module.kernels.digest.digest import Digest, digest_box, digest_elements

MODULUS = 2**64
PI = 0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.bfloat16, torch.float16, torch.int16,
    torch.float32, torch.int32, torch.float64, torch.int64, torch.uint64, torch.complex64,
    torch.complex128,
]  # fmt: skip


def odd(seed: int, place: int) -> int:
    x = (seed + (place + 1) * 0x9E3779B97F4A7C15) % MODULUS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
    return (x ^ (x >> 31)) | 1


def defined(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute both sums of a contiguous tensor byte by byte."""
    columns = tensor.shape[-1] if tensor.dim() else 1
    row_bytes = columns * tensor.dtype.itemsize
    size = tensor.dtype.itemsize // (2 if tensor.is_complex() else 1)
    data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    chunks, sums = -(-row_bytes // 4096), [0, 0]
    for at, byte in enumerate(data):
        row, offset = divmod(at, row_bytes)
        added = byte + (offset % size == 0)  # each element is one more than its bits
        for which in range(2):
            key = odd(PI[which], offset // 4 % 1024)
            key *= odd(PI[2 + which], row * chunks + offset // 4096)
            sums[which] += (added << 8 * (offset % 4)) * key
    return sums[0] % MODULUS, sums[1] % MODULUS


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random bits, with one element of ones and one of zeros if there are as many."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 256
    data = torch.randint(0, most, (count, dtype.itemsize), dtype=torch.uint8, generator=generator)
    data[:1], data[1:2] = most - 1, 0
    return data.flatten().view(dtype).view(shape)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with other strides; torch does not copy every dtype."""
    held = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return held.transpose(0, -1).contiguous().transpose(0, -1).view(tensor.dtype)


def on_the_kernel(tensor: torch.Tensor, starts: tuple[int, ...], shape: tuple[int, ...]) -> Digest:
    """Return the kernel's digest, which is that of its twin in plain torch."""
    every = [*matrices(tensor, starts, shape)]
    found = torch.stack([digest_matrix.digest_matrix_triton(*one) for one in every])
    assert found.equal(torch.stack([digest_matrix.digest_matrix_reference(*one) for one in every]))
    first, second = found.sum(0).tolist()
    return Digest(tensor.dtype, shape, (first % MODULUS, second % MODULUS))


def test_the_operator_has_the_sums_of_the_definition() -> None:
    """``torch.ops.vllm_module.digest_matrix`` passes torch's checks of an operator."""
    operator = torch.ops.vllm_module.digest_matrix.default
    tensor = drawn((3, 50), torch.int32, 5)
    (matrix,) = matrices(tensor, (0, 0), (3, 50))
    assert tuple(int(each) % MODULUS for each in operator(*matrix)) == defined(tensor)
    torch.library.opcheck(operator, tuple(matrix), test_utils=["test_schema", "test_faketensor"])


def test_numbers_are_those_of_splitmix64() -> None:
    """The sequence of 1234567 is that of Vigna's splitmix64.c, but for the lowest bit."""
    expected = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
        16408922859458223821,
    ]  # fmt: skip
    found = keys.odd_numbers(1234567, torch.arange(5)).tolist()
    assert [number % MODULUS for number in found] == [number | 1 for number in expected]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_as_defined(dtype: torch.dtype) -> None:
    """For every dtype, shape and stride, on the CPU and by the kernel, and element by element."""
    for shape in [(), (1,), (3, 5), (2, 1, 3, 2), (2, 4099 // dtype.itemsize)]:
        tensor = drawn(shape, dtype, 1)
        expected = Digest(dtype, shape, defined(tensor))
        assert digest_box(tensor) == expected
        strided = transposed(tensor) if shape else tensor
        assert digest_box(strided) == expected
        places = torch.arange(tensor.numel()).flip(0)
        values = tensor.flatten().view(torch.uint8).view(-1, dtype.itemsize)[places]
        assert digest_elements(places, values.flatten().view(dtype), shape) == expected
        assert on_the_kernel(strided, (0,) * len(shape), shape) == expected


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    wide=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
    batch=st.sampled_from([1, 3, 40, 2**15]),
    task=st.sampled_from([4, 40, 2**21]),
    chunk=st.sampled_from([2, 16, 1024]),
    threads=st.sampled_from([1, 3]),
    data=st.data(),
)
def test_boxes_add_up_to_the_tensor(shape, wide, dtype, batch, task, chunk, threads, data) -> None:
    """For any cut into boxes, any batches, tasks and threads; the definition has small chunks."""
    shape = (*shape[:-1], shape[-1] + wide)
    tensor, before = drawn(shape, dtype, 2), torch.get_num_threads()
    cuts = [
        sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape
    ]
    order = data.draw(st.permutations(range(len(shape))))
    held = tensor.view(torch.uint8) if dtype.itemsize == 1 else tensor
    held = held.permute(order).contiguous().permute([order.index(i) for i in range(len(shape))])
    held = held.view(dtype)
    with pytest.MonkeyPatch.context() as patch:
        for module in (boxes, digest, on_cpu):
            patch.setattr(module, "CHUNK", chunk, raising=False)
            patch.setattr(module, "CHUNK_BYTES", 4 * chunk)
        whole = digest_elements(torch.arange(tensor.numel()), tensor.flatten(), shape)
        patch.setattr(on_cpu, "_BATCH", batch)
        patch.setattr(on_cpu, "_TASK", max(task, chunk))
        torch.set_num_threads(threads)
        try:
            parts = Digest(dtype, shape)
            for edges in product(*([*pairwise(each)] for each in cuts)):
                box = held[tuple(slice(*edge) for edge in edges)]
                parts += digest_box(box, [start for start, _ in edges], shape)
        finally:
            torch.set_num_threads(before)
    assert parts == whole


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 90),
    experts=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    start=st.integers(0, 3000) | st.integers(2**33, 2**33 + 3000),
    first=st.integers(0, 2**34),
    data=st.data(),
)
def test_kernel_and_cpu_agree_on_boxes(rows, columns, experts, dtype, start, first, data) -> None:
    """Boxes that start at any row and column of tensors with more than 2**32 rows or columns."""
    tensor = drawn((experts, rows, columns), dtype, 3)
    if data.draw(st.booleans()):
        tensor = transposed(tensor)
    starts, shape = (5, first, start), (9, first + rows + 1, start + columns + 2)
    assert on_the_kernel(tensor, starts, shape) == digest_box(tensor, starts, shape)


def swapped(tensor: torch.Tensor, dim: int, one: int, other: int) -> torch.Tensor:
    order = torch.arange(tensor.shape[dim])
    order[one], order[other] = other, one
    return tensor.index_select(dim, order)


def test_each_fault_changes_both_sums() -> None:
    """Moved, doubled, missing and changed elements, in zeros as well."""
    tensor = torch.randn(64, 96).bfloat16()
    tensor[0, 0], tensor[3, 1], tensor[3, 2] = 0.0, float("nan"), float("inf")
    bits, zeros = tensor.view(torch.int16), torch.zeros_like(tensor)
    right, shape = digest_box(tensor), tensor.shape
    negative, payload, flipped = tensor.clone(), tensor.clone(), tensor.clone()
    negative[0, 0] = -0.0
    payload.view(torch.int16)[3, 1] += 1
    flipped[5:7, 9:11] *= -1
    block = tensor.clone()
    block[:32, :32] = tensor[:32, :32].t()
    up_and_down = bits.clone()
    up_and_down[2:4, 5] += torch.tensor([1, -1], dtype=torch.int16)
    up_and_down[2:4, 6] -= torch.tensor([1, -1], dtype=torch.int16)
    faults = {
        "rows": swapped(tensor, 0, 3, 40),
        "columns": swapped(tensor, 1, 0, 1),
        "columns of different words": swapped(tensor, 1, 0, 2),
        "shifted rows": tensor.roll(1, 0),
        "shifted columns": tensor.roll(1, 1),
        "sign of zero": negative,
        "payload of NaN": payload,
        "signs": flipped,
        "transposed block": block,
        "a rectangle whose rows and columns add up": up_and_down.view(torch.bfloat16),
    }
    results = {name: digest_box(each) for name, each in faults.items()}
    first = digest_box(tensor[:32], (0, 0), shape)
    results["missing"] = first
    results["doubled"] = right + first
    results["one for another"] = first + first
    results["at another place"] = first + digest_box(tensor[32:], (31, 0), shape)
    for name, wrong in results.items():
        assert all(a != b for a, b in zip(wrong.sums, right.sums, strict=True)), name
    half = digest_box(zeros[:32], (0, 0), shape)
    assert len({digest_box(zeros).sums, half.sums, (half + half).sums, (0, 0)}) == 4
    assert right - first == digest_box(tensor[32:], (32, 0), shape)


def test_hex_has_the_dtype_and_the_shape_in_it() -> None:
    """The same bits have another digest as another dtype or shape, even where sums are equal."""
    tensor = torch.randn(4, 6).half()
    right = digest_box(tensor)
    other_dtype, other_shape = digest_box(tensor.view(torch.bfloat16)), digest_box(tensor[None])
    assert right.sums == other_dtype.sums == other_shape.sums
    assert len({right, other_dtype, other_shape}) == 3
    assert len({right.hex, other_dtype.hex, other_shape.hex}) == 3
    assert re.fullmatch("[0-9a-f]{32}", right.hex)
    assert digest_box(torch.empty(0, 4)) == Digest(torch.float32, (0, 4))
    assert digest_box(tensor[2:2], (2, 0), (4, 6)) == Digest(torch.float16, (4, 6))


def test_a_sparse_update() -> None:
    """Adding new elements and taking the old ones away gives the digest of the updated tensor."""
    tensor = torch.randn(30, 50, requires_grad=True)
    right = digest_box(tensor)
    places = torch.randperm(1500)[:40]
    new = tensor.detach().clone()
    new.view(-1)[places] = torch.randn(40)
    old = digest_elements(places, tensor.flatten()[places], (30, 50))
    assert right + digest_elements(places, new.view(-1)[places], (30, 50)) - old == digest_box(new)
    assert digest_elements(places[:0], new.view(-1)[:0], (30, 50)).sums == (0, 0)


def test_conjugated_and_negated_views_are_their_values() -> None:
    """A view whose bits are changed by a flag of torch's has the digest of its values."""
    tensor = torch.randn(3, 4, dtype=torch.complex64)
    assert digest_box(tensor.conj()) == digest_box(tensor.conj().resolve_conj())
    assert digest_box(tensor.conj().imag) == digest_box(-tensor.imag)


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba, of the extra digest")
@pytest.mark.parametrize("columns", [1, 999, 1440, 5000])
def test_the_compiled_loop_agrees(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What numba compiles for large boxes gives the sums of numpy, whatever the strides."""
    tensor = drawn((50, columns), torch.bfloat16, 4)
    views = tensor, transposed(tensor), tensor[::2], tensor[:, columns // 3 :], tensor[:1]
    views = *views, tensor[:, : columns // 2 * 2]  # whole words, but not from row to row
    expected = [digest_box(view) for view in views]
    monkeypatch.setattr(on_cpu, "_COMPILED", 0)
    monkeypatch.setattr(on_cpu, "_multiply_in", None)  # numpy's is not used
    for batch in (100, 2**18):
        monkeypatch.setattr(on_cpu, "_COMPILED_BATCH", batch)
        assert [digest_box(view) for view in views] == expected


def test_a_digest_kept_from_before() -> None:
    """The definition stays what it is: digests are written to files."""
    assert digest_box(torch.arange(6000).view(2, 3000)).hex == "acbb95a4e3fae3c5c488e35d34e496d8"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: digest_box(torch.ones(2, 3), (1, 0), (2, 3)), r"\[2, 3\] that starts at \[1, 0\]"),
        (lambda: digest_box(torch.ones(2), (-1,), (3,)), r"starts at \[-1\] .*one start for each"),
        (lambda: digest_box(torch.ones(2), (0, 0), (2, 1)), r"not within a tensor of \[2, 1\]"),
        (lambda: digest_box(torch.ones(2, device="meta")), "needs the values .*on meta"),
        (lambda: digest_box(torch.ones(2, 2).to_sparse()), "dense tensor, .*sparse_coo"),
        (
            lambda: digest_elements(torch.tensor([0, 6]), torch.ones(2), (2, 3)),
            r"from 0 to 5 for a tensor of \[2, 3\], got 6",
        ),
        (lambda: digest_elements(torch.tensor([-2, 6]), torch.ones(2), (2, 3)), "got -2"),
        (lambda: digest_elements(torch.tensor([0]), torch.ones(2), (2,)), "one for each value"),
        (lambda: digest_elements(torch.tensor([0.0]), torch.ones(1), (2,)), "must be int64"),
        (
            lambda: digest_box(torch.ones(2)) + digest_box(torch.ones(2).half()),
            r"torch.float32 \[2\] and of another one of torch.float16 \[2\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message: str) -> None:
    """A wrong box, index, device or dtype is a ValueError with the numbers."""
    with pytest.raises(ValueError, match=message):
        call()
