"""What a file of weights needs of the place where its bytes are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from vllm_module.weights.cut_rows import Run


class Readable(Protocol):
    """The bytes of one open file, on this machine or in a store, for many threads at once."""

    @property
    def path(self) -> Path:
        """The file, or a path that stands for its URL."""

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""

    @property
    def bytes_read(self) -> int:
        """Bytes that ``read_runs`` has read so far."""

    @property
    def remote(self) -> bool:
        """Whether reading waits for a network, so that many ranges are best read at once."""

    def close(self) -> None:
        """Close the file; reading from it afterwards is a WeightReadError."""

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes that are not counted as weights (the header)."""

    def read_ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Be told the offsets and lengths that ``read_bytes`` will be asked for one by one."""

    def check_unchanged(self) -> None:
        """Raise WeightReadError if the file was closed or, where that is known, has changed."""

    def read_runs(self, runs: Iterable[tuple[Run, int]]) -> None:
        """Read each run to its address in memory, its segments one after the other without gaps."""
