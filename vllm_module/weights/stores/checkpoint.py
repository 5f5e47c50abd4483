"""The files of weights of a store, and the checkpoint that they make up."""

from __future__ import annotations

import hashlib

from vllm_module.weights.checkpoint import Checkpoint
from vllm_module.weights.safetensors import SafetensorsFile
from vllm_module.weights.stores.store import Store
from vllm_module.weights.stores.stored_bytes import StoredBytes


class StoredFile(SafetensorsFile):
    """The tensors of one safetensors file of a store."""

    def __init__(self, store: Store, name: str) -> None:
        self._stored = StoredBytes(store, name)
        super().__init__(self._stored.path, file_bytes=self._stored)

    @property
    def bytes_requested(self) -> int:
        """Bytes that were requested so far, headers and gaps included."""
        return self._stored.bytes_requested

    @property
    def requests(self) -> int:
        """How many requests were made, without those that were tried again."""
        return self._stored.requests

    def _read_entries(self) -> None:
        super()._read_entries()
        self._stored.forget_first()

    def fingerprint(self) -> bytes:
        """Digest the file's name, size, tag, and what it says of tensors (SHA-256)."""
        described = self.path.name, self._stored.version, sorted(self.entries.items())
        return hashlib.sha256(repr(described).encode()).digest()


class StoredCheckpoint(Checkpoint):
    """The tensors of a checkpoint in a store by name, none of them read yet."""

    def __init__(self, store: Store, files: tuple[StoredFile, ...]) -> None:
        super().__init__(files, "safetensors")
        self._store, self._stored = store, files

    @property
    def bytes_requested(self) -> int:
        """Bytes that were requested so far, headers and gaps included."""
        return sum(file.bytes_requested for file in self._stored)

    @property
    def requests(self) -> int:
        """How many requests were made, without those that were tried again."""
        return sum(file.requests for file in self._stored)

    def close(self) -> None:
        """Close the files and the connections; handles can no longer be read."""
        super().close()
        self._store.close()
