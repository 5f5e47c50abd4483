"""A file that changes, is deleted or fails during a read gives its old bytes or an error."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vllm_module import vLLMModule
from vllm_module.errors import ModelNotReadyError, WeightReadError
from vllm_module.weights import file_bytes, open_checkpoint, os_pages, pieces, read_all, reading
from vllm_module.weights.file_bytes import FileBytes
from vllm_module.weights.regular_file import ReadLease

ROWS, COLUMNS = 600, 64


def shrink(path: Path) -> None:
    os.truncate(path, 400)


def cut_last_byte(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def rewrite(path: Path) -> None:
    """Write other values in place: the same size, and the nearest other time of change."""
    before = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(400)
        file.write(b"\7" * 4096)
    os.utime(path, ns=(before ^ 1, before ^ 1))


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    save_file({"w": torch.full((ROWS, COLUMNS), 7.0)}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


HARMFUL = [shrink, cut_last_byte, grow, rewrite]
HARMLESS = [delete, replace]


@pytest.fixture(params=["preadv", "mapped", "staged"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Read long segments; short ones out of a mapping; short ones without a lease."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4096)
    monkeypatch.setattr(reading, "_BATCH_BYTES", 4096)
    monkeypatch.setattr(file_bytes, "_WINDOW", 8192)
    monkeypatch.setattr(file_bytes, "_SCRATCH", 8192)
    if request.param == "staged":
        monkeypatch.setattr(ReadLease, "_take", lambda _: False)
    return request.param


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"w": values()}, path)
    return path


def values() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


@contextmanager
def midway(
    monkeypatch: pytest.MonkeyPatch, how: str, act: Callable[[], None], first: int = 4
) -> Iterator[None]:
    """Call ``act`` in another thread at the read that ``first`` counts."""
    calls, thread = [], threading.Thread(target=act)
    name = "_copy_mapped" if how == "mapped" else "_read"
    read, hold = getattr(FileBytes, name), ReadLease.hold

    def counted(self: FileBytes, *args: object) -> None:
        calls.append(None)
        if len(calls) == first:
            thread.start()
            if how != "mapped":
                thread.join(10)
        read(self, *args)

    @contextmanager
    def hold_then_wait(self: ReadLease) -> Iterator[bool]:
        with hold(self) as held:  # ``act`` has to wait for it
            yield held
        if thread.ident is not None:
            thread.join(10)

    with monkeypatch.context() as patch:
        patch.setattr(FileBytes, name, counted)
        patch.setattr(ReadLease, "hold", hold_then_wait)
        yield
        thread.join(10)
        assert not thread.is_alive()


def part_of(handle, how: str):
    return handle if how == "preadv" else handle.narrow(1, 8, 16)


@pytest.mark.parametrize("change", HARMFUL)
def test_a_file_written_to_while_it_is_read_is_refused(path, how, change, monkeypatch) -> None:
    """A mixture of old and new bytes is refused, in each way of reading, by several threads."""
    part = part_of(open_checkpoint(path)["w"], how)
    refused = pytest.raises(WeightReadError, match=r"was changed since|was cut off")
    with midway(monkeypatch, how, lambda: change(path)), refused as refusal:
        read_all([(part, torch.empty(part.shape))])
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("change", HARMFUL)
def test_a_file_written_to_within_one_read_is_refused(path, how, change, monkeypatch) -> None:
    """The file is checked after a read too, because a write during the read gives a mixture."""
    part = part_of(open_checkpoint(path)["w"], how)
    refused = pytest.raises(WeightReadError, match=r"was changed since|was cut off")
    with midway(monkeypatch, how, lambda: change(path), first=1), refused as refusal:
        part.read()
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("change", HARMLESS)
def test_a_file_deleted_or_replaced_is_read_as_it_was(path, how, change, monkeypatch) -> None:
    part = part_of(open_checkpoint(path)["w"], how)
    destination = torch.empty(part.shape)
    with midway(monkeypatch, how, lambda: change(path)):
        read_all([(part, destination)])
    assert torch.equal(destination, values() if how == "preadv" else values()[:, 8:24])


def test_a_file_closed_while_it_is_read_is_refused(path, how, monkeypatch) -> None:
    """The number of its descriptor may belong to another file by then."""
    checkpoint = open_checkpoint(path)
    part = part_of(checkpoint["w"], how)
    with midway(monkeypatch, how, checkpoint.close), pytest.raises(WeightReadError) as refusal:
        read_all([(part, torch.empty(part.shape))])
    assert str(path) in str(refusal.value)


CUT_WHILE_MAPPED = """
import os, random, sys, threading, time, torch
from safetensors.torch import save_file
from vllm_module.errors import WeightReadError
from vllm_module.weights import open_checkpoint, read_all
from vllm_module.weights.regular_file import ReadLease

path, take, rows = sys.argv[1], ReadLease._take, 8192
torch.set_num_threads(1)
random.seed(0)
for turn in range(24):
    # Printed before the read, so that the last line shows which way ended the process.
    print("lease" if turn % 2 else "no lease", end=": ", flush=True)
    ReadLease._take = take if turn % 2 else lambda _: False
    save_file({"w": torch.ones(rows, 1024)}, path)
    part = open_checkpoint(path)["w"].narrow(1, 0, 128)
    destination = torch.zeros(rows, 128)
    began = threading.Event()

    def cut():
        began.wait()
        time.sleep(random.random() * 0.004)
        os.truncate(path, 4096 * random.randrange(3))

    thread = threading.Thread(target=cut)
    thread.start()
    began.set()
    end = time.monotonic() + 60
    try:
        while time.monotonic() < end:
            read_all([(part, destination)])
            assert destination.min() == 1
    except WeightReadError as error:
        assert path in str(error)
        print("refused", flush=True)
    thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="short runs are mapped on Linux only")
def test_a_file_cut_off_at_any_moment_does_not_end_the_process(
    tmp_path: Path, run_with_torch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Touching an OS page of a mapping that is gone is a SIGBUS."""
    result = run_with_torch(CUT_WHILE_MAPPED, str(tmp_path / "m.safetensors"))
    expected = "no lease: refused\nlease: refused\n" * 12
    assert (result.returncode, result.stdout) == (0, expected), result.stderr


def test_a_lease_holds_writers_off_until_it_is_given_back(path: Path) -> None:
    """A thread that asks for the lease while a writer waits gets none: the writer would starve."""
    descriptor = os.open(path, os.O_RDONLY)
    lease = ReadLease(descriptor)
    with lease.hold() as held:
        if not held:
            pytest.skip("this file system has no leases")
        with lease.hold() as again:
            assert again
        writer = threading.Thread(target=os.truncate, args=(path, 3))
        writer.start()
        end = time.monotonic() + 30
        while fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK:  # no writer waits yet
            assert time.monotonic() < end
            time.sleep(0.001)
        assert (writer.is_alive(), path.stat().st_size > 3) == (True, True)
        with lease.hold() as late:
            assert not late
    writer.join(10)
    assert path.stat().st_size == 3
    with path.open("ab"), lease.hold() as beside_a_writer:
        assert not beside_a_writer
    os.close(descriptor)
    with lease.hold() as closed:
        assert not closed


def test_a_file_closed_under_its_lease_gives_back_that_lease_only(path: Path, tmp_path) -> None:
    """The lease of another file that took over the descriptor's number stays."""
    other = tmp_path / "other"
    other.write_bytes(b"other")
    descriptor = os.open(path, os.O_RDONLY)
    lease = ReadLease(descriptor)
    with lease.hold() as held:
        if not held:
            pytest.skip("this file system has no leases")
        os.close(descriptor)
        again = os.open(other, os.O_RDONLY)
        assert again == descriptor
        with ReadLease(again).hold(), lease.hold() as still:
            assert still
            with lease.hold():
                pass
            assert fcntl.fcntl(again, fcntl.F_GETLEASE) == fcntl.F_RDLCK
        fcntl.fcntl(again, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    assert fcntl.fcntl(again, fcntl.F_GETLEASE) == fcntl.F_RDLCK
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # an error if there still were a lease
    os.close(writer)
    os.close(again)
    file = FileBytes(other)
    file.close()
    with file._lease.hold() as closed:
        assert not closed


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_an_io_error_midway_names_the_file(path, how, code, monkeypatch) -> None:
    part = part_of(open_checkpoint(path)["w"], how)
    calls = []

    def fails_the_third_time(*_: object) -> bool:
        calls.append(None)
        return len(calls) > 2

    preadv, advise = os.preadv, os_pages.advise

    def broken_preadv(*args: object) -> int:
        if fails_the_third_time():
            raise OSError(code, os.strerror(code))
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", broken_preadv)
    monkeypatch.setattr(
        os_pages, "advise", lambda *a: code if fails_the_third_time() else advise(*a)
    )
    with pytest.raises(WeightReadError, match=os.strerror(code)) as refusal:
        read_all([(part, torch.empty(part.shape))])
    assert str(path) in str(refusal.value)


def test_a_file_whose_server_is_gone_is_named(path: Path, monkeypatch) -> None:
    handle = open_checkpoint(path)["w"]

    def gone(_: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", gone)
        with pytest.raises(WeightReadError, match="Stale file handle") as refusal:
            handle.read()
    assert str(path) in str(refusal.value)
    assert torch.equal(handle.read(), values())


def test_without_more_threads_the_calling_one_reads_all(path, how, monkeypatch) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    part = part_of(open_checkpoint(path)["w"], how)
    destination = torch.empty(part.shape)
    monkeypatch.setattr(threading.Thread, "start", no_more)
    read_all([(part, destination)])
    assert torch.equal(destination, values() if how == "preadv" else values()[:, 8:24])


class Model(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(COLUMNS, 8, bias=False)
        self.second = nn.Linear(8, 300, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("change", HARMFUL)
def test_a_model_whose_checkpoint_changed_midway_does_not_run(tmp_path, change, monkeypatch):
    """It refuses to run as a mixture until a load succeeds."""
    path = tmp_path / "model.safetensors"
    weights = {"first.weight": torch.ones(8, COLUMNS), "second.weight": torch.ones(300, 8)}
    save_file(weights, path)
    model, x = Model(), torch.ones(1, COLUMNS)
    model.load_weights(open_checkpoint(path))
    model(x)

    save_file({name: 2 * weight for name, weight in weights.items()}, path)
    checkpoint = open_checkpoint(path)
    read = FileBytes._read
    calls = []

    def change_before_the_second(self: FileBytes, *args: object) -> None:
        calls.append(None)
        if len(calls) == 2:
            change(path)
        read(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(FileBytes, "_read", change_before_the_second)
        with pytest.raises(WeightReadError) as refusal:
            model.load_weights(checkpoint)
    assert str(path) in str(refusal.value)
    with pytest.raises(ModelNotReadyError, match="left a mixture") as not_ready:
        model(x)
    assert str(path) in str(not_ready.value)
    with pytest.raises(WeightReadError, match="was changed"):
        model.load_weights(checkpoint)
    with pytest.raises(ModelNotReadyError, match="left a mixture"):
        model(x)
    save_file(weights, path)
    model.load_weights(open_checkpoint(path))
    assert model(x).unique().tolist() == [8 * COLUMNS]
