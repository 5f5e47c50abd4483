"""Headers of GGUF files beside gguf-py's writer and reader: every type, alignment and edge."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.file_bytes import FileBytes
from vllm_module.weights.gguf.file import GGUFFile, find_gguf
from vllm_module.weights.gguf.header import GGUFHeader, read_gguf_header

TYPES: dict[str, tuple[Any, ...]] = {
    "uint8": (0, 1, 255), "int8": (-128, -1, 127), "uint16": (0, 65535), "int16": (-32768, 32767),
    "uint32": (0, 2**32 - 1), "int32": (-(2**31), 2**31 - 1), "float32": (0.0, -1.5, 2.0**100),
    "bool": (True, False), "string": ("a\u00e9\u6f22\U0001f642", "x" * 300),
    "uint64": (0, 2**64 - 1), "int64": (-(2**63), 2**63 - 1), "float64": (0.1, 1e300),
}  # fmt: skip


def header(path: Path) -> GGUFHeader:
    data = path.read_bytes()
    return read_gguf_header(path, len(data), lambda offset, length: data[offset : offset + length])


def write(path: Path, tensors: dict[str, Any], alignment: int | None = None, **keys: Any) -> Path:
    """Write a file with gguf-py; a key's value is a pair of its type and its value."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, (kind, value) in keys.items():
        getattr(writer, f"add_{kind}")(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, *tensor if isinstance(tensor, tuple) else (tensor,))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_type_of_value_is_read(tmp_path: Path) -> None:
    """Values are those that were written, and arrays of them, an empty one too."""
    keys = {
        f"{kind}{at}": (kind, value)
        for kind, values in TYPES.items()
        for at, value in enumerate(values)
    }
    lists: dict[str, list[Any]] = {
        "strings": ["", "b", "\u6f22"], "integers": [-1, 0, 2**31 - 1], "bools": [True, False],
        "floats": [0.5, -2.0],
    }  # fmt: skip
    arrays = {name: ("array", value) for name, value in lists.items()}
    path = write(tmp_path / "m.gguf", {"w": np.ones(4, np.float32)}, **keys, **arrays)
    metadata = dict(header(path).metadata)
    assert metadata.pop("general.architecture") == "llama"
    expected = {key: value for key, (_, value) in (keys | arrays).items()}
    assert metadata == expected
    assert {key: type(value) for key, value in metadata.items()} == {
        key: type(value) for key, value in expected.items()
    }
    assert [type(each) for each in metadata["bools"]] == [bool, bool]


FLOATS = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}


@pytest.mark.parametrize("alignment", [None, 8, 16, 32, 64, 1024])
def test_tensors_are_where_the_library_reads_them(tmp_path: Path, alignment: int | None) -> None:
    """Places, shapes and types are those of gguf-py's reader, whatever is between tensors."""
    shapes: list[tuple[int, ...]] = [(1,), (7,), (2, 3), (3, 1, 5), (2, 1, 1, 3), (33,), (4, 32)]
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        f"t{at}": rng.standard_normal(shape).astype([np.float32, np.float16][at % 2])
        for at, shape in enumerate(shapes)
    }
    bf16 = rng.standard_normal((3, 4)).astype(np.float32).view(np.uint16)[:, ::2].copy()
    tensors["b"] = (bf16.view(np.uint8), None, gguf.GGMLQuantizationType.BF16)
    tensors["q"] = (
        gguf.quants.quantize(rng.standard_normal((2, 64)).astype(np.float32), KINDS["Q8_0"]),
        None,
        KINDS["Q8_0"],
    )
    path = write(tmp_path / "m.gguf", tensors, alignment)
    read = gguf.GGUFReader(path)
    ours = {tensor.name: tensor for tensor in header(path).tensors}
    assert list(ours) == [tensor.name for tensor in read.tensors]
    assert header(path).start == read.data_offset
    for theirs in read.tensors:
        tensor = ours[theirs.name]
        assert tensor.shape == tuple(reversed(theirs.shape.tolist()))
        assert tensor.kind == theirs.tensor_type.name
        assert (tensor.begin, tensor.end) == (
            theirs.data_offset,
            theirs.data_offset + theirs.n_bytes,
        )


KINDS = {kind.name: kind for kind in gguf.GGMLQuantizationType}


def small(
    *, version: int = 3, dims: tuple[int, ...] = (4,), kind: int = 0, **changes: Any
) -> bytes:
    """Return a file with one key and one tensor, written by hand, with one thing changed."""
    given = {"alignment": 32, "offset": 0, "name": "w", "values": 16, "tensors": 1, "keys": 1}
    of = given | changes
    key = b"general.alignment"
    name = of["name"].encode()
    data = b"GGUF" + struct.pack("<IQQ", version, of["tensors"], of["keys"])
    data += struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, of["alignment"])
    data += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    data += struct.pack(f"<{len(dims)}QIQ", *dims, kind, of["offset"])
    return data + bytes(-len(data) % max(1, min(of["alignment"], 1 << 16))) + bytes(of["values"])


SMALL: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"version": 2}, None),
    ({"version": 1}, "version 2 or 3"),
    ({"version": 4}, "version 2 or 3"),
    ({"version": 0x03000000}, "a big-endian file"),
    ({"version": 0x02000000}, "a big-endian file"),
    *[({"alignment": size}, None) for size in (1, 2, 8, 4096)],
    *[({"alignment": size}, "a power of two") for size in (0, 3, 24, 31, 33, 2**31 + 1)],
    ({"values": 15}, "it was cut off"),
    ({"values": 32}, None),  # what follows the last tensor up to the alignment
    ({"values": 33}, "should end with its last tensor"),
    ({"offset": 32, "values": 48}, "leaves a hole after the header"),
    ({"name": ""}, "1 to 1024 characters"),
    ({"name": "w" * 1024}, None),
    ({"name": "w" * 1025}, "1 to 1024 characters"),
    ({"dims": (2, 2)}, None),
    ({"dims": (2, 1, 1, 2)}, None),
    ({"dims": (1, 1, 1, 1, 4)}, "1 to 4"),
    ({"dims": ()}, "1 to 4"),
    ({"dims": (0,), "values": 0}, "sizes of 1 and more"),
    ({"dims": (2**56,)}, "less than 2\\*\\*56 values"),
    ({"dims": (2**28, 2**28)}, "less than 2\\*\\*56 values"),
    ({"dims": (2**56 - 1,)}, "it was cut off"),
    ({"dims": (32,), "kind": 8, "values": 34}, None),  # Q8_0: blocks of 32 values in 34 bytes
    ({"dims": (31,), "kind": 8, "values": 34}, "whole blocks of 32 values"),
    ({"dims": (32,), "kind": 8, "values": 33}, "it was cut off"),
    ({"dims": (4,), "kind": 1, "values": 8}, None),
    ({"dims": (4,), "kind": 30, "values": 8}, None),
    ({"dims": (4,), "kind": 5}, "a number that ggml has"),  # Q4_3, which was removed
    ({"dims": (4,), "kind": 999}, "a number that ggml has"),
    ({"dims": (4,), "kind": 24, "values": 4}, "of type I8, which is not supported"),
    ({"dims": (128,), "kind": 41, "values": 18}, "of type Q1_0, which is not supported"),
    ({"tensors": 2}, "."),
    ({"keys": 2}, "."),
    ({"tensors": 2**40}, "tensors, where at most"),
    ({"keys": 2**40}, "keys, where at most"),
]


@pytest.mark.parametrize(("changes", "problem"), SMALL)
def test_edges_of_the_format(tmp_path: Path, changes: dict[str, Any], problem: str | None) -> None:
    """The last value that is right is read, and the first that is wrong is refused by name."""
    path = tmp_path / "m.gguf"
    path.write_bytes(small(**changes))
    if problem is None:
        (tensor,) = header(path).tensors
        assert tensor.name == changes.get("name", "w")
        return
    with pytest.raises(CheckpointFormatError, match=problem):
        header(path)


BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K"]
BLOCKS += ["Q6_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"]


@pytest.mark.parametrize("kind", BLOCKS)
def test_sizes_of_blocks_are_the_librarys(tmp_path: Path, kind: str) -> None:
    """Each type's number, values and bytes of a block are those of gguf-py's constants."""
    values, nbytes = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    path = tmp_path / "m.gguf"
    path.write_bytes(small(dims=(2 * values, 3), kind=int(KINDS[kind]), values=6 * nbytes))
    (tensor,) = header(path).tensors
    assert (tensor.kind, tensor.shape) == (kind, (3, 2 * values))
    assert tensor.end - tensor.begin == 6 * nbytes
    path.write_bytes(small(dims=(values + 1,), kind=int(KINDS[kind]), values=2 * nbytes))
    with pytest.raises(CheckpointFormatError, match=f"whole blocks of {values} values"):
        header(path)


class Listed:
    path = Path("folder")

    def __init__(self, *names: str) -> None:
        self.listed = names

    def names(self) -> tuple[str, ...]:
        return self.listed


PARTS = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["x.gguf"], "x.gguf"),
        (["config.json", "x.gguf", "x.gguf.part"], "x.gguf"),
        (PARTS, PARTS[0]),
        ([*PARTS, "n-00001-of-00002.gguf"], "several models"),
        ([*PARTS, "m-00001-of-00003.gguf"], "several models"),
        ([*PARTS, "m.gguf"], "several models"),
        (["a.gguf", "b.gguf"], "several models"),
        (["m-00001-of-00002.GGUF"], "holds no"),
        (["x.bin"], "holds no"),
        ([], "holds no"),
    ],
)
def test_the_one_model_of_a_folder(names: list[str], found: str) -> None:
    """Parts of one model are one; anything beside it is another."""
    folder: Any = Listed(*names)
    if found.endswith(".gguf"):
        assert find_gguf(folder) == found
    else:
        with pytest.raises(CheckpointFormatError, match=found):
            find_gguf(folder)


def test_factors_are_read_in_their_dtype(tmp_path: Path) -> None:
    """A vector of any float is read; a matrix is none."""
    values = np.array([1.0, 2.5, 8.0], np.float32)
    for dtype in (np.float32, np.float16):
        tensors = {"rope_freqs.weight": values.astype(dtype), "matrix": np.ones((2, 2), np.float32)}
        path = write(tmp_path / "m.gguf", tensors)
        file = GGUFFile(path, FileBytes(path, tmp_path))
        assert file.floats(file.rope_tensors["rope_freqs.weight"]) == values.tolist()
        with pytest.raises(CheckpointFormatError, match="a vector of at most 65536 floats"):
            file.floats(file.header.tensors[1])
        assert "rope_freqs.weight" not in file.entries
        assert torch.equal(file["matrix"].read(), torch.ones(2, 2))
        file.close()
