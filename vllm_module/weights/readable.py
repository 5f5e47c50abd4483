"""The interface of an open file of weights, wherever its bytes are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from vllm_module.weights.cut_rows import ByteRun


class Readable(Protocol):
    """The bytes of one open file, on this machine or in a store, for many threads at once."""

    @property
    def path(self) -> Path:
        """Path of the file, or a path that stands for its URL."""

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""

    @property
    def bytes_read(self) -> int:
        """Bytes that ``read_runs`` has read so far."""

    @property
    def remote(self) -> bool:
        """True if reading waits for a network, so that many ranges should be requested at once."""

    def close(self) -> None:
        """Close the file; reading from it afterwards is a WeightReadError."""

    def interrupt(self) -> None:
        """End the reads of a network that threads wait in, for an interrupt of the program."""

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes (of the header) without counting them in ``bytes_read``."""

    def read_ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Announce the offsets and lengths of coming ``read_bytes`` calls."""

    def check_unchanged(self) -> None:
        """Raise WeightReadError if the file was closed or, if that can be known, has changed."""

    def read_runs(self, runs: Iterable[tuple[ByteRun, int]]) -> None:
        """Read each run to its address in memory; its segments are stored there without gaps."""
