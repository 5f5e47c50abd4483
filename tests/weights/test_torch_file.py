"""Files of ``torch.save``: the same bits as torch.load, read by slice, and nothing ever run."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_module.errors import CheckpointFormatError
from vllm_module.weights import open_checkpoint
from vllm_module.weights.header import DTYPES

BASE = torch.arange(24.0).reshape(4, 6)
STATE = {
    "plain": BASE,
    "rows": BASE[1:3],
    "columns": BASE[:, 2:5],
    "transposed": BASE.t(),
    "parameter": torch.nn.Parameter(torch.randn(300, 70).bfloat16()),
    "empty": torch.empty(0, 4),
    "number": torch.tensor(5),
    "flags": torch.tensor([True, False]),
    "float8": torch.randn(8, 8).to(torch.float8_e4m3fn),
}


def saved(held: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(held, stream, **options)
    return stream.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one file that holds views, a parameter and several dtypes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "pytorch_model.bin").write_bytes(saved(STATE))
    return folder


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.contiguous().view(-1), other.detach().contiguous().view(-1)
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_tensors_are_read_whole_and_by_slice(folder: Path) -> None:
    """A tensor and each slice of it have the bits that torch.load gives, views included."""
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.keys() == STATE.keys()
        for name, handle in checkpoint.items():
            tensor = STATE[name]
            assert (handle.shape, handle.dtype) == (tensor.shape, tensor.dtype)
            assert same(handle.read(), tensor), name
            for dim, size in enumerate(tensor.shape):
                for start in range(size) if size < 10 else (0, 7, size - 2):
                    length = min(2, size - start)
                    part = tensor.narrow(dim, start, length)
                    assert same(handle.narrow(dim, start, length).read(), part), (name, dim, start)


@pytest.mark.parametrize("name", [dtype.name for dtype in DTYPES.values()])
@pytest.mark.parametrize("kind", ["plain", "trained", "parameter"])
def test_tensors_of_any_dtype_may_be_trained(kind: str, name: str, tmp_path: Path) -> None:
    """A tensor that torch can train is read as one that it cannot, by itself and in a Parameter."""
    tensor = torch.randint(2, (3, 16), dtype=torch.uint8).view(getattr(torch, name))
    can_be_trained = tensor.is_floating_point() or tensor.is_complex()
    if kind == "parameter":
        tensor = torch.nn.Parameter(tensor, requires_grad=can_be_trained)
    elif kind == "trained" and can_be_trained:
        tensor.requires_grad_()
    (tmp_path / "m.bin").write_bytes(saved({"a": tensor}))
    with open_checkpoint(tmp_path / "m.bin") as checkpoint:
        handle = checkpoint["a"]
        assert (handle.shape, handle.dtype) == (tensor.shape, tensor.dtype)
        assert same(handle.read(), tensor)


def test_a_slice_reads_no_more_than_itself(folder: Path) -> None:
    """Opening reads no tensor, and a slice of rows reads the bytes of these rows."""
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.bytes_read == 0
        checkpoint["parameter"].narrow(0, 10, 20).read()
        assert checkpoint.bytes_read == 20 * 70 * 2


def test_formats_are_looked_for_in_one_order(tmp_path: Path) -> None:
    """safetensors goes first, an index before single files, and a trainer's state is left out."""
    first, second, third = (torch.full((2,), float(value)) for value in range(3))
    for name in ("training_args.bin", "optimizer.bin", "scheduler.bin", "rng_state_0.bin"):
        (tmp_path / name).write_bytes(b"state")
    (tmp_path / "part1.pt").write_bytes(saved({"a": first}))
    assert open_checkpoint(tmp_path)["a"].read().tolist() == [0, 0]
    (tmp_path / "part1.bin").write_bytes(saved({"a": second}))
    (tmp_path / "part2.bin").write_bytes(saved({"b": second}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint) == ["a", "b"]
        assert [path.name for path in checkpoint.files] == ["part1.bin", "part2.bin"]
    index = {"weight_map": {"a": "part1.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert sorted(open_checkpoint(tmp_path)) == ["a"]
    save_file({"a": third}, tmp_path / "other.safetensors")
    assert open_checkpoint(tmp_path)["a"].read().tolist() == [2, 2]
    assert open_checkpoint(tmp_path, "pt")["a"].read().tolist() == [1, 1]
    assert open_checkpoint(tmp_path / "part1.pt")["a"].read().tolist() == [0, 0]
    with pytest.raises(
        ValueError, match="load_format 'npz' is unknown: expected auto, sharded_state, safetens"
    ):
        open_checkpoint(tmp_path, "npz")


class Runs:
    """An object that removes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.remove, ("victim",)


class Fills:
    """An object that is a terabyte long when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (1 << 40,)


def archive(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as written:
        for name, data in members:
            written.writestr(name, data)
    return stream.getvalue()


def unzipped(data: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as read:
        return [(name, read.read(name)) for name in read.namelist()]


def with_member(name: str, data: bytes) -> bytes:
    """A file whose member has other bytes."""
    kept = [(each, old) for each, old in unzipped(saved({"a": BASE})) if each != f"archive/{name}"]
    return archive(*kept, (f"archive/{name}", data))


def longer_storage() -> bytes:
    """A file whose pickle says that a storage is longer than it is."""
    members = dict(unzipped(saved({"a": BASE})))
    # 24 elements, and rows of 6: BININT1 24 stands for the length, and 4 for the rows.
    pickle = members["archive/data.pkl"].replace(b"K\x18", b"K\x78").replace(b"K\x04", b"K\x14")
    return with_member("data.pkl", pickle)


def elsewhere() -> bytes:
    """A file whose last member's entry leads beyond the file's end."""
    data = bytearray(saved({"a": BASE}))
    at = data.rindex(b"PK\x01\x02") + 42
    data[at : at + 4] = struct.pack("<I", len(data) - 10)
    return bytes(data)


def nested_key() -> bytes:
    """A file whose pickle is a dict with a key of 60 nested tuples, each of which is held twice."""
    return with_member("data.pkl", b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"K\x01s.")


def long_list() -> bytes:
    """A file with a list of members of 1 GiB, as its end says."""
    data = bytearray(saved({"a": BASE}) + bytes(1 << 25))
    data += struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, 1 << 25, len(data) - (1 << 25), 0)
    return bytes(data)


REFUSED = {
    "tuples that are long to hash": (nested_key(), "a dict with a key of type tuple"),
    "a memo with a gap": (
        with_member("data.pkl", b"\x80\x02}r\x00\x00\x00\x03."), "number 50331648 into a memo of 0"
    ),
    "a long list of members": (long_list(), "at most 16777216 are accepted"),
    "what would run": (saved({"a": Runs()}), r"asks for '\w+\.remove', which is not read, and no"),
    "what would fill the memory": (saved({"a": Fills()}), r"asks for '\w+\.bytearray', which"),
    "another protocol": (saved({"a": BASE}, pickle_protocol=4), "has FRAME, which torch"),
    "an older file": (saved({"a": BASE}, _use_new_zipfile_serialization=False), "no zip archive"),
    "a nested dict": (saved({"state_dict": {"a": BASE}}), "'state_dict' is a dict, and only"),
    "a number": (saved({"a": BASE, "epoch": 3}), "'epoch' is 3, and only tensors are read"),
    "a list": (saved([BASE]), "expected a dict of names and tensors"),
    "a name that is none": (saved({1: BASE}), "named by a string of at most 1024 characters"),
    "a long name": (saved({"a" * 2000: BASE}), "named by a string of at most 1024 characters"),
    "a sparse tensor": (saved({"a": torch.eye(3).to_sparse()}), "asks for .*sparse_tensor', which"),
    "a conjugate": (saved({"a": torch.tensor([1 + 2j]).conj()}), "expected a dense one"),
    "elements that share memory": (saved({"a": BASE[:1].expand(3, 6)}), "'a': its elements shar"),
    "overlapping rows": (saved({"a": BASE.flatten().as_strided((3, 4), (2, 1))}), "share memory"),
    "compressed members": (
        archive(*unzipped(saved({"a": BASE})), method=zipfile.ZIP_DEFLATED), "is compressed"
    ),
    "another byte order": (with_member("byteorder", b"big"), "not little-endian"),
    "a program": (with_member("constants.pkl", b""), "TorchScript archive"),
    "a zip of something else": (archive(("a/b", b"c")), "no data.pkl, or several"),
    "two pickles": (archive(("a/data.pkl", b""), ("b/data.pkl", b"")), "two members 'b/data.pkl'"),
    "an empty pickle": (with_member("data.pkl", b""), "its pickle is broken"),
    "a storage that is missing": (
        archive(*[m for m in unzipped(saved({"a": BASE})) if m[0] != "archive/data/0"]),
        "'a': its storage '0' is in none of the archive's members",
    ),
    "a storage that is cut off": (
        with_member("data/0", b"0" * 90), "'a': its storage '0' should have 96 bytes, .* has 90"
    ),
    "a longer storage": (longer_storage(), "'a': its storage '0' should have 480 bytes, .* has 96"),
    "a member elsewhere": (elsewhere(), "is not where it should be|is broken"),
    "no bytes": (b"", "no zip archive"),
    "a few bytes": (b"PK\x03\x04" + bytes(9), "shorter than the end of an archive"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_file_is_refused(case: str, tmp_path: Path, monkeypatch) -> None:
    """A file that breaks the format, or asks for more than tensors, is refused by name."""
    data, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "victim").touch()
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(CheckpointFormatError, match=message) as refused:
        open_checkpoint(tmp_path)
    assert "pytorch_model.bin: " in str(refused.value)
    assert (tmp_path / "victim").exists()


@pytest.mark.parametrize("moved", [name for name, _ in unzipped(saved({"a": BASE}))])
def test_a_member_in_another_folder_is_refused(moved: str, tmp_path: Path) -> None:
    """An archive of torch.save has one folder, whichever of its members is elsewhere."""
    members = unzipped(saved({"a": BASE}))
    assert {name.split("/")[0] for name, _ in members} == {"archive"}
    other = [(name if name != moved else f"other{name[7:]}", data) for name, data in members]
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(archive(*other))
    with pytest.raises(CheckpointFormatError, match=r"no data\.pkl, or several"):
        open_checkpoint(path)


def test_a_long_byte_order_is_not_read(tmp_path: Path, monkeypatch) -> None:
    """A member that should be one word is refused by its size."""
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(with_member("byteorder", b"little" + bytes(1 << 20)))
    monkeypatch.setattr(zipfile.ZipFile, "read", None)
    with pytest.raises(CheckpointFormatError, match="not little-endian"):
        open_checkpoint(path)


def test_damage_is_refused_or_changes_values_alone(tmp_path: Path) -> None:
    """A file that is cut off is refused; one with a changed byte is, or reads what is there."""
    state = OrderedDict(a=BASE, b=torch.arange(6))
    data = saved(state)
    path = tmp_path / "model.pt"
    for end in [*range(0, len(data), 61), len(data) - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointFormatError):
            open_checkpoint(path)
    chosen = random.Random(0)
    for _ in range(120):
        changed = bytearray(data)
        changed[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        path.write_bytes(changed)
        try:
            with open_checkpoint(path) as checkpoint:
                for handle in checkpoint.values():
                    assert handle.read().shape == handle.shape
        except CheckpointFormatError:
            pass
