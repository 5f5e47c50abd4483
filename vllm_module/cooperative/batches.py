"""How the regions that ranks share are laid out in batches, and each batch among the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_module.weights.region import Box, volume

_ALIGNMENT = 64  # bytes between tensors in a buffer: any dtype's, and a line of the CPU's cache


class Chunk(NamedTuple):
    """A contiguous region of a tensor, which one rank reads, and its place in a batch."""

    name: str
    box: Box
    dtype: torch.dtype
    batch: int
    owner: int
    begin: int

    @property
    def end(self) -> int:
        """Where the next byte after it is."""
        return self.begin + volume(self.box) * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the chunk in the buffer that holds its batch."""
        data = buffer[self.begin : self.end].view(self.dtype)
        return data.view([length for _, length in self.box])


def lay_out(
    tensors: Iterable[tuple[str, Box, torch.dtype]], size: int, batch_bytes: int
) -> Iterator[Chunk]:
    """Cut contiguous regions into chunks, which follow each other in batches.

    Each rank reads one of ``size`` equal parts of every batch; of the last batch, what there is.
    """
    part = batch_bytes // size // _ALIGNMENT * _ALIGNMENT
    assert part, f"{batch_bytes} bytes are too few for {size} ranks"
    end = 0  # of all chunks so far
    for name, box, dtype in tensors:
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
        rest = [box] if volume(box) else []
        while rest:
            first, *rest = _split(rest[0], (part - end % part) // dtype.itemsize) + rest[1:]
            number, begin = divmod(end, part)
            batch, owner = divmod(number, size)
            yield Chunk(name, first, dtype, batch, owner, owner * part + begin)
            end += volume(first) * dtype.itemsize


def _split(box: Box, most: int) -> list[Box]:
    """Cut a contiguous box into contiguous ones, in order; the first has at most ``most`` elements.

    It has as many as that allows.
    """
    if volume(box) <= most:
        return [box]
    dim = next(dim for dim, (_, length) in enumerate(box) if length > 1)
    before, (start, length), after = box[:dim], box[dim], box[dim + 1 :]
    count = most // volume(after)
    kept = max(count, 1)
    first, rest = (
        (*before, each, *after) for each in ((start, kept), (start + kept, length - kept))
    )
    return [first, rest] if count else [*_split(first, most), rest]


def parts_of(chunks: Sequence[Chunk], size: int) -> list[list[tuple[int, int]]]:
    """Return for each batch where every rank's part begins and ends, ``(0, 0)`` if it has none."""
    parts = [[(0, 0)] * size for _ in range(chunks[-1].batch + 1 if chunks else 0)]
    for chunk in chunks:
        begin, end = parts[chunk.batch][chunk.owner]
        parts[chunk.batch][chunk.owner] = begin if end else chunk.begin, chunk.end
    return parts
