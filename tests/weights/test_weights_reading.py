"""read_all fills every destination in bounded memory, and leaves no thread behind."""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_module.errors import MisshapenWeightError, WeightReadError
from vllm_module.weights import (
    Checkpoint,
    file_bytes,
    open_checkpoint,
    pieces,
    read_all,
    reading,
)
from vllm_module.weights.cut_rows import ByteRun
from vllm_module.weights.file_bytes import FileBytes
from vllm_module.weights.handle import FileHandle

STAND_IN = runpy.run_path(str(Path(__file__).with_name("delayed_device.py")))


@pytest.fixture(params=[1, 2, 8, "onto a device"], ids="cpus={}".format, autouse=True)
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make pieces and batches small and vary the number of CPUs; all threads end."""
    before = {*threading.enumerate()}  # one of another test may end meanwhile
    if request.param == "onto a device":
        with STAND_IN["loading_onto_a_device"](piece=1024, batch=512):
            yield
    else:
        monkeypatch.setattr("os.cpu_count", lambda: request.param)
        monkeypatch.setattr(reading, "_BATCH_BYTES", 512)
        monkeypatch.setattr(pieces, "PIECE_BYTES", 1024)
        yield
    assert {*threading.enumerate()} <= before


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    shapes = [(), (0, 3), (5,), (3000,), (40, 50), (1, 1, 900), (1, 3, 1000), (4, 20, 30)]
    return {f"w{index}": torch.randn(shape) for index, shape in enumerate(shapes)}


@pytest.fixture
def checkpoint(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, tmp_path / "model.safetensors")
    return open_checkpoint(tmp_path)


def test_every_destination_is_filled_and_every_byte_read_once(checkpoint, tensors) -> None:
    destinations = {name: torch.full_like(t, torch.nan) for name, t in tensors.items()}
    read_all((checkpoint[name], destinations[name]) for name in checkpoint)
    for name, tensor in tensors.items():
        assert torch.equal(destinations[name], tensor)
    assert checkpoint.bytes_read == checkpoint.nbytes


@pytest.mark.parametrize("most", [1, 7, 4096])
def test_tensors_that_follow_each_other_arrive_whole_if_the_kernel_reads_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(reading, "_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(file_bytes, "_MOST_VIEWS", 5)
    tensors = {f"w{at:02}": torch.randn(at % 7 * 3, 5) for at in range(24)}
    save_file(tensors, tmp_path / "model.safetensors")
    preadv, calls = os.preadv, []

    def less(descriptor: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:  # asks what is cached
            return preadv(descriptor, views, offset, flags)
        joined = bytearray(min(most, sum(map(len, views))))
        count = preadv(descriptor, [joined], offset)
        calls.append(len(views))
        left = memoryview(joined)[:count]
        for view in views:
            part = left[: len(view)]
            view[: len(part)], left = part, left[len(part) :]
        return count

    with open_checkpoint(tmp_path) as checkpoint:
        monkeypatch.setattr(os, "preadv", less)
        named = [*checkpoint]
        order = named[::2] + named[1::2]
        destinations = {name: torch.full_like(tensors[name], torch.nan) for name in order}
        read_all((checkpoint[name], destinations[name]) for name in order)
    assert all(torch.equal(destinations[name], tensors[name]) for name in order)
    assert max(calls) <= 5


def test_shards_casts_and_tensors_in_memory_mix(checkpoint, tensors) -> None:
    parts = torch.zeros(40, 64), torch.zeros(4, 10, 30, dtype=torch.float64), torch.zeros(3000)
    read_all(
        [
            (checkpoint["w4"].narrow(1, 10, 30), parts[0][:, 20:50]),
            (checkpoint["w7"].narrow(1, 5, 10), parts[1]),
            (tensors["w3"], parts[2]),
        ]
    )
    assert torch.equal(parts[0][:, 20:50], tensors["w4"][:, 10:40])
    assert torch.equal(parts[1], tensors["w7"][:, 5:15].double())
    assert torch.equal(parts[2], tensors["w3"])
    assert checkpoint.bytes_read == 4 * (40 * 30 + 4 * 10 * 30)


def test_jobs_are_taken_only_as_they_can_be_read(tensors, checkpoint, monkeypatch) -> None:
    """A generator that allocates destinations runs at most a queue ahead of the reading."""
    done = []
    read_runs = FileBytes.read_runs

    def counted(self: FileBytes, runs: list[tuple[ByteRun, int]]) -> None:
        read_runs(self, runs)
        done.extend(runs)

    ahead = []

    def jobs() -> Iterator[tuple[FileHandle, torch.Tensor]]:
        for made in range(200):
            ahead.append(made - len(done))
            yield checkpoint["w5"], torch.zeros(1, 1, 900)

    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(FileBytes, "read_runs", counted)
    read_all(jobs())
    assert len(done) == 200
    assert max(ahead) <= 12


def test_the_first_error_is_raised_as_it_is(checkpoint, monkeypatch) -> None:
    error = WeightReadError("broken")
    calls = []

    def fail(self: FileBytes, runs: list[tuple[ByteRun, int]]) -> None:
        calls.append(None)
        raise error

    monkeypatch.setattr(FileBytes, "read_runs", fail)
    with pytest.raises(WeightReadError) as raised:
        read_all((checkpoint["w3"], torch.zeros(3000)) for _ in range(100))
    assert raised.value is error
    assert len(calls) <= 8


def test_a_failure_keeps_no_destination_alive(checkpoint) -> None:
    """The error is not part of a reference cycle: on a GPU a retry needs the memory."""
    os.utime(checkpoint.files[0], ns=(0, 0))
    gc.disable()
    try:
        for _ in range(10):  # two threads may fail at once
            destination = torch.zeros(3000)
            alive = weakref.ref(destination)
            with contextlib.suppress(WeightReadError):
                read_all([(checkpoint["w3"], destination)])
            del destination
            assert alive() is None
    finally:
        gc.enable()


def test_an_error_of_the_jobs_themselves_ends_the_reading(checkpoint) -> None:
    def jobs() -> Iterator[tuple[FileHandle, torch.Tensor]]:
        yield checkpoint["w3"], torch.zeros(3000)
        raise KeyError("routing")

    with pytest.raises(KeyError, match="routing"):
        read_all(jobs())


def test_a_destination_of_another_shape_is_refused(checkpoint) -> None:
    with pytest.raises(MisshapenWeightError, match=r"\[40, 50\], its destination \[50, 40\]"):
        read_all([(checkpoint["w4"], torch.zeros(50, 40))])


def test_little_to_read_starts_no_thread(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(reading, "Thread", None)
    destination = torch.zeros(5)
    read_all([(checkpoint["w2"], destination), (torch.ones(9999), torch.zeros(9999))])
    assert torch.equal(destination, checkpoint["w2"].read())


def test_destinations_made_in_inference_mode_are_filled(checkpoint, tensors) -> None:
    """Inference mode is set for each thread; a thread without it cannot write such a tensor."""
    with torch.inference_mode():
        destination = torch.zeros(40, 50, dtype=torch.float64)
        read_all([(checkpoint["w4"], destination)])
    assert torch.equal(destination, tensors["w4"].double())


def test_parameters_are_filled_where_gradients_are_off(checkpoint, tensors) -> None:
    """So it is in each thread; torch refuses to write a parameter in a thread where they are on."""
    destinations = {
        name: torch.nn.Parameter(torch.zeros_like(tensor, dtype=torch.float64))
        for name, tensor in tensors.items()
    }
    with torch.no_grad():
        read_all((checkpoint[name], destinations[name]) for name in checkpoint)
    for name, tensor in tensors.items():
        assert torch.equal(destinations[name], tensor.double())


def test_what_was_read_is_let_go_while_readers_wait(checkpoint) -> None:
    """No thread holds the destinations of its last batch until the next one comes."""
    made = []

    def jobs() -> Iterator[tuple[FileHandle, torch.Tensor]]:
        for _ in range(200):
            destination = torch.zeros(5)
            made.append(weakref.ref(destination))
            yield checkpoint["w2"], destination

    with reading.Readers() as readers:
        readers.read(jobs())
        gc.collect()
        assert len(made) == 200
        assert [each() for each in made] == [None] * 200
