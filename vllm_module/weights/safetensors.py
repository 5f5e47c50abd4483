"""The safetensors format.

A file is 8 bytes of little-endian header length, the header (a JSON object that begins with ``{``)
and the data. The tensors fill the data without holes or overlaps; offsets count from its start.
Layout: https://huggingface.co/docs/safetensors (section Format).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeGuard

import torch

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import printable, shorten
from vllm_module.weights.file_bytes import FileBytes
from vllm_module.weights.handle import SafetensorsHandle
from vllm_module.weights.strict_json import parse_object

_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the same bound as the reference implementation
_DAMAGED = "The file is damaged or incomplete: download it again."

# The format bounds neither. torch's kernels take 64 dimensions, and names appear in messages.
_MAX_DIMS = 64
_MAX_NAME = 1024

_FIELDS = {"dtype", "shape", "data_offsets"}

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}

_SAMPLES = 16  # places of the data that a fingerprint covers
_SAMPLE_BYTES = 64  # at each of them
_HASHED_BYTES = 1 << 20  # of the header, at a time


class Entry(NamedTuple):
    """One tensor of the header; ``begin`` and ``end`` count bytes from the start of the file."""

    dtype: torch.dtype
    shape: torch.Size
    begin: int
    end: int


class Header(NamedTuple):
    """The tensors of a file by name, its free-form metadata, and where its data starts."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    start: int  # bytes from the start of the file


class SafetensorsFile(Mapping[str, SafetensorsHandle]):
    """The tensors of one safetensors file by name; opening it checks the whole header.

    ``folder`` is the checkpoint that the file belongs to: a link may not lead out of it. A header
    that breaks the format is a CheckpointFormatError.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path
        self._bytes = FileBytes(path, folder)
        try:
            header = read_header(path, self._bytes.size, self._bytes.read_bytes)
        except MemoryError as error:
            self._bytes.close()
            raise CheckpointFormatError(
                f"{printable(path)}: its header does not fit into memory. {_DAMAGED}"
            ) from error
        except BaseException:
            self._bytes.close()
            raise
        self._entries, self.metadata, self._start = header

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.end - entry.begin for entry in self._entries.values())

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read from the file so far."""
        return self._bytes.bytes_read

    def fingerprint(self) -> bytes:
        """Digest the file's name, size, header and samples of its data (SHA-256)."""
        size = self._bytes.size
        digest = hashlib.sha256(os.fsencode(self.path.name))
        digest.update(b"\0%d\0" % size)  # a name has no NUL, so it ends at the first one
        spans = [
            (begin, min(begin + _HASHED_BYTES, self._start))
            for begin in range(0, self._start, _HASHED_BYTES)
        ]
        last = size - _SAMPLE_BYTES  # where the last sample begins
        if last - self._start < _SAMPLES * _SAMPLE_BYTES:
            spans.append((self._start, size))
        else:
            places = [
                self._start + (last - self._start) * i // (_SAMPLES - 1) for i in range(_SAMPLES)
            ]
            spans += [(place, place + _SAMPLE_BYTES) for place in places]
        self._bytes.check_unchanged()
        for begin, end in spans:
            digest.update(self._bytes.read_bytes(begin, end - begin))
        return digest.digest()

    def close(self) -> None:
        """Close the file; its handles can no longer be read."""
        self._bytes.close()

    def __getitem__(self, name: str) -> SafetensorsHandle:
        entry = self._entries[name]
        strides = []
        stride = entry.dtype.itemsize
        for size in reversed(entry.shape):
            strides.append(stride)
            stride *= size
        return SafetensorsHandle(
            self._bytes, name, entry.dtype, entry.shape, tuple(reversed(strides)), entry.begin
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def read_header(path: Path, size: int, read: Callable[[int, int], bytes]) -> Header:
    """Parse and check the whole header of a file of ``size`` bytes.

    ``read(offset, length)`` returns bytes of the file. A header that breaks the format is a
    CheckpointFormatError.
    """
    where = printable(path)
    if size < _LENGTH_BYTES:
        raise CheckpointFormatError(
            f"{where}: {size} bytes, where a safetensors file has at least {_LENGTH_BYTES}. "
            f"{_DAMAGED}"
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
            f"{where}: its header should begin with '{{', and begins with {text[:1]!r}. {_DAMAGED}"
        )
    fields = parse_object(text, f"{where}: its header", _DAMAGED)
    metadata = _metadata(where, fields.pop("__metadata__", {}))
    entries = {name: _entry(where, name, value, start) for name, value in fields.items()}
    _check_cover(where, entries, start, size)
    return Header(entries, metadata, start)


def _metadata(where: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointFormatError(
            f"{where}: __metadata__ should map strings to strings, and is {shorten(value)}. "
            f"{_DAMAGED}"
        )
    return value


def _entry(where: str, name: str, value: object, start: int) -> Entry:
    def refuse(what: str, expected: str, got: object) -> NoReturn:
        raise CheckpointFormatError(
            f"{where}: tensor {shorten(name)}: {what} should be {expected}, and is "
            f"{shorten(got)}. {_DAMAGED}"
        )

    if len(name) > _MAX_NAME:
        refuse("its name", f"at most {_MAX_NAME} characters", len(name))
    if not isinstance(value, dict) or not value.keys() >= _FIELDS:
        refuse("its entry", "an object with dtype, shape and data_offsets", value)
    name_of_dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(name_of_dtype, str) or name_of_dtype not in DTYPES:
        refuse("dtype", f"one of {', '.join(DTYPES)}", name_of_dtype)
    if not _are_sizes(shape):
        refuse("shape", "a list of sizes", shape)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse("data_offsets", "[begin, end] with 0 <= begin <= end", offsets)
    dtype = DTYPES[name_of_dtype]
    # A size of 0 counts as 1, because torch multiplies the other sizes for the strides.
    if len(shape) > _MAX_DIMS or math.prod(n or 1 for n in shape) * dtype.itemsize >= 2**63:
        refuse("shape", f"at most {_MAX_DIMS} sizes, less than 2**63 bytes together", shape)
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        refuse("data_offsets", f"{nbytes} bytes apart ({name_of_dtype} of shape {shape})", offsets)
    return Entry(dtype, torch.Size(shape), start + offsets[0], start + offsets[1])


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    # type() and not isinstance(), because True is an int but not a size.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_cover(where: str, entries: dict[str, Entry], start: int, size: int) -> None:
    """Refuse tensors that overlap, leave a hole, or end before or after the file does."""
    expected, previous = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != expected:
            kind = "overlaps" if entry.begin < expected else "leaves a hole after"
            raise CheckpointFormatError(
                f"{where}: tensor {shorten(name)} {kind} {shorten(previous)}: it should begin at "
                f"byte {expected} of the file, and begins at {entry.begin}. {_DAMAGED}"
            )
        if entry.end > size:
            raise CheckpointFormatError(
                f"{where}: tensor {shorten(name)} should end at byte {entry.end}, and the file has "
                f"{size}: it was cut off. {_DAMAGED}"
            )
        expected, previous = entry.end, name
    if expected != size:
        raise CheckpointFormatError(
            f"{where}: should end with its last tensor at byte {expected}, and has {size} bytes. "
            f"{_DAMAGED}"
        )
