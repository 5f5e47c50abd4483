"""What a file's header says of a tensor: its dtype, shape and place; and limits for headers."""

from __future__ import annotations

from typing import NamedTuple

MAX_HEADER_BYTES = 100_000_000  # bound of the reference implementation
DAMAGED = "The file is damaged or incomplete: download it again."

# The format limits neither. torch's kernels take 64 dimensions, and names appear in messages.
MAX_DIMS = 64
MAX_NAME = 1024


class StoredDType(NamedTuple):
    """A dtype of safetensors: its name in torch, and the bytes of an element."""

    name: str
    itemsize: int


DTYPES = {
    "F64": StoredDType("float64", 8),
    "F32": StoredDType("float32", 4),
    "F16": StoredDType("float16", 2),
    "BF16": StoredDType("bfloat16", 2),
    "F8_E4M3": StoredDType("float8_e4m3fn", 1),
    "F8_E5M2": StoredDType("float8_e5m2", 1),
    "F8_E4M3FNUZ": StoredDType("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": StoredDType("float8_e5m2fnuz", 1),
    "F8_E8M0": StoredDType("float8_e8m0fnu", 1),
    "I64": StoredDType("int64", 8),
    "I32": StoredDType("int32", 4),
    "I16": StoredDType("int16", 2),
    "I8": StoredDType("int8", 1),
    "U64": StoredDType("uint64", 8),
    "U32": StoredDType("uint32", 4),
    "U16": StoredDType("uint16", 2),
    "U8": StoredDType("uint8", 1),
    "BOOL": StoredDType("bool", 1),
    "C64": StoredDType("complex64", 8),
}


class Entry(NamedTuple):
    """Place, dtype and shape of a tensor in a file; ``begin`` and ``end`` are byte offsets in it.

    ``strides`` are in bytes; ``None`` if the elements are contiguous.
    """

    dtype: StoredDType
    shape: tuple[int, ...]
    begin: int
    end: int
    strides: tuple[int, ...] | None = None
