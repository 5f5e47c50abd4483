"""Every integer of valid files, one less and one more, beside the library that wrote the file."""

from __future__ import annotations

import io
import json
import pickletools
import re
import runpy
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights import open_checkpoint
from vllm_module.weights.gguf.header import read_gguf_header

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
Tensors = dict[str, tuple[object, ...]]


def near(data: bytes, begin: int, width: int) -> Iterator[bytes]:
    """Yield the file with the integer of some bytes, unsigned, one less and one more."""
    number = int.from_bytes(data[begin : begin + width], "little")
    for each in (number - 1, number + 1):
        if 0 <= each < 1 << (8 * width):
            yield data[:begin] + each.to_bytes(width, "little") + data[begin + width :]


def of_pickle(data: bytes, start: int = 0) -> Iterator[bytes]:
    """Yield the file with one integer of its pickle changed, where it has as many bytes then."""
    for code, _, at in pickletools.genops(data[start:]):
        width = {"BININT1": 1, "BININT2": 2, "BININT": 4}.get(code.name)
        if width is None:
            continue
        yield from near(data, start + at + 1, width)


def of_torch(data: bytes) -> Iterator[bytes]:
    """Yield the file with one integer of its pickle changed, which is uncompressed."""
    return of_pickle(data, data.index(b"\x80\x02"))


def of_safetensors(data: bytes) -> Iterator[bytes]:
    """Yield the file with one integer of its header changed, or the header's length."""
    length = int.from_bytes(data[:8], "little")
    header, values = data[8 : 8 + length], data[8 + length :]
    yield from near(data, 0, 8)
    for found in re.finditer(rb"(?<![\w\".])\d+(?![\w\".])", header):
        for each in (int(found[0]) - 1, int(found[0]) + 1):
            changed = header[: found.start()] + str(each).encode() + header[found.end() :]
            yield len(changed).to_bytes(8, "little") + changed + values


def ours(path: Path, load_format: str = "auto") -> Tensors | str:
    try:
        with open_checkpoint(path.parent, load_format) as checkpoint:
            return values({name: handle.read() for name, handle in checkpoint.items()})
    except (CheckpointFormatError, WeightReadError) as error:
        return str(error)


def by_torch(path: Path) -> Tensors | None:
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        return values(stored)
    except Exception:
        return None


def by_safetensors(path: Path) -> Tensors | None:
    try:
        return values(load_file(path))
    except Exception:
        return None


def values(tensors: dict[str, torch.Tensor]) -> Tensors:
    return {
        name: (each.dtype, each.shape, each.flatten().tolist()) for name, each in tensors.items()
    }


# What torch.load reads and we do not: no optimizer or copy writes such tensors.
STRICTER = r"its elements share memory|storage '\w+' has \d+ elements of .*, and \d+ of "
KINDS = {
    "torch": ("pytorch_model.bin", of_torch, by_torch, r"strided|two-tensors|shared-storage|bools"),
    "file": (
        "model.safetensors",
        of_safetensors,
        by_safetensors,
        r"matrix|scalar|two-dtypes|float8",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_nearest_wrong_integer_is_judged_as_the_library_does(kind: str, tmp_path: Path) -> None:
    """A valid file with an integer one less or more is refused, or read, as by the library."""
    name, variants, by_library, valid = KINDS[kind]
    tried = 0
    for whole in sorted((CORPUS / kind).iterdir()):
        path = tmp_path / name
        path.write_bytes(whole.read_bytes())
        if isinstance(ours(path), str) or by_library(path) is None:
            assert not re.match(valid, whole.name), f"{whole} is valid"
            continue
        for data in variants(whole.read_bytes()):
            path.write_bytes(data)
            got, expected = ours(path), by_library(path)
            if isinstance(got, str):
                assert expected is None or re.search(STRICTER, got), (whole.name, got)
            else:
                assert got == expected, whole.name
            tried += 1
    assert tried > 50


ARRAYS = {
    "matrix": np.arange(6, dtype="<f4").reshape(2, 3),
    "turned": np.asfortranarray(np.arange(6, dtype="<f2").reshape(3, 2)),
    "scalar": np.array(7, dtype="<i8"),
    "bytes": np.arange(5, dtype="u1"),
}
# What numpy.load reads and we do not: a file with bytes after the values.
STRICTER_NPY = r"\(\w+ of shape \[.*\]\), and \d+ do"
# What torch's reader loads and we do not: chunks beside the tensor, holes, and parts read twice.
STRICTER_DCP = r"a chunk of .* of its shape|the chunks of .* cover each of \d+ once"


def of_npy(data: bytes) -> Iterator[bytes]:
    """Yield the file with one integer changed: of its version, its header's length and header."""
    for begin, width in ((6, 1), (7, 1), (8, 2)):
        yield from near(data, begin, width)
    length = int.from_bytes(data[8:10], "little")
    for found in re.finditer(rb"\d+", data[10 : 10 + length]):
        for each in (int(found[0]) - 1, int(found[0]) + 1):
            yield data[: 10 + found.start()] + str(each).encode() + data[10 + found.end() :]
            # The header is as long as before: a space is there for each digit.
            text = str(each).encode().ljust(len(found[0]))
            yield data[: 10 + found.start()] + text + data[10 + found.end() :]


@pytest.mark.parametrize("name", ARRAYS)
def test_npcache(name: str, tmp_path: Path) -> None:
    """A file of numpy.save with an integer one less or more is what numpy.load says, or refused."""
    (tmp_path / "np").mkdir()
    (tmp_path / "np" / "weight_names.json").write_text(json.dumps([name]))
    path, written = tmp_path / "np" / name, io.BytesIO()
    np.save(written, ARRAYS[name])
    verdicts = []
    for data in (written.getvalue(), *of_npy(written.getvalue())):
        path.write_bytes(data)
        got = ours(tmp_path / "any", "npcache")
        try:
            array = np.load(path, allow_pickle=False)
        except Exception:  # the library has no error of its own for what it refuses
            array = None
        verdicts.append((isinstance(got, str), array is None))
        if verdicts[-1] == (True, False):
            assert re.search(STRICTER_NPY, str(got)), got
        if isinstance(got, str):
            continue
        assert array is not None, got
        ((dtype, shape, numbers),) = got.values()
        assert (str(dtype).removeprefix("torch."), tuple(shape)) == (array.dtype.name, array.shape)
        assert numbers == array.flatten().tolist()
    assert verdicts[0] == (False, False)
    assert len(verdicts) > 8


def gguf_file() -> tuple[bytes, list[tuple[int, int]]]:
    """Return a file, written by the format's description, and where its integers are."""
    out, places = bytearray(b"GGUF"), []

    def put(layout: str, *numbers: int) -> None:
        for code, number in zip(layout, numbers, strict=True):
            places.append((len(out), struct.calcsize("<" + code)))
            out.extend(struct.pack("<" + code, number))

    def text(value: str) -> None:
        put("Q", len(value))
        out.extend(value.encode())

    values: dict[str, tuple[int, str, int]] = {
        "general.alignment": (4, "I", 32), "a.small": (0, "B", 3), "a.signed": (5, "i", 7),
        "a.wide": (10, "Q", 9), "a.flag": (7, "B", 1),
    }  # fmt: skip
    tensors = {"one": ((3, 4), 0, 48), "two": ((5,), 1, 10), "three": ((32, 2), 8, 68)}
    put("IQQ", 3, len(tensors), len(values) + 3)
    text("general.architecture")
    put("I", 8)
    text("other")
    for key, (kind, code, number) in values.items():
        text(key)
        put("I" + code, kind, number)
    text("a.list")
    put("IIQiii", 9, 5, 3, 1, 2, 3)
    text("a.names")
    put("IIQ", 9, 8, 2)
    text("x")
    text("yz")
    begin, data = 0, b""
    for name, (sizes, kind, nbytes) in tensors.items():
        text(name)
        put("I" + "Q" * len(sizes) + "IQ", len(sizes), *sizes, kind, begin)
        data += bytes((7 * at) % 61 for at in range(nbytes)) + bytes(-nbytes % 32)
        begin = len(data)
    return bytes(out) + bytes(-len(out) % 32) + data, places


def gguf_of_library(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the metadata and the tensors that gguf-py reads, if it does."""
    try:
        reader = gguf.GGUFReader(path)
        keys = {k: v.contents() for k, v in reader.fields.items() if not k.startswith("GGUF.")}
        return keys, {
            each.name: (each.tensor_type.name, each.shape.tolist()[::-1], each.data.tobytes())
            for each in reader.tensors
        }
    except Exception:  # the library has no error of its own for what it refuses
        return None


def gguf_of_ours(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | str:
    data = path.read_bytes()
    try:
        header = read_gguf_header(path, len(data), lambda begin, size: data[begin : begin + size])
    except CheckpointFormatError as error:
        return str(error)
    return header.metadata, {
        each.name: (each.kind, [*each.shape], data[each.begin : each.end])
        for each in header.tensors
    }


def test_gguf(tmp_path: Path) -> None:
    """A file with an integer one less or more has what gguf-py reads, or is refused."""
    whole, places = gguf_file()
    path = tmp_path / "model.gguf"
    read = 0
    for data in (whole, *(each for place in places for each in near(whole, *place))):
        path.write_bytes(data)
        got = gguf_of_ours(path)
        if not isinstance(got, str):  # else gguf-py may read an array of 2**40 elements
            assert got == gguf_of_library(path)
            read += 1
        elif data is whole:
            raise AssertionError(got)
    assert read > 10


def dcp_of_library(folder: Path) -> Tensors | None:
    """Return what torch's own reader loads of a folder, if it does."""
    try:
        state: dict[str, Any] = {}
        dcp.state_dict_loader._load_state_dict(
            state,
            storage_reader=dcp.FileSystemReader(folder),
            planner=dcp.default_planner._EmptyStateDictLoadPlanner(),
            no_dist=True,
        )
        return values(state)
    except BaseException:  # CheckpointException is none of Exception
        return None


def test_dcp(tmp_path: Path) -> None:
    """A folder whose metadata have an integer one less or more is what torch loads, or refused."""
    folders = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("dcp_folders.py"))))
    state = {"w": (torch.arange(12.0).view(4, 3), ((2,), ())), "n": (torch.arange(3), ((),))}
    folders.write(tmp_path, state, ())
    path = tmp_path / ".metadata"
    whole, verdicts = path.read_bytes(), []
    for data in (whole, *of_pickle(whole)):
        path.write_bytes(data)
        got, expected = ours(path, "dcp"), dcp_of_library(tmp_path)
        verdicts.append((isinstance(got, str), expected is None))
        if verdicts[-1] == (True, False):
            assert re.search(STRICTER_DCP, str(got)), got
        if not isinstance(got, str):
            assert got == expected
    assert verdicts[0] == (False, False)
    assert len(verdicts) > 20
