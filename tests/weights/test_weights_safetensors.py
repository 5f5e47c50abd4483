"""Handles read what the reference implementation reads and torch.narrow cuts."""

from __future__ import annotations

import errno
import os
import platform
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from vllm_module.errors import MisshapenWeightError, WeightReadError
from vllm_module.weights import file_bytes, open_checkpoint, read_all
from vllm_module.weights.handle import FileHandle
from vllm_module.weights.regular_file import ReadLease
from vllm_module.weights.safetensors import SafetensorsFile

TAKE_LEASE = ReadLease._take

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return (left.shape, left.dtype) == (right.shape, right.dtype) and torch.equal(*as_bytes)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 10).to(dtype)


def save(tmp_path: Path, tensor: torch.Tensor, name: str = "w") -> FileHandle:
    save_file({name: tensor}, tmp_path / "model.safetensors")
    return SafetensorsFile(tmp_path / "model.safetensors")[name]


def test_tensors_agree_with_the_reference_implementation(tmp_path: Path) -> None:
    shapes = [(), (0,), (3, 0, 5), (1,), (7,), (5, 3), (2, 3, 4), (1, 1, 1, 2)]
    tensors = {
        f"{dtype}.{index}": values(*shape, dtype=dtype)
        for dtype in DTYPES
        for index, shape in enumerate(shapes)
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    assert file.metadata == {"format": "pt"}
    assert len(file) == len(tensors)
    for name, expected in load_file(path).items():
        handle = file[name]
        assert (handle.shape, handle.dtype) == (expected.shape, expected.dtype)
        assert same(handle.read(), expected)
    assert file.bytes_read == file.nbytes == sum(t.nbytes for t in tensors.values())


@st.composite
def narrowed(draw: st.DrawFn) -> tuple[list[int], int, list[tuple[int, int, int]]]:
    """A shape, bytes that push the data off alignment, and a chain of narrows."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    sizes, steps = list(shape), []
    for _ in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(-len(shape), len(shape) - 1))
        start = draw(st.integers(0, sizes[dim]))
        length = draw(st.integers(0, sizes[dim] - start))
        sizes[dim] = length
        steps.append((dim, start, length))
    return shape, draw(st.integers(0, 7)), steps


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    case=narrowed(),
    dtype=st.sampled_from(DTYPES),
    way=st.sampled_from(["runs", "rows", "mapped", "staged"]),
)
def test_narrow_is_torch_narrow(write_file, monkeypatch, case, dtype, way) -> None:
    """Any chain of narrows reads the right bytes in each way of reading, and counts them."""
    shape, padding, steps = case
    expected = values(*shape, dtype=dtype)
    raw = bytes(expected.reshape(-1).view(torch.uint8).tolist())
    code = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL"}.get(
        dtype
    ) or {"b": "BF", "f": "F", "i": "I", "u": "U"}[str(dtype)[6]] + str(dtype.itemsize * 8)
    path = write_file(
        {
            "pad": {"dtype": "U8", "shape": [padding], "data_offsets": [0, padding]},
            "w": {
                "dtype": code,
                "shape": shape,
                "data_offsets": [padding, padding + expected.nbytes],
            },
        },
        b"x" * padding + raw,
    )
    monkeypatch.setattr(file_bytes, "_LONG_SEGMENT", 1 if way == "runs" else 64 << 10)
    monkeypatch.setattr(file_bytes, "_LONGEST_ROW", 1 if way == "rows" else 1 << 20)
    take = TAKE_LEASE if way == "mapped" else lambda _: False
    monkeypatch.setattr(ReadLease, "_take", take)
    monkeypatch.setattr(file_bytes, "_WINDOW", 64)
    monkeypatch.setattr(file_bytes, "_SCRATCH", 64)
    file = SafetensorsFile(path)
    handle = file["w"]
    for step in steps:
        handle, expected = handle.narrow(*step), expected.narrow(*step)
    assert same(handle.read(), expected)
    assert file.bytes_read == handle.nbytes == expected.nbytes
    pieces = list(handle.runs())
    assert sum(run.length * run.count for run in pieces) == handle.nbytes
    if pieces:
        last = pieces[-1]
        end = last.offset + (last.count - 1) * last.stride + last.length
        assert handle.byte_range == (pieces[0].offset, end)
    assert handle.contiguous == (len(pieces) <= 1 and all(run.count == 1 for run in pieces))


def test_a_matrix_cut_by_columns_is_one_strided_run(tmp_path: Path) -> None:
    handle = save(tmp_path, values(6, 8))
    begin, end = handle.byte_range
    columns = handle.narrow(1, 2, 3)
    (run,) = columns.runs()
    assert (run.offset, run.length, run.stride, run.count) == (begin + 4, 6, 16, 6)
    assert columns.byte_range == (begin + 4, end - 6)
    assert not columns.contiguous
    assert handle.narrow(0, 1, 4).contiguous
    assert handle.file == tmp_path / "model.safetensors"


def test_narrow_refuses_what_torch_refuses(tmp_path: Path) -> None:
    handle = save(tmp_path, values(4, 6))
    assert same(handle.narrow(0, -1, 1).read(), values(4, 6)[3:])
    for dim in (2, -3):
        with pytest.raises(IndexError, match="not one of its 2 dimensions"):
            handle.narrow(dim, 0, 1)
    for start, length in ((0, 7), (6, 1), (-7, 1), (0, -1)):
        with pytest.raises(ValueError, match="not inside dim 1 of size 6"):
            handle.narrow(1, start, length)
    with pytest.raises(IndexError):
        save(tmp_path, torch.tensor(1.0)).narrow(0, 0, 1)


def test_destinations_of_any_strides_are_filled(tmp_path: Path) -> None:
    expected = values(4, 6)
    handle = save(tmp_path, expected)
    rest = torch.zeros(4, 10, dtype=torch.bfloat16)
    handle.read_into(rest[:, 3:9])
    assert same(rest[:, 3:9], expected)
    assert rest[:, :3].count_nonzero() + rest[:, 9:].count_nonzero() == 0
    transposed = torch.zeros(6, 4, dtype=torch.bfloat16).t()
    handle.read_into(transposed)
    assert same(transposed, expected)
    odd = torch.zeros(25, dtype=torch.bfloat16)[1:].view(4, 6)  # aligned to 2 bytes only
    handle.narrow(1, 0, 6).read_into(odd)
    assert same(odd, expected)
    part = torch.zeros(9, dtype=torch.bfloat16)[1:].view(4, 2)
    handle.narrow(1, 4, 2).read_into(part)
    assert same(part, expected[:, 4:])


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_destination_of_another_dtype_gets_the_cast(tmp_path: Path, source, target) -> None:
    expected = values(5, 8, dtype=source)
    handle = save(tmp_path, expected)
    destination = torch.zeros(5, 3, dtype=target)
    handle.narrow(1, 2, 3).read_into(destination)
    assert same(destination, expected[:, 2:5].to(target))


def test_a_value_that_overflows_the_destination_is_refused(tmp_path: Path) -> None:
    handle = save(tmp_path, torch.tensor([1.0, 7e4], dtype=torch.bfloat16), "blocks.0.weight")
    with pytest.raises(WeightReadError, match=r"blocks\.0\.weight .* 1 finite values beyond"):
        handle.read_into(torch.zeros(2, dtype=torch.float16))


def test_another_shape_or_the_meta_device_is_refused(tmp_path: Path) -> None:
    """copy_ would broadcast the shape, and would do nothing on the meta device."""
    handle = save(tmp_path, values(1, 6))
    with pytest.raises(MisshapenWeightError, match=r"shape \[1, 6\], its destination \[4, 6\]"):
        handle.read_into(torch.zeros(4, 6, dtype=torch.bfloat16))
    with pytest.raises(MisshapenWeightError, match="meta"):
        handle.read_into(torch.zeros(1, 6, dtype=torch.bfloat16, device="meta"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_destination_on_a_gpu_is_filled(tmp_path: Path) -> None:
    expected = values(64, 96)
    handle = save(tmp_path, expected).narrow(1, 5, 40)
    for dtype in (torch.bfloat16, torch.float32):
        destination = torch.zeros(64, 48, dtype=dtype, device="cuda")[:, 4:44]
        handle.read_into(destination)
        assert same(destination.cpu(), expected[:, 5:45].to(dtype))


def test_a_handle_says_to_read_first(tmp_path: Path) -> None:
    handle = save(tmp_path, values(2, 2))
    with pytest.raises(AttributeError, match=r"no attribute 'transpose'; call \.read\(\) first"):
        handle.transpose(0, 1)
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        handle.nonsense  # noqa: B018
    assert repr(handle).startswith("w (torch.bfloat16, shape [2, 2], in ")


def test_a_closed_file_is_not_read(tmp_path: Path) -> None:
    save_file({"w": values(2, 2)}, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    handle = file["w"]
    file.close()
    file.close()
    with pytest.raises(WeightReadError, match="was closed"):
        handle.read()


def test_a_file_that_changes_after_opening_is_refused(tmp_path: Path) -> None:
    handle = save(tmp_path, values(4, 4))
    handle.read()
    os.utime(handle.file, ns=(0, 0))
    with pytest.raises(WeightReadError, match="was changed since it was opened"):
        handle.read()
    handle = save(tmp_path, values(4, 4))
    os.truncate(handle.file, handle.byte_range[1] - 1)
    with pytest.raises(WeightReadError, match="was changed since it was opened"):
        handle.read()


def test_a_file_replaced_by_another_is_read_as_it_was(tmp_path: Path) -> None:
    """A rename over the path leaves the opened file as it was; downloads rely on this."""
    handle = save(tmp_path, values(4, 4))
    save_file({"w": torch.zeros(9)}, tmp_path / "new")
    (tmp_path / "new").rename(handle.file)
    assert same(handle.read(), values(4, 4))


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = values(4, 6)
    handle = save(tmp_path, expected)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    assert same(handle.read(), expected)


def test_reading_that_fails_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = save(tmp_path, values(4, 6))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(WeightReadError, match=r"at byte \d+ failed.*Input/output error"):
        handle.read()
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(WeightReadError, match=r"ends at byte \d+, where 48 more"):
        handle.read()


def test_mapping_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = save(tmp_path, values(4, 6)).narrow(1, 0, 3)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", fail)
    with pytest.raises(WeightReadError, match="mapping it into memory failed"):
        handle.read()


def kernel_version() -> tuple[int, ...]:
    return tuple(int(part) for part in platform.release().split(".")[:2])


@pytest.mark.skipif(
    sys.platform != "linux" or kernel_version() < (5, 14),
    reason="needs MADV_POPULATE_READ",
)
def test_a_file_cut_off_under_the_mapping_is_an_error_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Touching OS pages beyond the end is a SIGBUS; mapping them by madvise is an error code."""
    handle = save(tmp_path, values(4096, 64)).narrow(1, 0, 8)
    handle.narrow(0, 0, 2).read()
    os.truncate(handle.file, 8192)
    monkeypatch.setattr(file_bytes.FileBytes, "check_unchanged", lambda _: None)
    with pytest.raises(WeightReadError, match="failed: Bad address"):
        handle.read()


@pytest.mark.parametrize("value", [2, 255])
def test_a_byte_that_is_no_bool_is_refused(write_file, value: int) -> None:
    """Two operations of torch can disagree on whether such a value is true."""
    header = {"w": {"dtype": "BOOL", "shape": [2, 2], "data_offsets": [0, 4]}}
    handle = SafetensorsFile(write_file(header, bytes([0, 1, 1, value])))["w"]
    destination = torch.zeros(2, 2, dtype=torch.bool)
    with pytest.raises(WeightReadError, match=r"w .* bytes other than 0 and 1"):
        handle.read_into(destination)
    assert destination.count_nonzero() == 0
    assert handle.narrow(0, 0, 1).read().tolist() == [[False, True]]


@pytest.mark.at_length
def test_more_than_two_pieces_of_the_real_size(tmp_path: Path) -> None:
    """40 MiB, cut by rows or columns, are read as they are: no test shrinks a constant here."""
    whole = torch.arange(10 << 20, dtype=torch.int32).view(5 << 9, 1 << 12)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        parts = {(0, 7): 2500, (1, 100): 3900, (1, 2): 17}
        pairs = []
        for (dim, start), count in parts.items():
            handle = checkpoint["w"].narrow(dim, start, count)
            pairs.append((handle, torch.full(handle.shape, -1, dtype=torch.int32)))
        read_all(pairs)
    for ((dim, start), count), (_, read) in zip(parts.items(), pairs, strict=True):
        assert torch.equal(read, whole.narrow(dim, start, count))
