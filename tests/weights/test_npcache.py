"""Folders of single npy files: made once from files of torch.save, read by slice, and refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_module.distributed import run_ranks
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights import npcache, open_checkpoint
from vllm_module.weights.file_bytes import FileBytes
from vllm_module.weights.npy_file import NpyFile, has_type, write_npy

BIN, NAMES = "pytorch_model.bin", "weight_names.json"
TENSORS = {
    "layer.0.w": torch.arange(48, dtype=torch.float32).reshape(6, 8),
    "transposed": torch.arange(12, dtype=torch.float16).reshape(3, 4).t(),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "wide": torch.arange(3).to(torch.uint16),
    "double": torch.tensor([0.1, -0.0, float("inf"), float("nan")], dtype=torch.float64),
    "complex": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of torch.save, without a cache."""
    torch.save(TENSORS, tmp_path / BIN)
    return tmp_path


@pytest.fixture
def cached(folder: Path) -> Path:
    """A checkpoint with a cache as other programs write it, and nothing else."""
    (folder / BIN).unlink()
    (folder / "np").mkdir()
    for name, tensor in TENSORS.items():
        with open(folder / "np" / name, "wb") as file:
            np.save(file, tensor.numpy())  # the transposed one in Fortran's order
    (folder / "np" / NAMES).write_text(json.dumps(list(TENSORS)))
    return folder


def assert_tensors(folder: Path, load_format: str) -> None:
    with open_checkpoint(folder, load_format) as checkpoint:
        assert checkpoint.load_format == "npcache"
        assert checkpoint.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            read = checkpoint[name].read()
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
            assert read.numpy().tobytes() == tensor.numpy().tobytes(), name


def test_the_cache_is_made_once_and_is_what_numpy_reads(folder: Path, monkeypatch: Any) -> None:
    """Numpy loads the same values from each file, and later openings write nothing."""
    assert_tensors(folder, "npcache")
    assert sorted(os.listdir(folder)) == ["np", BIN]
    listed = json.loads((folder / "np" / NAMES).read_text())
    assert sorted(listed) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        array = np.load(folder / "np" / name)
        assert (array.shape, array.tobytes()) == (tuple(tensor.shape), tensor.numpy().tobytes())
        assert torch.from_numpy(array).dtype == tensor.dtype
    monkeypatch.setattr(npcache, "_write", None)
    assert_tensors(folder, "npcache")


def test_a_cache_of_another_program_is_read(cached: Path) -> None:
    """As vLLM writes it with numpy.save, without the files that it was made from."""
    assert_tensors(cached, "npcache")
    assert_tensors(cached, "auto")


def test_files_of_other_formats_are_taken_first(folder: Path) -> None:
    """With both, auto takes the files that the cache was made from."""
    open_checkpoint(folder, "npcache").close()
    assert open_checkpoint(folder).load_format == "pt"


def test_only_the_bytes_of_a_slice_are_read(cached: Path, monkeypatch: Any) -> None:
    """A rank's rows or columns are read alone, also where columns are what follows in the file."""
    with open_checkpoint(cached, "npcache") as checkpoint:
        for name in ("layer.0.w", "transposed"):
            whole, before = TENSORS[name], checkpoint.bytes_read
            for dim in (0, 1):
                part, expected = (each.narrow(dim, 1, 2) for each in (checkpoint[name], whole))
                assert torch.equal(part.read(), expected)
            read = sum(whole.narrow(dim, 1, 2).numel() for dim in (0, 1)) * whole.itemsize
            assert checkpoint.bytes_read - before == read
        monkeypatch.delattr(FileBytes, "read_runs")
        assert checkpoint["layer.0.w"].narrow(0, 1, 2).shape == (2, 8)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_each_version_of_the_header_is_read(cached: Path, version: tuple[int, int]) -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    with open(cached / "np" / "scalar", "wb") as file:
        np.lib.format.write_array(file, array, version)
    with open_checkpoint(cached, "npcache") as checkpoint:
        assert checkpoint["scalar"].read().tolist() == array.tolist()


def _open(folder: Path, start: Any, results: Any) -> None:
    start.wait()
    with open_checkpoint(folder, "npcache") as checkpoint:
        results.put(float(checkpoint["layer.0.w"].read().sum()))


def test_processes_make_the_cache_once(folder: Path) -> None:
    """Processes that open it at the same time all read it, and one of them wrote it."""
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_open, args=(folder, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    expected = float(TENSORS["layer.0.w"].sum())
    assert [results.get(timeout=60) for _ in processes] == [expected] * 4
    for process in processes:
        process.join()
    assert sorted(os.listdir(folder)) == ["np", BIN]


def test_one_writes_and_the_others_wait(folder: Path, monkeypatch: Any) -> None:
    """Simulated ranks write the files once, though all ask for them."""
    written: list[Path] = []
    write = npcache._write
    monkeypatch.setattr(npcache, "_write", lambda *args: (written.append(args[0]), write(*args)))
    run_ranks(3, lambda _: open_checkpoint(folder, "npcache").close())
    assert len(written) == 1


def test_without_locks_the_first_to_rename_wins(folder: Path, monkeypatch: Any) -> None:
    """On a file system without locks a second writer uses the first one's files."""
    write = npcache._write

    def overtaken(made: Path, checkpoint: Any) -> None:
        write(made, checkpoint)
        if not (folder / "np").exists():
            shutil.copytree(made, folder / "np")

    def unlocked(*_: object) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(npcache, "_write", overtaken)
    monkeypatch.setattr(npcache.fcntl, "flock", unlocked)
    assert_tensors(folder, "npcache")
    assert sorted(os.listdir(folder)) == ["np", BIN]


def test_a_failed_making_leaves_nothing(folder: Path, monkeypatch: Any) -> None:
    """A full disk is a refusal with the reason, and what was written is removed."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(npcache, "write_npy", full)
    with pytest.raises(CheckpointFormatError, match=r"np cannot be written: No space left .* pt\."):
        open_checkpoint(folder, "npcache")
    assert os.listdir(folder) == [BIN]


def test_a_folder_that_cannot_be_written_is_refused(folder: Path, monkeypatch: Any) -> None:
    """The refusal names the format that needs no cache."""

    def read_only(**_: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(npcache.tempfile, "mkdtemp", read_only)
    with pytest.raises(CheckpointFormatError, match=r"Read-only file system.*load_format pt\."):
        open_checkpoint(folder, "npcache")


def test_weights_without_a_numpy_type_are_refused_before_anything_is_written(
    folder: Path,
) -> None:
    """Numpy has no bfloat16: the refusal names the tensor and what reads it by slice too."""
    torch.save({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}, folder / BIN)
    with pytest.raises(
        CheckpointFormatError, match=r"no type for the torch.bfloat16 of tensor 'b'.*load_format pt"
    ):
        open_checkpoint(folder, "npcache")
    assert os.listdir(folder) == [BIN]


def test_a_tensor_that_cannot_be_a_file_is_refused(folder: Path) -> None:
    torch.save({"a/b": torch.ones(2)}, folder / BIN)
    with pytest.raises(CheckpointFormatError, match=r"tensor 'a/b' cannot be a file.*format pt"):
        open_checkpoint(folder, "npcache")


def test_a_cache_of_other_weights_is_refused(folder: Path) -> None:
    """Weights that were saved again since would not be loaded: the refusal says what to remove."""
    open_checkpoint(folder, "npcache").close()
    torch.save(TENSORS | {"layer.0.w": TENSORS["layer.0.w"] + 1}, folder / BIN)
    with pytest.raises(CheckpointFormatError, match=r"made from other weights.*Remove the folder"):
        open_checkpoint(folder, "npcache")
    shutil.rmtree(folder / "np")
    with open_checkpoint(folder, "npcache") as checkpoint:
        assert torch.equal(checkpoint["layer.0.w"].read(), TENSORS["layer.0.w"] + 1)


def test_a_folder_without_either_is_refused(tmp_path: Path) -> None:
    """What the cache is made from is missing: what is there is listed."""
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointFormatError, match=r"no \*\.bin or \*\.pt file; there is config"):
        open_checkpoint(tmp_path, "npcache")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[", "not valid JSON"),
        ('["scalar"', "not valid JSON"),
        ("{}", "not a JSON list but {}"),
        ("[" * 5000, "not valid JSON"),
        ("[]", "names no tensor"),
        ('["scalar", "scalar"]', "name 'scalar' twice"),
        ("[1]", "tensor 1 cannot be a file"),
        ("[null]", "tensor None cannot be a file"),
        ('["../pytorch_model.bin"]', "cannot be a file"),
        ('["sub/scalar"]', "cannot be a file"),
        ('["/etc/passwd"]', "cannot be a file"),
        ('["..\\\\scalar"]', "cannot be a file"),
        ('[".."]', "cannot be a file"),
        ('["."]', "cannot be a file"),
        ('[""]', "cannot be a file"),
        ('["a\\u0000b"]', "cannot be a file"),
        ('["\\u001b[2J"]', "cannot be a file"),
        ('["\\ud800"]', "not valid JSON"),
        (f'["{NAMES}"]', "cannot be a file"),
        (json.dumps(["w" * 256]), "cannot be a file"),
        ('["absent"]', r"np/absent is not a file"),
    ],
)
def test_a_damaged_list_of_names_is_refused(cached: Path, text: str, message: str) -> None:
    """Each damage is one printable refusal that names the file."""
    (cached / "np" / NAMES).write_text(text)
    with pytest.raises(CheckpointFormatError, match=message) as refusal:
        open_checkpoint(cached, "npcache")
    assert str(cached / "np") in str(refusal.value)
    assert str(refusal.value).isprintable()


def header(text: str, data: bytes = b"\0" * 8, version: bytes = b"\1\0") -> bytes:
    written = text.encode()
    return b"\x93NUMPY" + version + len(written).to_bytes(2, "little") + written + data


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin as a file of numpy.save"),
        (b"\x93NUMPY\1", "does not begin"),
        (b"PK\3\4" + b"\0" * 20, "does not begin"),
        (header(GOOD, version=b"\4\0"), r"version is 4\.0"),
        (header(GOOD, version=b"\1\1"), r"version is 1\.1"),
        (header(GOOD)[:20], "should be 57 bytes, where the file has 20"),
        (header(GOOD + " " * 10_000), "at most 10000 are accepted"),
        (header(GOOD, b"\0" * 7), "8 bytes should follow its header .* and 7 do"),
        (header(GOOD, b"\0" * 9), "and 9 do"),
        (header(GOOD.replace("2,", "3,")), "12 bytes should follow"),
        (header(GOOD.replace("2,", "4294967296, 4294967296")), r"less than 2\*\*63 bytes"),
        (header(GOOD.replace("2,", "0, 9223372036854775808")), r"less than 2\*\*63 bytes"),
        (header(GOOD.replace("2,", "9" * 30 + ",")), "not as numpy.save writes one"),
        (header(GOOD.replace("2,", "1, " * 64 + "1")), r"less than 2\*\*63 bytes"),
        (header(GOOD.replace("2,", "-2,")), "not as numpy.save writes one"),
        (header(GOOD.replace("2,", "2")), "not as numpy.save writes one"),
        (header(GOOD.replace("2,", "True,")), "not as numpy.save writes one"),
        (header(GOOD.replace("False", "0")), "not as numpy.save writes one"),
        (header(GOOD.replace("<f4", "|O")), "Python objects and records are not read"),
        (header(GOOD.replace("'<f4'", "[('a', '<f4')]")), "objects and records are not read"),
        (header(GOOD.replace("<f4", ">f4")), "its elements are '>f4'"),
        (header(GOOD.replace("<f4", "|V2")), "no bfloat16"),
        (header(GOOD.replace("<f4", "<U1")), "its elements are '<U1'"),
        (header(GOOD.replace("'<f4'", "__import__('os').abort()")), "not as numpy.save writes"),
        (header("(" * 9000), "not as numpy.save writes one"),
        (header("\x1b[2J\xff"), "not as numpy.save writes one"),
        (header(""), "not as numpy.save writes one"),
    ],
)
def test_a_damaged_file_is_refused(cached: Path, data: bytes, message: str) -> None:
    """Each damage is one short printable refusal that names the file; nothing is evaluated."""
    (cached / "np" / "scalar").write_bytes(data)
    with pytest.raises(CheckpointFormatError, match=message) as refusal:
        open_checkpoint(cached, "npcache")
    words = str(refusal.value)
    assert re.search(r"np/scalar\b", words)
    assert words.isprintable()
    assert len(words) < 1000


def test_an_object_array_of_numpy_is_refused(cached: Path) -> None:
    """Its elements are a pickle, which is not read."""
    with open(cached / "np" / "scalar", "wb") as file:
        np.save(file, np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(CheckpointFormatError, match="Python objects"):
        open_checkpoint(cached, "npcache")


def _unfinished(folder: Path) -> None:
    (folder / "np" / NAMES).unlink()
    torch.save(TENSORS, folder / BIN)


def _link_outside(folder: Path) -> None:
    (folder / "np" / "scalar").rename(folder.parent / "outside")
    (folder / "np" / "scalar").symlink_to(folder.parent / "outside")


def _folder_outside(folder: Path) -> None:
    (folder / "np").rename(folder.parent / "np-outside")
    (folder / "np").symlink_to(folder.parent / "np-outside")


def test_what_a_killed_process_left_is_removed(folder: Path) -> None:
    """The next process removes what one of this host left, and of another host what is old."""
    names = (f"{npcache._OURS}-a", ".np-b-c", ".np-d-e", ".np-f-g", ".np-h-i")
    ours, other, old, begun_early, young_folder = (folder / name for name in names)
    for each in (ours, other, old, begun_early, young_folder):
        each.mkdir()
        (each / "v").touch()
        (each / "w").touch()
    # Two of them are still written to: one file is young, or only the folder is.
    for path in (old / "v", old / "w", old, begun_early / "w", begun_early):
        os.utime(path, (0, 0))
    for path in (young_folder / "v", young_folder / "w"):
        os.utime(path, (0, 0))
    link = folder / ".np-link"
    link.symlink_to(folder.parent)
    assert_tensors(folder, "npcache")
    kept = [".np-b-c", ".np-f-g", ".np-h-i", ".np-link"]
    assert sorted(os.listdir(folder)) == [*kept, "np", BIN]


def _a_folder_inside(folder: Path) -> None:
    (folder / "np" / "scalar").unlink()
    (folder / "np" / "scalar").mkdir()


def _no_folder(folder: Path) -> None:
    shutil.rmtree(folder / "np")
    (folder / "np").touch()
    torch.save(TENSORS, folder / BIN)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_unfinished, "has no weight_names.json: it is unfinished"),
        (_link_outside, "outside of the checkpoint's folder"),
        (_folder_outside, "outside of the checkpoint's folder"),
        (_a_folder_inside, "scalar"),
        (_no_folder, "has no weight_names.json: it is unfinished"),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_a_damaged_folder_is_refused(
    tmp_path: Path, cached: Path, damage: Callable[[Path], None], message: str
) -> None:
    """Nothing is written into it, and no link leads out of it."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (cached / "np").rename(inner / "np")
    damage(inner)
    with pytest.raises(CheckpointFormatError, match=message):
        open_checkpoint(inner, "npcache")
    assert not list(inner.glob(".np-*"))


CODES = ("f8", "f4", "f2", "c8", "?", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1")
NUMPYS = [np.dtype(code) for code in CODES]


@pytest.mark.parametrize("dtype", NUMPYS, ids=str)
def test_arrays_of_every_type_and_order_are_numpys(tmp_path: Path, dtype: np.dtype[Any]) -> None:
    """What numpy writes by rows or by columns is read as it is, and numpy reads what is written."""
    rng = np.random.default_rng(0)
    for shape in ((), (1,), (5,), (2, 3), (3, 1, 2), (0,), (2, 0, 3), (2, 3, 4, 5)):
        values = rng.integers(0, 2, shape).astype(dtype)
        for order in ("C", "F"):
            path = tmp_path / "w"
            with open(path, "wb") as written:
                np.save(written, np.asarray(values, order=order))
            file = NpyFile(path, tmp_path)
            read = file["w"].read()
            assert read.shape == shape
            assert np.array_equal(read.numpy(), values)
            assert read.numpy().dtype == dtype
            for dim, size in enumerate(shape):
                for start in range(size):
                    part = file["w"].narrow(dim, start, size - start).read().numpy()
                    assert np.array_equal(part, np.take(values, range(start, size), axis=dim))
            file.close()
        assert has_type(read.dtype)
        with open(path, "wb") as written:
            write_npy(written, read)
        again = np.load(path)
        assert np.array_equal(again, values)
        assert again.dtype == dtype
        assert path.read_bytes().index(b"\n") % 64 == 63  # numpy aligns the first element
    for missing in (torch.bfloat16, torch.float8_e4m3fn, torch.complex128):
        assert not has_type(missing)
