"""A cold file is read by the OS pages that a shard touches, and each way gives the same bits."""

from __future__ import annotations

import errno
import itertools
import json
import mmap
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_module.errors import WeightReadError
from vllm_module.weights import cut_rows, file_bytes, open_checkpoint, os_pages, read_all
from vllm_module.weights.cut_rows import ByteRun, copy_segments
from vllm_module.weights.handle import FileHandle, read_together
from vllm_module.weights.regular_file import ReadLease, open_again

PAGE = mmap.PAGESIZE
HIDDEN = 3 * PAGE // 2  # of a row in bytes: some OS pages of a column slice are touched, others not
WIDE = 8 * PAGE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the page cache is Linux's")


def evict(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_pages(path: Path) -> int:
    with path.open("rb") as file:
        return os_pages._count_cached(file.fileno(), 0, path.stat().st_size)


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"rows": (512, HIDDEN // 2), "wide": (128, WIDE // 2), "whole": (1024, 2048)}
    return {
        name: torch.randint(0, 0x4000, shape, dtype=torch.int16, generator=generator)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def path(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cold") / "model.safetensors"
    save_file(tensors, path)
    return path


# A shard of each tensor by rank 3 of 8: dimension, and OS pages it touches over those it keeps.
SHARDS = {"rows": 1, "wide": 1, "whole": 0}


def shard(handle: FileHandle | torch.Tensor, dim: int):
    size = handle.shape[dim] // 8
    return handle.narrow(dim, 3 * size, size)


def touched_pages(handle: FileHandle) -> int:
    pages = set()
    for run in handle.runs():
        for index in range(run.count):
            begin = run.offset + index * run.stride
            pages.update(range(begin // PAGE, (begin + run.length - 1) // PAGE + 1))
    return len(pages)


@pytest.mark.parametrize("leased", [True, False], ids=["lease", "no lease"])
@pytest.mark.parametrize("name", SHARDS)
def test_a_cold_shard_reads_little_more_than_the_pages_it_touches(
    path: Path, tensors, name, leased, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's count of bytes from the disk stays below 1.3 times the OS pages touched.

    The count is of the whole process: code whose pages were evicted is read from the disk as
    well. So the smallest of three counts is compared.
    """
    if not leased:
        monkeypatch.setattr(ReadLease, "_take", lambda _: False)
    with open_checkpoint(path) as checkpoint:
        part = shard(checkpoint[name], SHARDS[name])
        touched = touched_pages(part) * PAGE
        counts = []
        for _ in range(3):
            evict(path)
            if cached_pages(path) > path.stat().st_size // PAGE // 10:
                pytest.skip("the page cache keeps the file: eviction did not take")
            before = bytes_from_disk()
            read = part.read()
            counts.append(bytes_from_disk() - before)
            assert torch.equal(read, shard(tensors[name], SHARDS[name]))
    from_disk = min(counts)
    if from_disk == 0:
        pytest.skip("this file system counts no bytes from a disk")
    assert touched * 0.9 < from_disk < touched * 1.3 + 32 * PAGE


def without_preadv_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "RWF_NOWAIT")


def without_nowait_of_the_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def refused(descriptor: int, buffers: list, offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refused)


def without_cachestat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os_pages, "_HAS_CACHESTAT", False)


def with_cachestat_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os_pages, "_CACHESTAT", 100_000)  # no system call has this number


def without_fadvise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise")


def with_fadvise_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "posix_fadvise", refused)


def without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))


def without_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os_pages, "POPULATE_READ", 100_000)


def with_everything(_: pytest.MonkeyPatch) -> None:
    pass


LACKS: list[list[Callable[[pytest.MonkeyPatch], None]]] = [
    [with_everything],
    [without_cachestat],
    [with_cachestat_refused],
    [without_cachestat, without_preadv_flags],
    [without_cachestat, without_nowait_of_the_file_system],
    [without_fadvise],
    [with_fadvise_refused],
    [without_descriptors],
    [without_populate],
    [without_cachestat, without_preadv_flags, without_fadvise, without_populate],
]


@pytest.mark.parametrize("lacks", LACKS, ids=lambda lacks: "+".join(f.__name__ for f in lacks))
@pytest.mark.parametrize("leased", [True, False], ids=["lease", "no lease"])
def test_each_way_gives_the_same_bits(path, tensors, leased, lacks, monkeypatch) -> None:
    """Cold, with holes in the page cache, and warm; with each system call missing."""
    evict(path)
    if not leased:
        monkeypatch.setattr(ReadLease, "_take", lambda _: False)
    for lack in lacks:
        lack(monkeypatch)
    with open_checkpoint(path) as checkpoint:
        for again in range(3):
            if again == 2:
                path.read_bytes()
            parts = {name: shard(checkpoint[name], dim) for name, dim in SHARDS.items()}
            read = {name: torch.full(part.shape, -1).short() for name, part in parts.items()}
            read_all((parts[name], read[name]) for name in parts)
            for name, dim in SHARDS.items():
                assert torch.equal(read[name], shard(tensors[name], dim)), name


def test_holes_are_read_segment_by_segment(path, tensors, monkeypatch) -> None:
    """No mapping is touched and no lease taken where OS pages of the span stay unread."""
    monkeypatch.setattr(ReadLease, "_take", None)
    monkeypatch.setattr(os_pages, "cached", lambda *_: False)
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(shard(checkpoint["wide"], 1).read(), shard(tensors["wide"], 1))


def test_a_batch_is_asked_for_before_any_of_it_is_read(path, tensors, monkeypatch) -> None:
    """The kernel is told of all OS pages of all runs, and of no others; then they are read."""
    calls: list[tuple[str, int, int]] = []
    preadv, posix_fadvise = os.preadv, os.posix_fadvise

    def asked(descriptor: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            calls.append(("ask", offset, length))
        posix_fadvise(descriptor, offset, length, advice)

    def read(descriptor: int, buffers: list, offset: int, flags: int = 0) -> int:
        calls.append(("read", offset, len(buffers[0])))
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os_pages, "cached", lambda *_: False)
    with open_checkpoint(path) as checkpoint:
        parts = {name: shard(checkpoint[name], 1) for name in ("rows", "wide")}
        into = {name: torch.empty(part.shape, dtype=torch.int16) for name, part in parts.items()}
        monkeypatch.setattr(os, "posix_fadvise", asked)
        monkeypatch.setattr(os, "preadv", read)
        read_together((parts[name], into[name]) for name in parts)
    assert all(torch.equal(into[name], shard(tensors[name], 1)) for name in parts)
    kinds = [kind for kind, *_ in calls]
    assert kinds == sorted(kinds)  # "ask" before "read"
    ranges = [each for part in parts.values() for run in part.runs() for each in run.pages()]
    assert len(ranges) > 128
    assert [(at, at + length) for kind, at, length in calls if kind == "ask"] == ranges


@pytest.mark.parametrize("leased", [True, False], ids=["lease", "no lease"])
@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_the_default_device_changes_nothing(path, tensors, cold, leased, monkeypatch) -> None:
    """What is read, or copied on the way to another dtype, is in host memory everywhere."""
    monkeypatch.setattr(os_pages, "cached", lambda *_: not cold)
    if not leased:
        monkeypatch.setattr(ReadLease, "_take", lambda _: False)
    expected = shard(tensors["rows"], 1)
    wider = torch.empty(expected.shape, dtype=torch.int32)
    with open_checkpoint(path) as checkpoint, torch.device("meta"):
        part = shard(checkpoint["rows"], 1)
        part.read_into(wider)
        read = part.read()
    assert torch.equal(read, expected)
    assert torch.equal(wider, expected.int())


def test_half_of_the_descriptors_are_left_for_other_files(path, monkeypatch) -> None:
    """A checkpoint of many files is not refused because each is opened twice."""
    before = len(os.listdir("/proc/self/fd"))
    with path.open("rb") as file:
        again = open_again(file.fileno())
        os.close(again)
        for limit in (2 * again, resource.RLIM_INFINITY):
            monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
            os.close(open_again(file.fileno()))
        monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * again - 1, 2 * again))
        with pytest.raises(OSError, match="Too many open files"):
            open_again(file.fileno())
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_io_error_of_a_cold_segment_names_the_file(path, monkeypatch) -> None:
    monkeypatch.setattr(os_pages, "cached", lambda *_: False)
    preadv, calls = os.preadv, []

    def broken(*args: object) -> int:
        calls.append(None)
        if len(calls) == 100:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*args)

    with open_checkpoint(path) as checkpoint:
        part = shard(checkpoint["wide"], 1)
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(WeightReadError, match="Input/output error") as refusal:
            part.read()
    assert str(path) in str(refusal.value)
    assert len(calls) == 100


@pytest.mark.parametrize("size", [PAGE, 3 * PAGE + 1])
def test_a_file_cut_off_before_a_cold_read_is_refused(tmp_path, size, monkeypatch) -> None:
    """Also where it is cut off after the check, at the first OS page that is asked for."""
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(64, WIDE // 4)}, path)
    monkeypatch.setattr(os_pages, "cached", lambda *_: False)
    read_ahead = os_pages.read_ahead

    def cut_then_read(*args: int) -> None:
        os.truncate(path, size)
        read_ahead(*args)

    with open_checkpoint(path) as checkpoint:
        monkeypatch.setattr(os_pages, "read_ahead", cut_then_read)
        with pytest.raises(WeightReadError, match=r"was cut off|was changed"):
            checkpoint["w"].narrow(1, 9, 500).read()


def test_a_warm_shard_asks_for_nothing(path, monkeypatch) -> None:
    path.read_bytes()
    if cached_pages(path) <= path.stat().st_size // PAGE:
        pytest.skip("the page cache does not keep the file, or is not counted")
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(os_pages, "read_ahead", lambda *args: asked.append(args))
    with open_checkpoint(path) as checkpoint:
        for name, dim in SHARDS.items():
            shard(checkpoint[name], dim).read()
    assert asked == []


def test_a_whole_tensor_is_left_to_the_kernels_read_ahead(path, tensors, monkeypatch) -> None:
    """The kernel's read-ahead makes larger folios, which are copied faster later on."""
    monkeypatch.setattr(os_pages, "cached", lambda *_: False)
    monkeypatch.setattr(os_pages, "read_ahead", None)
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint["whole"].read(), tensors["whole"])
        monkeypatch.setattr(file_bytes, "_SEQUENTIAL", 1)
        assert torch.equal(shard(checkpoint["whole"], 0).read(), shard(tensors["whole"], 0))


def near_pages(least: int) -> st.SearchStrategy[int]:
    """Return bytes up to three OS pages, often those at an edge of one."""
    edges = st.builds(lambda page, more: page * PAGE + more, st.integers(1, 3), st.integers(-1, 1))
    return st.integers(least, 3 * PAGE) | edges


@settings(deadline=None)  # torch's first call takes long on a busy machine
@given(
    offset=near_pages(0),
    length=near_pages(1),
    gap=st.integers(1, 9 * PAGE),
    count=st.integers(1, 60),
)
@example(offset=PAGE - 10, length=10, gap=1, count=1)
@example(offset=PAGE, length=PAGE, gap=2 * PAGE, count=3)
def test_ranges_cover_the_pages_touched_and_few_more(offset, length, gap, count) -> None:
    """They are in order and apart, and have at most an eighth more OS pages than segments touch."""
    run = ByteRun(offset, length, length + gap, count, cut=True)
    touched: set[int] = set()
    for index in range(count):
        begin = offset + index * run.stride
        touched.update(range(begin // PAGE, (begin + length - 1) // PAGE + 1))
    read: list[int] = []
    for begin, end in run.pages():
        assert begin % PAGE == end % PAGE == 0
        read += range(begin // PAGE, end // PAGE)
    assert read == sorted(set(read))
    assert touched <= set(read)
    assert (read[0], read[-1]) == (min(touched), max(touched))
    assert len(read) <= len(touched) * (1 + cut_rows._SHARE_OF_GAPS)
    starts = [begin for begin, _ in run.pages()]
    assert not set(starts) & {end for _, end in run.pages()}


@settings(deadline=None)
@given(
    count=st.integers(1, 40), span=st.integers(1, 400), length=st.integers(1, 20), cut=st.booleans()
)
def test_windows_of_a_run_are_the_run(count, span, length, cut) -> None:
    run = ByteRun(7, length, length + 5, count, cut)
    segments = []
    for window, address in run.windows(span, 1000):
        assert (window.length, window.stride, window.cut) == (length, length + 5, cut)
        assert window.count == 1 or window.count * window.stride <= span
        segments += [
            (window.offset + i * window.stride, address + i * length) for i in range(window.count)
        ]
    assert segments == [(7 + i * run.stride, 1000 + i * length) for i in range(count)]


def test_segments_at_any_place_are_copied() -> None:
    """Each of five numbers may be odd alone, and is then the one that no larger unit divides."""
    places, sizes = range(9), (1, 2, 3, 4, 6, 8, 12, 16)
    for begin, target, length, gap in itertools.product(places, places, sizes, (0, *sizes)):
        run = ByteRun(0, length, length + gap, 3)
        file = torch.arange(begin + run.span, dtype=torch.uint8)
        written = torch.zeros(target + run.nbytes + 1, dtype=torch.uint8)
        copy_segments(file[begin:], run, written.data_ptr() + target)
        starts = [begin + index * run.stride for index in range(run.count)]
        expected = [byte for start in starts for byte in range(start, start + length)]
        assert written.tolist() == [*[0] * target, *expected, 0], (begin, target, run)


@pytest.mark.parametrize("leased", [True, False], ids=["lease", "no lease"])
@pytest.mark.parametrize("place", range(8))
def test_columns_of_a_tensor_at_any_place_of_the_file_are_read(
    tmp_path, place, leased, monkeypatch
) -> None:
    """The format asks for no alignment of tensors, so a matrix may begin at an odd byte."""
    if not leased:
        monkeypatch.setattr(ReadLease, "_take", lambda _: False)
    matrix = torch.arange(5 * 32, dtype=torch.int16).view(5, 32)
    data = matrix.numpy().tobytes()
    entry = {"dtype": "I16", "shape": [5, 32], "data_offsets": [0, len(data)]}
    header = json.dumps({"matrix": entry}).encode()
    header += b" " * ((place - len(header)) % 8)
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    with open_checkpoint(path) as checkpoint:
        handle = checkpoint["matrix"]
        assert handle.byte_range[0] % 8 == place
        assert torch.equal(handle.narrow(1, 8, 16).read(), matrix[:, 8:24])
