"""Which ranges of a file are requested for the runs that are read together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from vllm_module.weights.cut_rows import ByteRun

# Of one request. It takes a connection several times as long as the wait for its first byte, and
# what all requests under way hold stays small.
REQUEST_BYTES = 4 << 20
# Bytes between two runs that are read with them. See design/0018.
GAP_BYTES = 256 << 10


class Part(NamedTuple):
    """A run of a range, and where it is put in memory."""

    run: ByteRun
    address: int


@dataclass
class Span:
    """A range of a file to request, with the runs in it."""

    begin: int
    end: int
    parts: list[Part]

    @property
    def direct(self) -> bool:
        """Whether all bytes of the range follow each other in memory too."""
        return len(self.parts) == 1 and self.parts[0].run.nbytes == self.end - self.begin


def spans(runs: Iterable[tuple[ByteRun, int]]) -> list[Span]:
    """Return the ranges to request: of at most ``REQUEST_BYTES``, in the order of the file.

    Two runs are in one range if at most ``GAP_BYTES`` are between them. The same holds for the
    segments of a run.
    """
    found: list[Span] = []
    pieces = [piece for run, address in runs for piece in _pieces(run, address)]
    for part in sorted(pieces, key=lambda part: part.run.offset):
        begin = part.run.offset
        end = begin + part.run.span
        last = found[-1] if found else None
        if (
            last is not None
            and begin - last.end <= GAP_BYTES
            and max(end, last.end) - last.begin <= REQUEST_BYTES
        ):
            last.end = max(end, last.end)
            last.parts.append(part)
        else:
            found.append(Span(begin, end, [part]))
    return found


def _pieces(run: ByteRun, address: int) -> Iterator[Part]:
    """Yield parts of at most REQUEST_BYTES of the file, without larger gaps inside."""
    windows: Iterable[tuple[ByteRun, int]] = [(run, address)]
    if run.count > 1:
        near = run.stride - run.length <= GAP_BYTES
        windows = run.windows(REQUEST_BYTES if near else run.length, address)
    for window, target in windows:
        if window.span <= REQUEST_BYTES:
            yield Part(window, target)
            continue
        # One segment, because a window of several is not longer.
        for start in range(0, window.length, REQUEST_BYTES):
            length = min(REQUEST_BYTES, window.length - start)
            yield Part(ByteRun(window.offset + start, length, 0, 1), target + start)
