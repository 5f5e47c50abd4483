"""The files of one folder, on this machine or in a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm_module.weights.readable import Readable

if TYPE_CHECKING:
    from vllm_module.weights.weight_file import WeightFile


class FolderFiles(Protocol):
    """What a format of a folder needs of the place where its files are.

    A file that is missing, or may not be read, is a CheckpointFormatError.
    """

    @property
    def path(self) -> Path:
        """The folder, or a path that stands for its URL; files are shown below it."""

    @property
    def named(self) -> str | None:
        """The one file that the user named, where that was no folder."""

    def names(self) -> list[str] | None:
        """List the files in order; ``None`` where that cannot be."""

    def has(self, name: str) -> bool:
        """Tell whether there is such a file; a broken link is refused when it is opened."""

    def read(self, name: str) -> bytes:
        """Read the whole of a small file (JSON, a template)."""

    def open(self, name: str) -> Readable:
        """Open a file of weights."""

    def close(self) -> None:
        """Close the connections of a store; files that were opened can no longer be read."""

    def checkpoint(self, files: Sequence[WeightFile], load_format: str) -> Any:
        """Return the :class:`Checkpoint` of files that were opened here."""
