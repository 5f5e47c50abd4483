"""The files of one folder, on this machine or in a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm_module.weights.readable import Readable

if TYPE_CHECKING:
    from vllm_module.weights.weight_file import WeightFile


class FolderFiles(Protocol):
    """The interface to the files of one folder, which formats open their files through.

    A file that is missing, or may not be read, is a CheckpointFormatError.
    """

    @property
    def path(self) -> Path:
        """Path of the folder, or a path that stands for its URL; messages show files below it."""

    @property
    def named(self) -> str | None:
        """Name of the one file that the user chose, or None for a whole folder."""

    def names(self) -> list[str] | None:
        """List the file names in order; ``None`` if the place cannot list them."""

    def has(self, name: str) -> bool:
        """Return whether a file of this name exists; a broken link counts and fails when opened."""

    def read(self, name: str) -> bytes:
        """Return the contents of a small file (JSON, a template)."""

    def open(self, name: str) -> Readable:
        """Open a file of weights."""

    def close(self) -> None:
        """Close the connections of a store; files that were opened can no longer be read."""

    def checkpoint(self, files: Sequence[WeightFile], load_format: str) -> Any:
        """Return the :class:`Checkpoint` of ``files``, which were opened through this object."""
