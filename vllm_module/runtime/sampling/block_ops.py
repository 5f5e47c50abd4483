"""Finding the largest logits of a row by the maxima of its blocks.

Tokens have one order: by logit, the largest first, and equal logits by token id. One pass over a
row computes the maxima, and everything else reads a few of its blocks. No shape depends on a value,
so nothing here waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

FIRST = 1024  # tokens of a block, to find only the first token
SEVERAL = 64  # tokens of a block, for :func:`top_ids`
_BLOCKS = 8  # maxima per block, if there are many maxima
_CPU_BATCH = 2**17  # numbers of 8 bytes that stay in a CPU's cache
# The same on another device: 64 MiB for each temporary tensor, 0.5 GiB for all.
_DEVICE_BATCH = 2**23
_LOW_BITS = 2**32 - 1


class Logits(NamedTuple):
    """Some rows of a matrix of logits, and the maxima of their blocks.

    Attributes:
        values: logits ``[any, vocab]``, contiguous, of any floating dtype.
        rows: indices of these rows in ``values``, ``[n]``.
        maxima: maximum of each block of ``block`` tokens, ``[n, blocks]``, in the dtype of
            ``values``; NaN if the block has NaN.
        block: number of tokens; the last block may have fewer.

    """

    values: Tensor
    rows: Tensor
    maxima: Tensor
    block: int

    @classmethod
    def of(cls, values: Tensor, block: int) -> Logits:
        """Return all rows of ``values``."""
        rows = torch.arange(len(values), device=values.device)
        return cls(values, rows, by_blocks(values, block, Tensor.amax), block)

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.values.shape[1]

    def select(self, rows: Tensor | slice) -> Logits:
        """Return some of the rows."""
        return self._replace(rows=self.rows[rows], maxima=self.maxima[rows])

    def batches(self, numbers: int) -> Iterator[slice]:
        """Yield the rows in batches, for work with ``numbers`` temporary numbers for each row."""
        yield from batches(len(self.rows), numbers, self.values.device)

    def read(self) -> Tensor:
        """Return a copy of the rows, ``[n, vocab]`` in float32."""
        return self.values.index_select(0, self.rows).float()

    def take(self, ids: Tensor) -> Tensor:
        """Return the logits of tokens ``ids`` ``[n, any]`` in float32."""
        flat = (self.rows.unsqueeze(1) * self.vocab + ids).view(-1)
        return self.values.view(-1).index_select(0, flat).view(ids.shape).float()

    def take_blocks(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of some blocks; the vocabulary must have at least one whole block.

        Args:
            blocks: indices ``[n, any]`` of blocks.

        Returns:
            Logits ``[n, any, block]`` in float32, and the id of each block's first token ``[n,
            any]``. If the last block has fewer tokens, it begins with those of the block before.

        """
        start = (blocks * self.block).clamp_(max=self.vocab - self.block)
        # Copying windows of memory is several times as fast as copying single numbers.
        step = math.gcd(self.vocab, self.block)
        windows = self.values.view(-1).unfold(0, self.block, step)
        window = (self.rows.unsqueeze(1) * self.vocab + start).view(-1) // step
        return windows.index_select(0, window).view(*start.shape, self.block).float(), start


def batches(rows: int, numbers: int, device: torch.device) -> Iterator[slice]:
    """Yield ``rows`` in batches, for work with ``numbers`` temporary numbers for each row."""
    step = max(1, (_CPU_BATCH if device.type == "cpu" else _DEVICE_BATCH) // numbers)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def by_blocks(x: Tensor, block: int, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Reduce each ``block`` columns of ``x`` ``[n, columns]`` to one; the last may have fewer."""
    whole = x.shape[1] - x.shape[1] % block
    parts = [reduce(x[:, :whole].view(len(x), -1, block), -1)] if whole else []
    if whole < x.shape[1]:
        parts.append(reduce(x[:, whole:].unsqueeze(1), -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def first_ids(x: Logits) -> Tensor:
    """Return the id ``[n, 1]`` of each row's first token; NaN comes before all numbers."""
    if x.vocab < x.block:
        return x.read().argmax(-1, keepdim=True)
    block = x.maxima.argmax(-1, keepdim=True)  # argmax returns the first of equal maxima
    values, start = x.take_blocks(block)
    return start + values.squeeze(1).argmax(-1, keepdim=True)


def top_ids(x: Logits, width: int) -> Tensor:
    """Return the ids ``[n, width]`` of each row's first tokens, in order; NaN may be anywhere."""
    if 2 * x.block * width > x.vocab:
        ids = torch.arange(x.vocab, device=x.rows.device)
        parts = [_first(x.select(batch).read(), ids, width) for batch in x.batches(x.vocab)]
    else:
        numbers = max(x.maxima.shape[1], x.block * width)
        parts = [_top_of_blocks(x.select(batch), width) for batch in x.batches(numbers)]
    return torch.cat(parts)


def _top_of_blocks(x: Logits, width: int) -> Tensor:
    # The first tokens are in the ``width`` blocks with the largest maxima: each of these blocks has
    # a token that comes before all tokens of the other blocks.
    blocks = top_ids(Logits.of(x.maxima, _BLOCKS), width)
    values, start = x.take_blocks(blocks)
    ids = start.unsqueeze(-1) + torch.arange(x.block, device=start.device)
    if x.vocab % x.block:
        # Tokens repeated from the block before the last are ordered after the whole vocabulary.
        before = ids < (blocks * x.block).unsqueeze(-1)
        values, ids = values.where(~before, -torch.inf), ids.where(~before, x.vocab)
    # A row with NaN may still have such a token among the first.
    return _first(values.flatten(1), ids.flatten(1), width).clamp_(max=x.vocab - 1)


def _first(x: Tensor, ids: Tensor, width: int) -> Tensor:
    """Return the first ``width`` of ``ids``, which are below 2**32, in the order of ``x``."""
    # topk returns equal keys in any order, so the key contains the id.
    key = sort_key(x).long().mul_(2**32).add_(_LOW_BITS - ids)
    return _LOW_BITS - (key.topk(width).values & _LOW_BITS)


def sort_key(x: Tensor) -> Tensor:
    """Return int32 numbers in the order of ``x``, which has no NaN."""
    # The bits of a float are in its order once negative ones are inverted; adding 0 turns -0 to 0.
    bits = (x.float() + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
