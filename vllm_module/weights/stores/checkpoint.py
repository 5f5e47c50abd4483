"""The files of weights of a store, and the checkpoint that they make up."""

from __future__ import annotations

import hashlib

from vllm_module.weights.checkpoint import Checkpoint
from vllm_module.weights.formats import FORMATS, Files, imported
from vllm_module.weights.stores.store import Store
from vllm_module.weights.stores.stored_bytes import StoredBytes
from vllm_module.weights.weight_file import WeightFile


class StoredCheckpoint(Checkpoint):
    """The tensors of a checkpoint in a store by name, none of them read yet."""

    def __init__(
        self, store: Store, files: list[tuple[WeightFile, StoredBytes]], load_format: str
    ) -> None:
        super().__init__(tuple(file for file, _ in files), load_format)
        self._store, self._stored = store, files

    @property
    def bytes_requested(self) -> int:
        """Bytes that were requested so far, headers and gaps included."""
        return sum(stored.bytes_requested for _, stored in self._stored)

    @property
    def requests(self) -> int:
        """How many requests were made, without those that were tried again."""
        return sum(stored.requests for _, stored in self._stored)

    @property
    def fingerprint(self) -> str:
        """A hex SHA-256 of each file's name, size, tag, and what it says of tensors."""
        described = [
            (file.path.name, stored.version, sorted(file.entries.items()))
            for file, stored in self._stored
        ]
        return hashlib.sha256(repr(described).encode("utf-8", "surrogatepass")).hexdigest()

    def close(self) -> None:
        """Close the files and the connections; handles can no longer be read."""
        super().close()
        self._store.close()


def open_file(store: Store, name: str, load_format: str) -> tuple[WeightFile, StoredBytes]:
    """Open one file of a store, and check what it says of its tensors."""
    format_ = FORMATS[load_format]
    assert isinstance(format_, Files)
    stored = StoredBytes(store, name)
    file: WeightFile = imported(format_.opener)(stored.path, file_bytes=stored)
    stored.forget_header()
    return file, stored
