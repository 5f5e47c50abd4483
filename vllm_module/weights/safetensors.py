from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import printable
from vllm_module.weights.file_bytes import FileBytes
from vllm_module.weights.header import DAMAGED, DType, read_header

if TYPE_CHECKING:
    import torch

    from vllm_module.weights.handle import SafetensorsHandle

_SAMPLES = 16  # places of the data that a fingerprint covers
_SAMPLE_BYTES = 64  # at each of them
_HASHED_BYTES = 1 << 20  # of the header, at a time


class SafetensorsFile(Mapping[str, "SafetensorsHandle"]):
    """The tensors of one safetensors file by name; opening it checks the whole header.

    ``entries`` has what the header says of each tensor, and ``metadata`` its free-form texts.
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
                f"{printable(path)}: its header does not fit into memory. {DAMAGED}"
            ) from error
        except BaseException:
            self._bytes.close()
            raise
        self.entries, self.metadata, self._start = header

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.end - entry.begin for entry in self.entries.values())

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
        # Imported here because headers are read without torch.
        from vllm_module.weights.handle import SafetensorsHandle

        dtype, shape, begin, _ = self.entries[name]
        return SafetensorsHandle(self._bytes, name, *_as_torch(dtype, shape), begin)

    def __contains__(self, name: object) -> bool:
        return name in self.entries  # a Mapping's own makes a handle

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


@lru_cache(maxsize=256)  # tensors of the same dtype and shape have all of it in common
def _as_torch(
    dtype: DType, shape: tuple[int, ...]
) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """Return the dtype and shape, as torch has them, and the strides in bytes."""
    import torch  # here because headers are read without it

    strides = accumulate(reversed(shape[1:]), mul, initial=dtype.itemsize) if shape else ()
    return getattr(torch, dtype.name), torch.Size(shape), tuple(strides)[::-1]
