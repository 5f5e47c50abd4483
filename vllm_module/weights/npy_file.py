"""Reading and writing one tensor in the format of ``numpy.save``.

Layout: numpy/lib/format.py. After a signature and the header's length comes the header, a Python
dict as text, and then the elements. Numpy writes the dict in one fixed form, so the text is matched
by a pattern and never evaluated.
"""

from __future__ import annotations

import math
import re
from itertools import accumulate
from operator import mul
from typing import BinaryIO

import torch

from vllm_module.base.messages import shorten
from vllm_module.weights.header import DAMAGED, DTYPES, MAX_DIMS, Entry, StoredDType
from vllm_module.weights.weight_file import WeightFile

_SIGNATURE = b"\x93NUMPY"
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}  # bytes of the header's length, by version
_MOST_HEADER = 10_000  # bytes of the longest header accepted, as in numpy
_ALIGNMENT = 64  # alignment of the first element, in bytes
_DESCR = {
    "<f8": "F64", "<f4": "F32", "<f2": "F16", "<c8": "C64", "|b1": "BOOL",
    "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8",
    "<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8",
}  # fmt: skip
_OF_DTYPE = {getattr(torch, DTYPES[name].name): descr for descr, name in _DESCR.items()}
_HEADER = re.compile(
    r"\{'descr': (?P<descr>'[^']{1,40}'|\[.*\]), 'fortran_order': (?P<fortran>True|False), "
    r"'shape': \((?P<shape>|[0-9]{1,19},|[0-9]{1,19}(?:, [0-9]{1,19})+)\),? ?\} *\n?",
    re.ASCII,
)


class NpyFile(WeightFile):
    """The tensor of one file, under the file's name."""

    def _read_entries(self) -> None:
        size = self._bytes.size
        first = self._bytes.read_bytes(0, min(12, size))
        if first[:6] != _SIGNATURE or len(first) < 10:
            self._refuse(f"it does not begin as a file of numpy.save does. {DAMAGED}")
        width = _LENGTH_BYTES.get(first[6])
        if width is None or first[7]:
            self._refuse(f"its version is {first[6]}.{first[7]}: expected 1.0, 2.0 or 3.0")
        length = int.from_bytes(first[8 : 8 + width], "little")
        self._start = 8 + width + length
        if length > _MOST_HEADER or self._start > size:
            self._refuse(
                f"its header should be {length} bytes, where the file has {size} and at most "
                f"{_MOST_HEADER} are accepted. {DAMAGED}"
            )
        text = self._bytes.read_bytes(8 + width, length).decode("utf-8", "replace")
        header = _HEADER.fullmatch(text)
        if header is None:
            self._refuse(f"its header is not as numpy.save writes one: {shorten(text)}. {DAMAGED}")
        dtype = self._dtype(header["descr"])
        shape = tuple(int(number) for number in re.findall(r"[0-9]+", header["shape"]))
        # Sizes of 0 are left out, because torch multiplies the other ones for the strides.
        most = math.prod(filter(None, shape)) * dtype.itemsize
        if len(shape) > MAX_DIMS or most >= 2**63 or max(shape, default=0) >= 2**63:
            self._refuse(f"its shape is {shorten(shape)}: expected less than 2**63 bytes")
        nbytes = 0 if 0 in shape else most
        if size - self._start != nbytes:
            self._refuse(
                f"{nbytes} bytes should follow its header ({dtype.name} of shape {list(shape)}), "
                f"and {size - self._start} do. {DAMAGED}"
            )
        strides = None
        if header["fortran"] == "True" and nbytes:  # the bytes are those of the transposed array
            strides = tuple(accumulate(shape[:-1], mul, initial=dtype.itemsize)) if shape else None
        self.entries = {self.path.name: Entry(dtype, shape, self._start, size, strides)}

    def _dtype(self, descr: str) -> StoredDType:
        descr = descr.strip("'")
        if descr not in _DESCR:
            self._refuse(
                f"its elements are {shorten(descr)}: expected one of {', '.join(_DESCR)}. Python "
                "objects and records are not read, and numpy has no bfloat16 or float8"
            )
        return DTYPES[_DESCR[descr]]

    def _described(self) -> list[tuple[int, int]]:
        return [(0, self._start)]


def has_type(dtype: torch.dtype) -> bool:
    """Return whether numpy has a type for elements of ``dtype``."""
    return dtype in _OF_DTYPE


def write_npy(file: BinaryIO, tensor: torch.Tensor) -> None:
    """Write a tensor in host memory in the format of ``numpy.save``, in row-major order."""
    shape = ", ".join(map(str, tensor.shape)) + ("," if tensor.dim() == 1 else "")
    header = (
        f"{{'descr': '{_OF_DTYPE[tensor.dtype]}', 'fortran_order': False, 'shape': ({shape}), }}"
    )
    before = len(_SIGNATURE) + 4  # bytes of signature, version and length
    padding = -(before + len(header) + 1) % _ALIGNMENT
    text = f"{header}{' ' * padding}\n".encode()
    file.write(_SIGNATURE + b"\1\0" + len(text).to_bytes(2, "little") + text)
    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
