"""Reading folders of torch.distributed.checkpoint, which trainers write, by slice.

A tensor is stored in chunks, cut as the trainer's ranks held it. A chunk is one ``torch.save``
archive inside a file of many, or the whole file is safetensors
(``SerializationFormat.SAFETENSORS``). Layout: torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from vllm_module.base.messages import printable, printable_name, shorten
from vllm_module.errors import WeightReadError
from vllm_module.weights.checkpoint import Checkpoint
from vllm_module.weights.chunked_handle import ChunkedHandle, TensorChunk
from vllm_module.weights.file_bytes import FileBytes
from vllm_module.weights.folder_files import FolderFiles
from vllm_module.weights.handle import FileHandle
from vllm_module.weights.header import DAMAGED, MAX_HEADER_BYTES, Entry, StoredDType
from vllm_module.weights.pickled.dcp_metadata import ChunkedTensor, StoredChunk, read_metadata
from vllm_module.weights.pickled.saved_tensors import SavedTensor
from vllm_module.weights.pickled.torch_file import unpickled
from vllm_module.weights.regular_file import is_there
from vllm_module.weights.safetensors import read_header
from vllm_module.weights.weight_file import WeightFile, as_torch

METADATA = ".metadata"
Refuse = Callable[[str], NoReturn]


def open_dcp(files: FolderFiles) -> Checkpoint:
    """Open the weights in a folder of torch.distributed.checkpoint, without the optimizer's state.

    Raises ``CheckpointFormatError`` if ``.metadata`` is damaged, names anything but the known
    records, or does not fit the files.
    """
    return Checkpoint((_Chunked(files.path / METADATA, files.path),), "dcp")


class _Chunked(WeightFile):
    """The tensors that ``.metadata`` describes."""

    def _read_entries(self) -> None:
        size = self._bytes.size
        if size > MAX_HEADER_BYTES:
            self._refuse(f"it has {size} bytes: expected at most {MAX_HEADER_BYTES}")
        self._tensors = read_metadata(self._bytes.read_bytes(0, size), self._refuse)
        self._files: dict[str, FileBytes] = {}
        self._headers: dict[str, dict[str, Entry]] = {}  # headers of the files that are safetensors
        self._parts: dict[tuple[str, StoredChunk], FileHandle] = {}
        self.entries = {}
        try:
            for name, tensor in self._tensors.items():
                for chunk in tensor.chunks:
                    self._check(name, chunk)
                nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
                self.entries[name] = Entry(tensor.dtype, tensor.shape, 0, nbytes)
        except BaseException:
            self.close()
            raise

    def _check(self, name: str, chunk: StoredChunk) -> None:
        """Open the file of a chunk; raise if the file ends before the chunk does."""
        if chunk.file not in self._files:
            if os.path.basename(chunk.file) != chunk.file or chunk.file in ("", ".", ".."):
                self._refuse(
                    f"tensor {shorten(name)} should be in a file of the same folder, and is in "
                    f"{shorten(chunk.file)}; do not load it unless you trust its author"
                )
            path = self.path.parent / chunk.file
            if not is_there(path, follow_links=True):
                self._refuse(
                    f"it names {printable_name(chunk.file)}, which is not there. {DAMAGED}"
                )
            self._files[chunk.file] = FileBytes(path, self.path.parent)
        size = self._files[chunk.file].size
        if chunk.begin + chunk.length > size:
            self._refuse(
                f"tensor {shorten(name)} should end at byte {chunk.begin + chunk.length} of "
                f"{printable_name(chunk.file)}, which has {size}. {DAMAGED}"
            )

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files.values())

    def fingerprint(self) -> bytes:
        """Return a SHA-256 of ``.metadata`` and of the names and sizes of the files."""
        digest = hashlib.sha256(self._bytes.read_bytes(0, self._bytes.size))
        for name, file in sorted(self._files.items()):
            digest.update(b"%s\0%d\0" % (os.fsencode(name), file.size))
        return digest.digest()

    def close(self) -> None:
        super().close()
        for file in self._files.values():
            file.close()

    def __getitem__(self, name: str) -> Any:
        tensor = self._tensors[name]
        dtype: torch.dtype = getattr(torch, tensor.dtype.name)
        chunks = [
            TensorChunk(
                tuple(each.offsets), tuple(each.shape), partial(self.part, name, tensor, each)
            )
            for each in tensor.chunks
        ]
        return ChunkedHandle(name, dtype, torch.Size(tensor.shape), chunks, self.path.parent)

    def part(self, name: str, tensor: ChunkedTensor, chunk: StoredChunk) -> FileHandle:
        """Check the saved tensor of a chunk, and return a handle of it."""
        if (name, chunk) not in self._parts:
            self._parts[name, chunk] = self._part(name, tensor, chunk)
        return self._parts[name, chunk]

    def _part(self, name: str, tensor: ChunkedTensor, chunk: StoredChunk) -> FileHandle:
        file = self._files[chunk.file]

        def refuse(problem: str) -> NoReturn:
            raise WeightReadError(
                f"{printable(file.path)}: the chunk of {shorten(name)} at {list(chunk.offsets)}, "
                f"saved from byte {chunk.begin} on: {problem}"
            )

        if file.size > 8 and file.read_bytes(8, 1) == b"{":
            return self._part_of_safetensors(file, name, tensor, chunk, refuse)
        window = _Window(file, chunk.begin, chunk.length)
        held, _ = unpickled(window, refuse)
        if not isinstance(held, SavedTensor):
            refuse(f"it is a {type(held).__name__}: expected a tensor")
        if held.entry is None:
            refuse(held.problem)
        dtype, shape, begin, _, strides = held.entry
        _compare(dtype, shape, tensor, chunk, refuse)
        described = as_torch(dtype, tuple(shape), strides)
        return FileHandle(file, name, *described, chunk.begin + begin, cut=True)

    def _part_of_safetensors(
        self, file: FileBytes, name: str, tensor: ChunkedTensor, chunk: StoredChunk, refuse: Refuse
    ) -> FileHandle:
        """Return a handle of a chunk in a safetensors file, whose header has its place."""
        if sum(each.file == chunk.file for each in tensor.chunks) > 1:
            # torch's writer puts a rank's chunks into a dict by name, and keeps the last one.
            refuse(
                "the file is safetensors, which has one tensor of a name, and .metadata says that "
                "it has several chunks of it: save it with SerializationFormat.TORCH_SAVE"
            )
        if chunk.file not in self._headers:
            self._headers[chunk.file] = read_header(file.path, file.size, file.read_bytes).entries
        entry = self._headers[chunk.file].get(tensor.key)
        if entry is None:
            refuse(f"the file is safetensors and has no tensor {shorten(tensor.key)}. {DAMAGED}")
        _compare(entry.dtype, entry.shape, tensor, chunk, refuse)
        described = as_torch(entry.dtype, entry.shape, entry.strides)
        return FileHandle(file, name, *described, entry.begin, cut=True)

    def _described(self) -> list[tuple[int, int]]:
        return [(0, self._bytes.size)]


def _compare(
    dtype: StoredDType,
    shape: tuple[int, ...],
    tensor: ChunkedTensor,
    chunk: StoredChunk,
    refuse: Refuse,
) -> None:
    """Raise if a saved chunk differs from its entry in ``.metadata``."""
    if (dtype, tuple(shape)) != (tensor.dtype, tuple(chunk.shape)):
        refuse(
            f"it is {dtype.name} of shape {list(shape)}, and .metadata says "
            f"{tensor.dtype.name} of shape {list(chunk.shape)}. {DAMAGED}"
        )


class _Window:
    """A range of bytes of a file."""

    def __init__(self, file: FileBytes, begin: int, size: int) -> None:
        self._file, self._begin, self.size = file, begin, size

    def read_bytes(self, offset: int, length: int) -> bytes:
        if offset < 0 or offset + length > self.size:
            raise ValueError(f"bytes {offset} to {offset + length} of {self.size}")
        return self._file.read_bytes(self._begin + offset, length)

    def read_ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        pass
