"""The files of weights of a store, and the checkpoint that they make up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_module.weights.checkpoint import Checkpoint
from vllm_module.weights.formats import FORMATS, Files, imported
from vllm_module.weights.regular_file import MAX_JSON_BYTES, is_there, read_file
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


class StoredFiles:
    """The :class:`FolderFiles` of a store.

    Args:
        store: closed with the checkpoint.
        local: the folder with the small files that were fetched, which are not asked for again.
        listed: lists the files; ``None`` where that cannot be.
        fetched: tells whether a file would be in ``local`` if there were one.
        named: the one file that the user named.

    """

    def __init__(
        self,
        store: Store,
        local: Path,
        listed: Callable[[], list[str] | None],
        fetched: Callable[[str], bool],
        named: str | None = None,
    ) -> None:
        self._store, self._local, self._listed, self._fetched = store, local, listed, fetched
        self.path, self.named = store.place.path, named
        self._opened: dict[str, StoredBytes] = {}

    def names(self) -> list[str] | None:
        """List the files in order; ``None`` where that cannot be."""
        listed = self._listed()
        return None if listed is None else sorted(listed)

    def has(self, name: str) -> bool:
        """Tell whether there is such a file."""
        if is_there(self._local / name):
            return True
        if self._fetched(name):
            return False
        listed = self._listed()
        return self._store.has(name) if listed is None else name in listed

    def read(self, name: str) -> bytes:
        """Read the whole of a small file."""
        if is_there(self._local / name):
            return read_file(self._local / name, self._local)
        return self._store.fetch(name, MAX_JSON_BYTES)

    def open(self, name: str) -> StoredBytes:
        """Open a file of weights."""
        self._opened[name] = StoredBytes(self._store, name)
        return self._opened[name]

    def close(self) -> None:
        """Close the connections."""
        self._store.close()

    def checkpoint(self, files: Sequence[WeightFile], load_format: str) -> StoredCheckpoint:
        """Return the checkpoint of files that were opened here."""
        stored = [(file, self._opened[file.path.name]) for file in files]
        for _, each in stored:
            each.forget_header()
        return StoredCheckpoint(self._store, stored, load_format)


def open_file(store: Store, name: str, load_format: str) -> tuple[WeightFile, StoredBytes]:
    """Open one file of a store, and check what it says of its tensors."""
    format_ = FORMATS[load_format]
    assert isinstance(format_, Files)
    stored = StoredBytes(store, name)
    file: WeightFile = imported(format_.opener)(stored.path, file_bytes=stored)
    stored.forget_header()
    return file, stored
