"""Every way in which a safetensors file can be wrong is refused before a tensor is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.header import DTYPES, MAX_HEADER_BYTES
from vllm_module.weights.safetensors import SafetensorsFile


def entry(dtype: Any = "U8", shape: Any = (4,), begin: Any = 0, end: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": entry(dtype="F128")}, "dtype should be one of F64"),
        ({"w": entry(dtype=["U8"])}, "dtype should be one of F64"),
        ({"w": entry(shape=[-4])}, r"shape should be a list of sizes, and is \[-4\]"),
        ({"w": entry(shape=[4.0])}, "shape should be a list of sizes"),
        ({"w": entry(shape=[True, 4])}, "shape should be a list of sizes"),
        ({"w": entry(shape=["4"])}, "shape should be a list of sizes"),
        ({"w": entry(shape=[2**64, 0], end=0)}, "shape should be a list of sizes"),
        ({"w": entry(shape=4)}, "shape should be a list of sizes"),
        ({"w": entry(begin=-4, end=0)}, "data_offsets should be .begin, end."),
        ({"w": entry(begin=4, end=0)}, "data_offsets should be .begin, end."),
        ({"w": entry(begin=0.0)}, "data_offsets should be .begin, end."),
        ({"w": {**entry(), "data_offsets": [0, 4, 8]}}, "data_offsets should be .begin, end."),
        ({"w": {**entry(), "data_offsets": 4}}, "data_offsets should be .begin, end."),
        ({"w": entry(dtype="F16")}, r"8 bytes apart \(F16 of shape \[4\]\), and is \[0, 4\]"),
        ({"w": {"dtype": "U8", "shape": [4]}}, "an object with dtype, shape and data_offsets"),
        ({"w": [0, 4]}, "an object with dtype, shape and data_offsets"),
        ({"w": entry(), "v": entry()}, "'v' overlaps 'w'"),
        ({"w": entry(), "v": entry(begin=2, end=6)}, "'v' overlaps 'w'"),
        ({"w": entry(shape=[2], end=2), "v": entry(shape=[1], begin=3)}, "'v' leaves a hole"),
        ({"w": entry(shape=[3], begin=1)}, "'w' leaves a hole after 'the header'"),
        ({"w": entry(shape=[8], end=8)}, "'w' should end at byte .* was cut off"),
        ({"w": entry(begin=10**15, end=10**15 + 4)}, "'w' leaves a hole"),
        ({"w": entry(begin=10**30, end=10**30 + 4)}, "data_offsets should be .begin, end."),
        ({"w": entry(shape=[3], end=3)}, "should end with its last tensor"),
        ({}, "should end with its last tensor"),
        ({"__metadata__": {"format": 1}, "w": entry()}, "__metadata__ should map strings"),
        ({"__metadata__": "pt", "w": entry()}, "__metadata__ should map strings"),
        ({"__metadata__": False, "w": entry()}, "__metadata__ should map strings"),
    ],
)
def test_a_wrong_entry_is_refused(write_file, header, message) -> None:
    """The error names the file, the tensor, what was expected, what came and what to do."""
    path = write_file(header, b"\0\1\2\3")
    with pytest.raises(CheckpointFormatError, match=message) as refusal:
        SafetensorsFile(path)
    assert str(path) in str(refusal.value)
    assert "download it again" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not valid JSON"),
        (b'{"w": nope}', "not valid JSON"),
        (b'{"w\xff": 1}', "not valid JSON"),
        (b'{"w": NaN}', "NaN is not JSON"),
        (b'{"w": {"dtype": "U8", "shape": [Infinity], "data_offsets": [0, 4]}}', "Infinity"),
        (b'{"w": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"w": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b'{"w": 1, "w": 2}', "'w' occurs twice"),
        (b'{"w": {"dtype": "U8", "dtype": "I8"}}', "'dtype' occurs twice"),
        (b" {}", "should begin with '{'"),
        (b"[]", "should begin with '{'"),
        (b"", "should begin with '{'"),
        (b"{} {}", "not valid JSON"),
    ],
)
def test_a_header_that_is_no_json_object_is_refused(write_file, text, message) -> None:
    with pytest.raises(CheckpointFormatError, match=message):
        SafetensorsFile(write_file(text))


@pytest.mark.parametrize("length", [3, 1 << 20, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_a_header_length_that_lies_is_refused(write_file, length) -> None:
    with pytest.raises(CheckpointFormatError):
        SafetensorsFile(write_file({"w": entry()}, b"\0\1\2\3", length=length))


def test_a_huge_header_is_refused_although_the_file_has_it(write_file) -> None:
    path = write_file({"w": entry()}, length=MAX_HEADER_BYTES + 1)
    with path.open("r+b") as file:
        file.truncate(MAX_HEADER_BYTES + 100)  # sparse: takes no space on disk
    with pytest.raises(CheckpointFormatError, match="at most 100000000 are accepted"):
        SafetensorsFile(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 7])
def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=f"{len(content)} bytes"):
        SafetensorsFile(path)


def test_a_git_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "pointer.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    with pytest.raises(CheckpointFormatError, match="git lfs pull"):
        SafetensorsFile(path)


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match="is not a file"):
        SafetensorsFile(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointFormatError, match="is not a file"):
        SafetensorsFile(tmp_path)


def test_a_file_that_cannot_be_opened_is_refused(write_file, monkeypatch) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    path = write_file({})
    monkeypatch.setattr("os.open", denied)
    with pytest.raises(CheckpointFormatError, match="Permission denied"):
        SafetensorsFile(path)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_metadata_that_the_library_takes_is_taken(
    write_file: Callable[..., Path], metadata: dict[str, str] | None
) -> None:
    """A file whose metadata are null has none, as for safetensors' own reader."""
    path = write_file({"__metadata__": metadata, "w": entry()}, b"\0\1\2\3")
    file = SafetensorsFile(path)
    with safe_open(path, "pt") as reference:
        assert file.metadata == (reference.metadata() or {})
        assert torch.equal(file["w"].read(), reference.get_tensor("w"))


def test_every_dtype_of_the_table_is_read(write_file) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, dtype in DTYPES.items():
        header[name] = entry(name, [2, 3], end, end + 6 * dtype.itemsize)
        end += 6 * dtype.itemsize
    data = bytes(index % 2 for index in range(end))  # 0 and 1 are the only valid bools
    file = SafetensorsFile(write_file(header, data))
    for name, dtype in DTYPES.items():
        begin, stop = header[name]["data_offsets"]
        tensor = file[name].read()
        assert (str(tensor.dtype), tensor.shape) == (f"torch.{dtype.name}", (2, 3))
        raw = torch.frombuffer(bytearray(data[begin:stop]), dtype=torch.uint8)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), raw)


def test_order_padding_and_metadata_as_the_format_allows(write_file) -> None:
    """Entries in any order, spaces after the header, empty tensors in between, extra keys."""
    header = {
        "b": entry(begin=4, end=8),
        "empty": entry("F32", [0, 7], 4, 4),
        "__metadata__": {"format": "pt"},
        "a": {**entry(), "comment": "unknown keys are ignored, as the reference does"},
    }
    file = SafetensorsFile(write_file(json.dumps(header).encode() + b"   ", bytes(range(8))))
    assert list(file) == ["b", "empty", "a"]
    assert file.metadata == {"format": "pt"}
    assert file["b"].read().tolist() == [4, 5, 6, 7]
    assert file["empty"].read().shape == (0, 7)
    assert file.nbytes == 8


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_a_dtype_that_only_the_format_has_is_not_called_damage(write_file, dtype: str) -> None:
    """The refusal names the tensor and the dtype, and does not advise another download."""
    path = write_file({"w": entry(dtype=dtype, shape=[8], end={"F4": 4}.get(dtype, 6))})
    with pytest.raises(CheckpointFormatError) as refused:
        SafetensorsFile(path)
    words = f"{path}: tensor 'w' has the dtype {dtype}, which the format has and vllm_module does"
    assert str(refused.value).startswith(words)
    assert "download" not in str(refused.value)


def test_every_dtype_of_the_format_is_known(write_file) -> None:
    """The reference implementation names no dtype that is called unknown here."""
    path = write_file({"w": entry(dtype="?")}, b"\0" * 4)
    with pytest.raises(Exception, match="unknown variant") as refused:
        safe_open(path, "pt")
    names = re.findall("`([A-Z0-9_]+)`", str(refused.value))
    assert "F64" in names
    for name in names:
        with pytest.raises(CheckpointFormatError) as ours:
            SafetensorsFile(write_file({"w": entry(dtype=name, shape=[99])}))
        assert "dtype should be one of" not in str(ours.value)
