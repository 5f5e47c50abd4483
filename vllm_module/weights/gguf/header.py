"""Parsing the header of a GGUF file, which needs no torch.

A file is ``GGUF``, a version, two counts, the metadata (keys with typed values), an entry for
each tensor, and the data. Tensors begin at multiples of ``general.alignment``, one after another;
offsets count from the first of these multiples after the header.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.kernels.matmul.gguf_types import BLOCK_TYPES, TYPE_NAMES
from vllm_module.weights.header import DAMAGED, MAX_HEADER_BYTES, MAX_NAME

FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # the types whose values are stored one by one

_VERSIONS = (2, 3)
_MOST_DIMS = 4  # GGML_MAX_DIMS
_MOST_ALIGNMENT = 1 << 20
# Limit on tensors, on keys, and on elements of an array: one byte of the file may take tens of
# bytes in memory.
_MOST = 1 << 22
_READ = 1 << 20  # bytes read at a time: the header's length is known only at its end
_STRING, _ARRAY, _BOOL, _UINT32 = 8, 9, 7, 4
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip


class GGUFTensor(NamedTuple):
    """One tensor of a file: its shape in torch's order, its type, and its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    begin: int
    end: int


class GGUFHeader(NamedTuple):
    """The metadata of a file, its tensors, and where its data begins."""

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]
    start: int  # bytes from the start of the file


def read_gguf_header(path: Path, size: int, read: Callable[[int, int], bytes]) -> GGUFHeader:
    """Parse and check the whole header of a file of ``size`` bytes.

    ``read(offset, length)`` returns bytes of the file. A header that breaks the format, or has
    tensors of a type that is not supported, is a CheckpointFormatError.
    """
    where = printable(path)
    first = read(0, min(8, size))
    if first == b"version ":
        raise CheckpointFormatError(
            f"{where} is a Git LFS pointer, not the file itself; run `git lfs pull`"
        )
    if first[:4] != b"GGUF":
        raise CheckpointFormatError(
            f"{where} should begin with 'GGUF', and begins with {first[:4]!r}: it is no GGUF file, "
            "or a damaged one; download it again"
        )
    header = _Cursor(where, size, read)
    header.at = 4
    version, tensors, pairs = header.numbers("IQQ")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        got = "a big-endian file" if swapped else f"version {version}"
        raise CheckpointFormatError(
            f"{where}: expected version 2 or 3 of the format, little-endian, got {got}; convert "
            "the model again"
        )
    header.expect_count(tensors, "tensors")
    header.expect_count(pairs, "keys")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = header.text("a key of the metadata")
        if key in metadata:
            header.refuse(f"the metadata has {shorten(key)} twice")
        (kind,) = header.numbers("I")
        if key == "general.alignment" and kind != _UINT32:
            header.refuse(f"general.alignment should be a uint32 (type 4), and is of type {kind}")
        metadata[key] = header.value(kind, key)
    alignment = metadata.get("general.alignment", 32)
    if (
        type(alignment) is not int
        or not 0 < alignment <= _MOST_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        header.refuse(
            f"general.alignment should be a power of two of at most {_MOST_ALIGNMENT}, and is "
            f"{shorten(alignment)}"
        )
    found = [_tensor(header) for _ in range(tensors)]
    start = _aligned(header.at, alignment)
    return GGUFHeader(metadata, _placed(header, found, start, alignment), start)


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _tensor(header: _Cursor) -> GGUFTensor:
    """Parse the next tensor's entry; ``begin`` is its offset in the data."""
    name = header.text("the name of a tensor")

    def refuse(what: str, expected: str, got: object) -> NoReturn:
        header.refuse(f"tensor {shorten(name)}: {what} should be {expected}, and is {shorten(got)}")

    if not name or len(name) > MAX_NAME:
        refuse("its name", f"1 to {MAX_NAME} characters", name)
    (dims,) = header.numbers("I")
    if not 1 <= dims <= _MOST_DIMS:
        refuse("its number of dimensions", f"1 to {_MOST_DIMS}", dims)
    *sizes, number, offset = header.numbers(f"{dims}QIQ")
    shape = tuple(reversed(sizes))
    kind = TYPE_NAMES.get(number)
    if kind is None:
        refuse("its type", "a number that ggml has", number)
    if kind not in FLOAT_BYTES and kind not in BLOCK_TYPES:
        raise CheckpointFormatError(
            f"{header.where}: tensor {shorten(name)} is of type {kind}, which is not supported: "
            f"expected one of {', '.join((*FLOAT_BYTES, *BLOCK_TYPES))}; quantize the model to one "
            "of them, such as Q4_K_M"
        )
    if min(shape) < 1 or math.prod(shape) >= 2**56:
        refuse("its shape", "sizes of 1 and more, with less than 2**56 values", list(shape))
    values, nbytes = BLOCK_TYPES.get(kind) or (1, FLOAT_BYTES[kind])
    if shape[-1] % values:
        refuse("its rows", f"whole blocks of {values} values ({kind})", shape[-1])
    length = math.prod(shape) // values * nbytes
    return GGUFTensor(name, shape, kind, offset, offset + length)


def _placed(
    header: _Cursor, tensors: list[GGUFTensor], start: int, alignment: int
) -> tuple[GGUFTensor, ...]:
    """Check that the tensors fill the data; return them with their offsets in the file."""
    placed: dict[str, GGUFTensor] = {}
    expected, previous = 0, "the header"
    for each in sorted(tensors, key=lambda tensor: tensor.begin):
        name = shorten(each.name)
        if each.name in placed:
            header.refuse(f"it has two tensors {name}")
        if each.begin != expected:
            kind = "overlaps" if each.begin < expected else "leaves a hole after"
            header.refuse(
                f"tensor {name} {kind} {previous}: it should begin at byte {expected} of the data, "
                f"and begins at {each.begin}"
            )
        if start + each.end > header.size:
            header.refuse(
                f"tensor {name} should end at byte {start + each.end}, and the file has "
                f"{header.size}: it was cut off"
            )
        begin, end = start + each.begin, start + each.end
        placed[each.name] = each._replace(begin=begin, end=end)
        expected, previous = _aligned(each.end, alignment), name
    if tensors and header.size > start + expected:
        header.refuse(
            f"it should end with its last tensor at byte {start + expected}, and has {header.size} "
            "bytes"
        )
    return tuple(placed.values())


class _Cursor:
    """A position in a header, whose bytes are read when they are needed."""

    def __init__(self, where: str, size: int, read: Callable[[int, int], bytes]) -> None:
        self.where, self.size, self.at = where, size, 0
        self._read, self._bytes = read, bytearray()

    def refuse(self, problem: str) -> NoReturn:
        raise CheckpointFormatError(f"{self.where}: {problem}. {DAMAGED}")

    def expect_count(self, count: int, what: str) -> None:
        """Raise if ``count`` is more than any real file has."""
        if count > _MOST:
            self.refuse(f"it should have {count} {what}, where at most {_MOST} are accepted")

    def _take(self, length: int) -> int:
        """Return the position of the next ``length`` bytes, and advance past them."""
        begin, end = self.at, self.at + length
        if end > len(self._bytes):
            if end > min(self.size, MAX_HEADER_BYTES):
                self.refuse(
                    f"its header should have {length} bytes from byte {begin} on, where the file "
                    f"has {self.size} and a header of at most {MAX_HEADER_BYTES} is accepted"
                )
            more = max(end - len(self._bytes), min(_READ, self.size - len(self._bytes)))
            self._bytes += self._read(len(self._bytes), more)
        self.at = end
        return begin

    def numbers(self, layout: str) -> tuple[Any, ...]:
        """Read the next little-endian numbers; ``layout`` has their codes in the module struct."""
        layout = f"<{layout}"
        return struct.unpack_from(layout, self._bytes, self._take(struct.calcsize(layout)))

    def text(self, what: str) -> str:
        """Read the next string."""
        (length,) = self.numbers("Q")
        begin = self._take(length)
        try:
            return self._bytes[begin : self.at].decode()
        except UnicodeDecodeError:
            self.refuse(f"{what}, at byte {begin}, is not UTF-8")

    def value(self, kind: int, key: str) -> Any:
        """Read the next value of the metadata: a number, a bool, a string or a list of these."""
        if kind == _STRING:
            return self.text(f"the value of {shorten(key)}")
        if kind in _NUMBERS:
            return self._checked(self.numbers(_NUMBERS[kind]), kind, key)[0]
        if kind != _ARRAY:
            self.refuse(f"{shorten(key)} of the metadata is of type {kind}, which no version has")
        inner, count = self.numbers("IQ")
        self.expect_count(count, f"elements in {shorten(key)}")
        if inner == _STRING:
            what = f"a string of {shorten(key)}"
            return [self.text(what) for _ in range(count)]
        if inner not in _NUMBERS:
            self.refuse(
                f"{shorten(key)} of the metadata should be an array of numbers or strings, and is "
                f"one of type {inner}"
            )
        return self._checked(self.numbers(f"{count}{_NUMBERS[inner]}"), inner, key)

    def _checked(self, numbers: tuple[Any, ...], kind: int, key: str) -> list[Any]:
        if kind != _BOOL:
            return list(numbers)
        if not {*numbers} <= {0, 1}:
            self.refuse(f"{shorten(key)} of the metadata has a bool that is neither 0 nor 1")
        return list(map(bool, numbers))
