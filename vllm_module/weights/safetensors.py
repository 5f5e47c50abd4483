from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import NoReturn

import torch

from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.messages import printable, printable_name
from vllm_module.weights.casting import check_destination, copy_checked
from vllm_module.weights.file_bytes import FileBytes
from vllm_module.weights.header import DAMAGED, read_header
from vllm_module.weights.runs import Run

# Of the data, a fingerprint covers this many places of this many bytes.
_SAMPLES = 16
_SAMPLE = 64
_HASHED = 1 << 20  # bytes of a header that are hashed at a time


class SafetensorsHandle:
    """A tensor of a safetensors file, or a region of one, that is read when it is asked for.

    ``shape`` and ``dtype`` are those of the region; ``name`` is the whole tensor's.
    """

    __slots__ = ("_bytes", "_offset", "_strides", "dtype", "name", "shape")

    def __init__(
        self,
        file_bytes: FileBytes,
        name: str,
        dtype: torch.dtype,
        shape: torch.Size,
        strides: tuple[int, ...],
        offset: int,
    ) -> None:
        self._bytes = file_bytes
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self._strides = strides  # in bytes
        self._offset = offset  # of the region's first element in the file

    @property
    def file(self) -> Path:
        """The file that holds the tensor."""
        return self._bytes.path

    @property
    def nbytes(self) -> int:
        """Bytes of the region, which are the bytes that reading it keeps."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def byte_range(self) -> tuple[int, int]:
        """First byte of the file that the region touches, and the one after the last."""
        if self.nbytes == 0:
            return self._offset, self._offset
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self._strides, strict=True))
        return self._offset, self._offset + last + self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the region is one run of bytes on disk."""
        first, last = self.byte_range
        return last - first == self.nbytes

    def runs(self) -> Iterator[Run]:
        """Yield the region as runs of bytes, in the order of its elements; a matrix needs one."""
        if self.nbytes == 0:
            return
        length, count, stride = self.dtype.itemsize, 1, 0
        outer: list[tuple[int, int]] = []  # dimensions that fold into neither, inner ones first
        for size, step in zip(reversed(self.shape), reversed(self._strides), strict=True):
            if size == 1:
                continue
            if count == 1 and step == length:
                length *= size
            elif count == 1:
                count, stride = size, step
            elif not outer and step == stride * count:
                count *= size
            else:
                outer.append((size, step))
        for index in product(*(range(size) for size, _ in reversed(outer))):
            start = sum(i * step for i, (_, step) in zip(index, reversed(outer), strict=True))
            yield Run(self._offset + start, length, stride, count)

    def narrow(self, dim: int, start: int, length: int) -> SafetensorsHandle:
        """Keep ``length`` entries of ``dim`` from ``start`` on, as ``torch.narrow`` does.

        A dimension that is not there is an IndexError, a range that leaves it a ValueError.
        """
        if not -len(self.shape) <= dim < len(self.shape):
            raise IndexError(f"{self}: dim {dim} is not one of its {len(self.shape)} dimensions")
        dim %= len(self.shape)
        size = self.shape[dim]
        if start < 0:
            start += size
        if start < 0 or length < 0 or start + length > size:
            raise ValueError(
                f"{self}: [{start}, {start + length}) is not inside dim {dim} of size {size}"
            )
        shape = torch.Size((*self.shape[:dim], length, *self.shape[dim + 1 :]))
        offset = self._offset + start * self._strides[dim]
        return SafetensorsHandle(self._bytes, self.name, self.dtype, shape, self._strides, offset)

    def read_into(self, destination: torch.Tensor) -> None:
        """Read into ``destination``: the same shape; any strides, dtype and device.

        Memory of the same dtype without gaps is filled from the file directly; anything else
        goes through one host copy of the region. Raises as ``read_into`` of this package does; a
        byte that is no bool is a WeightReadError too.
        """
        check_destination(self.shape, destination, self)
        direct = destination.dtype == self.dtype != torch.bool and destination.is_cpu
        if direct and destination.is_contiguous():
            self._bytes.read_runs(self.runs(), destination.data_ptr())
            return
        staged = torch.empty(self.shape, dtype=self.dtype, pin_memory=destination.is_cuda)
        self._bytes.read_runs(self.runs(), staged.data_ptr())
        # What torch makes of a bool of another byte depends on the operation.
        if self.dtype == torch.bool and bool((staged.view(torch.uint8) > 1).any()):
            raise WeightReadError(
                f"{self} holds bytes other than 0 and 1, which are no bools; the file is damaged, "
                "or was written wrongly: download it again"
            )
        copy_checked(staged, destination, self)

    def read(self) -> torch.Tensor:
        """Read into a new tensor in host memory."""
        destination = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(destination)
        return destination

    def __repr__(self) -> str:
        name, file = printable_name(self.name), printable(self.file)
        return f"{name} ({self.dtype}, shape {list(self.shape)}, in {file})"

    def __getattr__(self, attribute: str) -> NoReturn:
        advice = "; call .read() first" if hasattr(torch.Tensor, attribute) else ""
        raise AttributeError(
            f"a weight that is not read yet has no attribute {attribute!r}{advice}"
        )


class SafetensorsFile(Mapping[str, SafetensorsHandle]):
    """The tensors of one safetensors file by name; its whole header is checked when it is opened.

    ``folder`` is the checkpoint it belongs to, outside of which no link may lead. A header that is
    not as the format says is a CheckpointFormatError.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path
        self._bytes = FileBytes(path, folder)
        try:
            header = read_header(path, self._bytes.size, self._bytes.read_bytes)
        except MemoryError as error:
            self._bytes.close()
            raise CheckpointFormatError(
                f"{printable(path)}: its header does not fit into memory. {DAMAGED}"
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
        digest.update(b"\0%d\0" % size)  # no name has a NUL: nothing runs into another
        spans = [(at, min(at + _HASHED, self._start)) for at in range(0, self._start, _HASHED)]
        last = size - _SAMPLE  # where the last sample begins
        if last - self._start < _SAMPLES * _SAMPLE:
            spans.append((self._start, size))
        else:
            places = [
                self._start + (last - self._start) * i // (_SAMPLES - 1) for i in range(_SAMPLES)
            ]
            spans += [(place, place + _SAMPLE) for place in places]
        self._bytes.check_unchanged()
        for begin, end in spans:
            digest.update(self._bytes.read_bytes(begin, end - begin))
        return digest.digest()

    def close(self) -> None:
        """Close the file; handles of it can no longer be read."""
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
