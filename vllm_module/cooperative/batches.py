"""How the regions that ranks share are laid out in batches, and each batch among the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch

from vllm_module.cooperative.region import Box, volume

_ALIGNMENT = 64  # bytes between tensors in a buffer: any dtype's, and a line of the CPU's cache


class Chunk(NamedTuple):
    """A contiguous region of a tensor, and its place in a batch."""

    name: str
    box: Box
    dtype: torch.dtype
    batch: int
    begin: int
    owner: int

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
) -> list[Chunk]:
    """Cut regions into chunks, put these into batches, and divide each batch among the ranks.

    A chunk of more than ``batch_bytes`` is never made. Each rank's part of a batch is contiguous.
    """
    most = max(16, batch_bytes // (4 * size))  # no dtype is wider
    batches: list[list[Chunk]] = [[]]
    end = 0
    for name, whole, dtype in tensors:
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
        for box in _cut(whole, dtype.itemsize, most):
            nbytes = volume(box) * dtype.itemsize
            if end + nbytes > batch_bytes:
                batches.append([])
                end = 0
            batches[-1].append(Chunk(name, box, dtype, len(batches) - 1, end, 0))
            end += nbytes
    chunks: list[Chunk] = []
    for batch in batches:
        total = batch[-1].end if batch else 1
        for chunk in batch:
            middle = (chunk.begin + chunk.end) // 2
            owned = chunk._replace(owner=min(middle * size // total, size - 1))
            joined = _joined(chunks[-1], owned) if chunks else None
            if joined is None:
                chunks.append(owned)
            else:
                chunks[-1] = joined
    return chunks


def _cut(box: Box, itemsize: int, most: int) -> Iterator[Box]:
    """Cut a contiguous box into contiguous ones of at most ``most`` bytes, in order."""
    nbytes = volume(box) * itemsize
    if nbytes <= most:
        yield box
        return
    dim = next(dim for dim, (_, length) in enumerate(box) if length > 1)
    start, length = box[dim]
    step = max(1, length * most // nbytes)
    for first in range(start, start + length, step):
        count = min(step, start + length - first)
        yield from _cut((*box[:dim], (first, count), *box[dim + 1 :]), itemsize, most)


def _joined(one: Chunk, other: Chunk) -> Chunk | None:
    """Return two chunks of one owner as one, if that is a box and ``other`` follows ``one``."""
    if (one.name, one.batch, one.owner) != (other.name, other.batch, other.owner):
        return None
    if one.end != other.begin:
        return None
    differing = [dim for dim, (a, b) in enumerate(zip(one.box, other.box, strict=True)) if a != b]
    if len(differing) != 1:
        return None
    (dim,) = differing
    (start, length), (following, count) = one.box[dim], other.box[dim]
    if start + length != following:
        return None
    return one._replace(box=(*one.box[:dim], (start, length + count), *one.box[dim + 1 :]))


def parts_of(batch: Iterable[Chunk], size: int) -> list[tuple[int, int]]:
    """Return where every rank's part begins and ends, ``(0, 0)`` if it has none."""
    parts = [(0, 0)] * size
    for owner, group in groupby(batch, attrgetter("owner")):
        chunks = list(group)
        parts[owner] = chunks[0].begin, chunks[-1].end
    return parts
