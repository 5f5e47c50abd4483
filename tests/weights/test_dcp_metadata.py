"""Metadata of torch.distributed.checkpoint that is damaged or hostile: refused at once, by name."""

from __future__ import annotations

import os
import pickle
import random
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
)

from vllm_module.errors import CheckpointFormatError
from vllm_module.weights import open_checkpoint
from vllm_module.weights.pickled.dcp_metadata import StoredChunk
from vllm_module.weights.pickled.dcp_metadata import _cover as covers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

# Pytest's importlib mode has no imports between test files.
FOLDERS = runpy.run_path(str(Path(__file__).with_name("dcp_folders.py")))
STATE, write = FOLDERS["STATE"], FOLDERS["write"]


# torch types an entry as that of a tensor or of bytes, of which only the first has chunks.
def drop_chunk(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["model.model.rows.weight"].chunks[0]  # type: ignore[union-attr]


def repeat_chunk(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata["model.model.mesh.weight"].chunks  # type: ignore[union-attr]
    chunks[1] = ChunkStorageMetadata(chunks[0].offsets, chunks[1].sizes)


def move(metadata: Metadata, **change: Any) -> None:
    for place in metadata.storage_data.values():
        vars(place).update(change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_chunk, "hold 8 elements and should cover each of 20 once"),
        (repeat_chunk, "should cover each of 48 once"),
        (lambda m: move(m, relative_path="../secret"), "should be in a file of the same folder"),
        (lambda m: move(m, relative_path="__9_0.distcp"), "__9_0.distcp, which is not there"),
        (lambda m: move(m, length=10**9), "should end at byte"),
        (lambda m: move(m, offset=-1), "is in no file"),
        (lambda m: move(m, transform_descriptors=["zstd"]), "compressed or encrypted"),
        (lambda m: m.state_dict_metadata.clear(), "found tensors in none"),
        (lambda m: m.planner_data.update({"network.model.whole": ("other", "w")}), "in one dict"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[Metadata], Any], message: str
) -> None:
    """Chunks that leave an element out, or share one, and files that are not there: by name."""
    metadata = write(tmp_path, above=("network",) if "one dict" in message else ("model",))
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFormatError, match=message) as refused:
        open_checkpoint(tmp_path)
    assert ".metadata" in str(refused.value)


KEY = "model.model.rows.weight"  # of two chunks, (3, 4) and (2, 4) at (3, 0)
NO_SIZE = (None, "x", -1, True, 1.0, 1 << 63)
FIELDS: dict[str, tuple[Any, ...]] = {
    "relative_path": (None, 3, b"x", "", ".", "..", "a/b", "/x"),
    "offset": (*NO_SIZE, 1 << 62),
    "length": (*NO_SIZE, 1 << 62),
    "properties": (None, {}, "float32", TensorProperties(torch.qint8)),
    "size": (None, (5,), (5, 4, 1), (5, None), (5, -4), (5, True), [5, 4], (5, 5), (5, 3), 20),
    "offsets": (None, (0,), (0, 0, 0), (0, None), (0, -1), (0, True), [0, 0], (0, 1), 0),
    "sizes": (None, (3,), (3, 4, 1), (3, None), (3, -4), (3, True), [3, 4], (2, 4), (4, 4), 12),
    "chunks": (None, "x", [], [None], [3]),
    "state_dict_metadata": (None, [], "x", {}),
    "storage_data": (None, [], "x", {}),
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in FIELDS for value in FIELDS[field]]
)
def test_a_field_with_a_wrong_value_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    """No value of the wrong type, sign or size, nor the nearest of the right one, gets further."""
    metadata = write(tmp_path, {"model.rows.weight": STATE["model.rows.weight"]})
    described: Any = metadata.state_dict_metadata[KEY]
    stored = next(iter(metadata.storage_data.values()))
    holders: tuple[Any, ...] = (metadata, described, described.chunks[0], stored)
    (holder,) = (each for each in holders if hasattr(each, field))
    object.__setattr__(holder, field, value)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFormatError, match=r"\.metadata: "):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("name", "taken"), [("w" * 1024, True), ("w" * 1025, False), (3, False)])
def test_names_are_strings_of_a_bounded_length(tmp_path: Path, name: Any, taken: bool) -> None:
    metadata = write(tmp_path, {"w": (torch.ones(2), ((),))})
    metadata.planner_data["model.w"] = ("model", name)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    if taken:
        with open_checkpoint(tmp_path) as checkpoint:
            assert list(checkpoint) == [name]
        return
    with pytest.raises(CheckpointFormatError, match="string of at most 1024 characters"):
        open_checkpoint(tmp_path)


def test_nothing_in_the_pickle_runs(tmp_path: Path) -> None:
    """A pickle that would run a command is refused, and the command is not run."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    write(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(
        CheckpointFormatError,
        match=r"asks for '(posix|nt)\.system', which is not",
    ):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_chunks_cover_each_element_once_or_are_refused() -> None:
    """Boxes of random sizes, some of which are moved or repeated, are counted one by one."""
    drawn, covered = random.Random(0), 0
    for _ in range(700):
        shape = tuple(drawn.randint(1, 4) for _ in range(drawn.randint(0, 3)))
        boxes = [((0,) * len(shape), shape)]
        for _ in range(drawn.randint(0, 4) if shape else 0):
            begins, sizes = boxes.pop(drawn.randrange(len(boxes)))
            dim = drawn.randrange(len(shape))
            cut = drawn.randint(0, sizes[dim])
            for begin, size in ((0, cut), (cut, sizes[dim] - cut)):
                moved, cut_to = [*begins], [*sizes]
                moved[dim] += begin
                cut_to[dim] = size
                boxes.append((tuple(moved), tuple(cut_to)))
        if drawn.random() < 0.5:
            _, sizes = boxes.pop()
            places = [drawn.randint(0, n - m) for n, m in zip(shape, sizes, strict=True)]
            boxes.append((tuple(places), sizes))
        held = torch.zeros(shape, dtype=torch.int64)
        for begins, sizes in boxes:
            held[tuple(slice(b, b + n) for b, n in zip(begins, sizes, strict=True))] += 1
        once = bool((held == 1).all())
        assert covers([StoredChunk(*box, "file", 0, 0) for box in boxes], shape) == once
        covered += once
    assert 300 < covered < 690


def test_many_columns_are_compared_in_linear_time() -> None:
    """Chunks that all begin in the first row are not compared with each other."""
    columns = [StoredChunk((0, at), (5, 1), "file", 0, 0) for at in range(20_000)]
    begin = time.thread_time()
    assert covers(columns, (5, 20_000))
    assert not covers([*columns[:-1], columns[7]], (5, 20_000))
    assert time.thread_time() - begin < 5


def share_chunks(metadata: Metadata) -> None:
    """Let many tensors have one list of chunks, as a small pickle may."""
    one = metadata.state_dict_metadata["model.model.rows.weight"]
    for number in range(100):
        metadata.state_dict_metadata[f"model.other{number}"] = one
        metadata.planner_data[f"model.other{number}"] = "model", f"other{number}"


def nest_path(metadata: Metadata) -> None:
    path: tuple[Any, ...] = ("model", "w")
    for _ in range(60):
        path = (path, path)
    metadata.planner_data["model.model.whole"] = (path, "w")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (share_chunks, r"its tensors have \d+ chunks, and \d+ are stored"),
        (nest_path, "keys that lead to 'model.model.whole' are no names"),
        (
            lambda m: move(m, relative_path="x" * 300),
            "xx..., which is not there",
        ),
        (lambda m: move(m, relative_path="a\0b"), "which is not there"),
    ],
)
def test_metadata_that_would_take_long_is_refused(
    tmp_path: Path, change: Callable[[Metadata], Any], message: str
) -> None:
    """It ends at once, by name."""
    metadata = write(tmp_path)
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFormatError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02}r" + (60_000_000).to_bytes(4, "little") + b".",  # a place far away
        b"\x80\x02}q\x00"
        + b"".join(b"\x85q%ch%ch%c\x86" % (i, i, i) for i in range(1, 60))
        + b"N0.",
        b"\x80\x02}(K\x01K\x02\x86K\x03u.",  # a tuple as a key
        b"\x80\x04\x8f(K\x01\x90.",  # a set
        b"\x80\x02ctorch\nSize\nX\x05\x00\x00\x00aaaaa\x85R.",
    ],
    ids=["memo", "doubled", "tuple", "set", "size"],
)
def test_a_pickle_that_would_exhaust_memory_or_time_is_refused(tmp_path: Path, data: bytes) -> None:
    """It ends at once, by name."""
    write(tmp_path)
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointFormatError, match=r"\.metadata: "):
        open_checkpoint(tmp_path)
