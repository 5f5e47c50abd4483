"""The tensors of a safetensors file, and parsing its header, which needs no torch.

A file is 8 bytes of little-endian header length, the header (a JSON object that begins with ``{``)
and the data. The tensors fill the data without holes or overlaps; offsets count from its start.
Layout: https://huggingface.co/docs/safetensors (section Format).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeGuard

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.header import (
    DAMAGED,
    DTYPES,
    MAX_DIMS,
    MAX_HEADER_BYTES,
    MAX_NAME,
    Entry,
)
from vllm_module.weights.strict_json import parse_object
from vllm_module.weights.weight_file import WeightFile

_LENGTH_BYTES = 8
_KEPT_BYTES = 1 << 18  # of a header that is parsed once for several files
_FIELDS = {"dtype", "shape", "data_offsets"}
_UNSUPPORTED = {"F4", "F6_E2M3", "F6_E3M2"}  # dtypes below a byte; torch computes with none of them


class SafetensorsFile(WeightFile):
    """The tensors of one safetensors file; ``metadata`` has its free-form strings."""

    def _read_entries(self) -> None:
        header = read_header(self.path, self._bytes.size, self._bytes.read_bytes)
        self.entries, self.metadata, self._start = header

    def _described(self) -> list[tuple[int, int]]:
        return [(0, self._start)]


class Header(NamedTuple):
    """The tensors of a file by name, its free-form metadata, and where its data starts."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    start: int  # bytes from the start of the file


def read_header(path: Path, size: int, read: Callable[[int, int], bytes]) -> Header:
    """Parse and check the whole header of a file of ``size`` bytes.

    ``read(offset, length)`` returns bytes of the file. A header that breaks the format is a
    CheckpointFormatError.
    """
    where = printable(path)
    if size < _LENGTH_BYTES:
        raise CheckpointFormatError(
            f"{where}: {size} bytes, where a safetensors file has at least {_LENGTH_BYTES}. "
            f"{DAMAGED}"
        )
    first = read(0, _LENGTH_BYTES)
    if first == b"version ":
        raise CheckpointFormatError(
            f"{where} is a Git LFS pointer, not the file itself; run `git lfs pull`"
        )
    length = int.from_bytes(first, "little")
    start = _LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or start > size:
        raise CheckpointFormatError(
            f"{where}: its header should be {length} bytes, where the file has {size} and at most "
            f"{MAX_HEADER_BYTES} are accepted. Not a safetensors file, or a damaged one: "
            "download it again."
        )
    text = read(_LENGTH_BYTES, length)
    if not text.startswith(b"{"):
        raise CheckpointFormatError(
            f"{where}: its header should begin with '{{', and begins with {text[:1]!r}. {DAMAGED}"
        )
    if length > _KEPT_BYTES:
        return _parsed(text, size, start, where)
    try:
        entries, metadata, start = _kept(text, size, start)
    except CheckpointFormatError:
        return _parsed(text, size, start, where)  # raises, and says in which file
    return Header({**entries}, {**metadata}, start)


# Adapters that one program makes have the same header.
@lru_cache(maxsize=8)
def _kept(text: bytes, size: int, start: int) -> Header:
    return _parsed(text, size, start, "a file")


def _parsed(text: bytes, size: int, start: int, where: str) -> Header:
    fields = parse_object(text, f"{where}: its header", DAMAGED)
    metadata = fields.pop("__metadata__", None)
    if metadata is None:  # null is absence in safetensors, too
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(t, str) for t in metadata.values()):
        raise CheckpointFormatError(
            f"{where}: __metadata__ should map strings to strings, and is {shorten(metadata)}. "
            f"{DAMAGED}"
        )
    entries = {name: _entry(where, name, value, start) for name, value in fields.items()}
    _check_cover(where, entries, start, size)
    return Header(entries, metadata, start)


def _entry(where: str, name: str, value: object, start: int) -> Entry:
    def refuse(what: str, expected: str, got: object) -> NoReturn:
        raise CheckpointFormatError(
            f"{where}: tensor {shorten(name)}: {what} should be {expected}, and is "
            f"{shorten(got)}. {DAMAGED}"
        )

    if len(name) > MAX_NAME:
        refuse("its name", f"at most {MAX_NAME} characters", len(name))
    if not isinstance(value, dict) or not value.keys() >= _FIELDS:
        refuse("its entry", "an object with dtype, shape and data_offsets", value)
    name_of_dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if isinstance(name_of_dtype, str) and name_of_dtype in _UNSUPPORTED:
        raise CheckpointFormatError(
            f"{where}: tensor {shorten(name)} has the dtype {name_of_dtype}, which the format "
            f"has and vllm_module does not support: convert it to one of {', '.join(DTYPES)}"
        )
    if not isinstance(name_of_dtype, str) or name_of_dtype not in DTYPES:
        refuse("dtype", f"one of {', '.join(DTYPES)}", name_of_dtype)
    if not are_sizes(shape):
        refuse("shape", "a list of sizes", shape)
    if not are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse("data_offsets", "[begin, end] with 0 <= begin <= end", offsets)
    dtype = DTYPES[name_of_dtype]
    # Sizes of 0 are left out, because torch multiplies the other ones for the strides.
    nbytes = math.prod(filter(None, shape)) * dtype.itemsize
    if len(shape) > MAX_DIMS or nbytes >= 2**63:
        refuse("shape", f"at most {MAX_DIMS} sizes, less than 2**63 bytes together", shape)
    if 0 in shape:
        nbytes = 0
    if offsets[1] - offsets[0] != nbytes:
        refuse("data_offsets", f"{nbytes} bytes apart ({name_of_dtype} of shape {shape})", offsets)
    return Entry(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def are_sizes(value: object) -> TypeGuard[list[int]]:
    """Tell whether a value of a JSON object is a list of sizes."""
    # type() and not isinstance(), because True is an int but not a size.
    if not isinstance(value, list) or not value:
        return value == []
    return set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**63


def _check_cover(where: str, entries: dict[str, Entry], start: int, size: int) -> None:
    """Raise if tensors overlap, leave a hole, or end before or after the file does."""
    expected, previous = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != expected:
            kind = "overlaps" if entry.begin < expected else "leaves a hole after"
            raise CheckpointFormatError(
                f"{where}: tensor {shorten(name)} {kind} {shorten(previous)}: it should begin at "
                f"byte {expected} of the file, and begins at {entry.begin}. {DAMAGED}"
            )
        if entry.end > size:
            raise CheckpointFormatError(
                f"{where}: tensor {shorten(name)} should end at byte {entry.end}, and the file has "
                f"{size}: it was cut off. {DAMAGED}"
            )
        expected, previous = entry.end, name
    if expected != size:
        raise CheckpointFormatError(
            f"{where}: should end with its last tensor at byte {expected}, and has {size} bytes. "
            f"{DAMAGED}"
        )
