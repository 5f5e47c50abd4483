"""The header of a safetensors file.

8 bytes of little-endian header length, the header (a JSON object that begins with ``{``), then
the data, which the tensors fill without holes or overlaps; offsets count from the start of the
data. Layout: https://huggingface.co/docs/safetensors (section Format).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeGuard

import torch

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import printable, shorten
from vllm_module.weights.strict_json import parse_object

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the same bound as the reference implementation
DAMAGED = "The file is damaged or incomplete: download it again."

# Neither has an end in the format, but in torch (whose kernels take 64 dimensions) and in messages.
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


class Entry(NamedTuple):
    """One tensor of the header; ``begin`` and ``end`` are bytes from the start of the file."""

    dtype: torch.dtype
    shape: torch.Size
    begin: int
    end: int


class Header(NamedTuple):
    """All that a file says of itself: its tensors by name, its free-form metadata, its data."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    start: int  # of the data: bytes from the start of the file


def read_header(path: Path, size: int, read: Callable[[int, int], bytes]) -> Header:
    """Parse and check the whole header of a file of ``size`` bytes.

    ``read(offset, length)`` gives bytes of the file. Anything that is not as the format says is
    a CheckpointFormatError.
    """
    where = printable(path)
    if size < LENGTH_BYTES:
        raise CheckpointFormatError(
            f"{where}: {size} bytes, where a safetensors file has at least {LENGTH_BYTES}. "
            f"{DAMAGED}"
        )
    first = read(0, LENGTH_BYTES)
    if first == b"version ":
        raise CheckpointFormatError(
            f"{where} is a Git LFS pointer, not the file itself; run `git lfs pull`"
        )
    length = int.from_bytes(first, "little")
    start = LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or start > size:
        raise CheckpointFormatError(
            f"{where}: its header should be {length} bytes, where the file has {size} and at most "
            f"{MAX_HEADER_BYTES} are accepted. Not a safetensors file, or a damaged one: "
            "download it again."
        )
    text = read(LENGTH_BYTES, length)
    if not text.startswith(b"{"):
        raise CheckpointFormatError(
            f"{where}: its header should begin with '{{', and begins with {text[:1]!r}. {DAMAGED}"
        )
    fields = parse_object(text, f"{where}: its header", DAMAGED)
    metadata = _metadata(where, fields.pop("__metadata__", {}))
    entries = {name: _entry(where, name, value, start) for name, value in fields.items()}
    _check_cover(where, entries, start, size)
    return Header(entries, metadata, start)


def _metadata(where: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointFormatError(
            f"{where}: __metadata__ should map strings to strings, and is {shorten(value)}. "
            f"{DAMAGED}"
        )
    return value


def _entry(where: str, name: str, value: object, start: int) -> Entry:
    def refuse(what: str, expected: str, came: object) -> NoReturn:
        raise CheckpointFormatError(
            f"{where}: tensor {shorten(name)}: {what} should be {expected}, and is "
            f"{shorten(came)}. {DAMAGED}"
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
    # torch multiplies all sizes for the strides, also where one of them is 0.
    if len(shape) > _MAX_DIMS or math.prod(n or 1 for n in shape) * dtype.itemsize >= 2**63:
        refuse("shape", f"at most {_MAX_DIMS} sizes, less than 2**63 bytes together", shape)
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        refuse("data_offsets", f"{nbytes} bytes apart ({name_of_dtype} of shape {shape})", offsets)
    return Entry(dtype, torch.Size(shape), start + offsets[0], start + offsets[1])


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    # type() and not isinstance(): True is an int, and no size
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_cover(where: str, entries: dict[str, Entry], start: int, size: int) -> None:
    """Refuse tensors that, in the order of their bytes, do not follow each other to the end."""
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
