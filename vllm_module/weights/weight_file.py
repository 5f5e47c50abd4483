"""The base class of files of weights: tensors by name, a fingerprint, handles."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vllm_module.base.messages import printable
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.file_bytes import FileBytes
from vllm_module.weights.header import DAMAGED, Entry, StoredDType
from vllm_module.weights.readable import Readable

if TYPE_CHECKING:
    import torch

    from vllm_module.weights.handle import FileHandle

_SAMPLES = 16  # number of samples of the data in a fingerprint
_SAMPLE_BYTES = 64  # size of each sample
_HASHED_BYTES = 1 << 20  # bytes of the header hashed at a time


class WeightFile(Mapping[str, "FileHandle"]):
    """The tensors of one file by name; opening it checks the entries of all tensors.

    ``entries`` has the place, dtype and shape of each tensor. ``folder`` is the checkpoint that the
    file belongs to; a link may not lead out of it. ``file_bytes`` has the bytes of a file that is
    not on this machine. Raises CheckpointFormatError for a file that breaks its format.
    """

    entries: dict[str, Entry]

    def __init__(
        self, path: Path, folder: Path | None = None, *, file_bytes: Readable | None = None
    ) -> None:
        self.path = path
        self._bytes = FileBytes(path, folder) if file_bytes is None else file_bytes
        try:
            self._read_entries()
        except MemoryError as error:
            self._bytes.close()
            raise CheckpointFormatError(
                f"{printable(path)}: its header does not fit into memory. {DAMAGED}"
            ) from error
        except BaseException:
            self._bytes.close()
            raise

    @abstractmethod
    def _read_entries(self) -> None:
        """Read ``entries`` and check them."""

    @abstractmethod
    def _described(self) -> list[tuple[int, int]]:
        """Return the ranges of bytes (begin, end) that describe the tensors."""

    def _refuse(self, problem: str) -> NoReturn:
        """Raise ``CheckpointFormatError``, with the file's path."""
        raise CheckpointFormatError(f"{printable(self.path)}: {problem}")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.end - entry.begin for entry in self.entries.values())

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read from the file so far."""
        return self._bytes.bytes_read

    def fingerprint(self) -> bytes:
        """Return a SHA-256 of the file's name, size, header, and samples of its data."""
        size = self._bytes.size
        digest = hashlib.sha256(os.fsencode(self.path.name))
        digest.update(b"\0%d\0" % size)  # a name has no NUL, so this ends it
        spans = [
            (begin, min(begin + _HASHED_BYTES, end))
            for start, end in self._described()
            for begin in range(start, end, _HASHED_BYTES)
        ]
        start = min((entry.begin for entry in self.entries.values()), default=size)
        last = size - _SAMPLE_BYTES  # offset of the last sample
        if last - start < _SAMPLES * _SAMPLE_BYTES:
            spans.append((start, size))
        else:
            places = [start + (last - start) * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
            spans += [(place, place + _SAMPLE_BYTES) for place in places]
        self._bytes.check_unchanged()
        for begin, end in spans:
            digest.update(self._bytes.read_bytes(begin, end - begin))
        return digest.digest()

    def close(self) -> None:
        """Close the file; its handles can no longer be read."""
        self._bytes.close()

    def __getitem__(self, name: str) -> FileHandle:
        # Imported here because headers are read without torch.
        from vllm_module.weights.handle import FileHandle

        dtype, shape, begin, _, strides = self.entries[name]
        return FileHandle(self._bytes, name, *as_torch(dtype, shape, strides), begin)

    def __contains__(self, name: object) -> bool:
        return name in self.entries  # Mapping's own __contains__ makes a handle

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


@lru_cache(maxsize=256)  # tensors of equal dtype and shape share the result
def as_torch(
    dtype: StoredDType, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """Return the torch dtype, the torch shape, and the strides in bytes."""
    import torch  # here because headers are read without it

    if strides is None:
        steps = accumulate(reversed(shape[1:]), mul, initial=dtype.itemsize) if shape else ()
        strides = tuple(steps)[::-1]
    return getattr(torch, dtype.name), torch.Size(shape), strides
