"""Every integer of valid files, one less and one more, beside the library that wrote the file."""

from __future__ import annotations

import pickletools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights import open_checkpoint

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
Tensors = dict[str, tuple[object, ...]]


def of_torch(data: bytes) -> Iterator[bytes]:
    """Yield the file with one integer of its pickle changed, where it has as many bytes then."""
    start = data.index(b"\x80\x02")  # where its pickle begins, uncompressed
    for code, number, at in pickletools.genops(data[start:]):
        width = {"BININT1": 1, "BININT2": 2, "BININT": 4}.get(code.name)
        if width is None:
            continue
        begin = start + at + 1
        for near in (number - 1, number + 1):
            if 0 <= near < 1 << (8 * width):
                yield data[:begin] + near.to_bytes(width, "little") + data[begin + width :]


def of_safetensors(data: bytes) -> Iterator[bytes]:
    """Yield the file with one integer of its header changed, or the header's length."""
    length = int.from_bytes(data[:8], "little")
    header, values = data[8 : 8 + length], data[8 + length :]
    for near in (length - 1, length + 1):
        yield near.to_bytes(8, "little") + data[8:]
    for found in re.finditer(rb"(?<![\w\".])\d+(?![\w\".])", header):
        for near in (int(found[0]) - 1, int(found[0]) + 1):
            changed = header[: found.start()] + str(near).encode() + header[found.end() :]
            yield len(changed).to_bytes(8, "little") + changed + values


def ours(path: Path) -> Tensors | str:
    try:
        with open_checkpoint(path.parent) as checkpoint:
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
