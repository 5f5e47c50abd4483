"""Counts of each sequence's tokens, kept on the device from step to step."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_module.kernels.rows.adjust_logits import EMPTY, NONE, count_tokens
from vllm_module.runtime.sampling.row import Row, check_tokens

_FEW = 64  # distinct tokens up to which recounting is not worthwhile
_CHECKED = 256  # calls after which a table that was too large for all of them is allocated anew


class _Entry(NamedTuple):
    """The table row of a sequence, and the number of tokens counted in it.

    ``distinct`` is a bound: every token since the last count, which found ``first_count``, may be
    new.
    """

    place: int
    counted: int
    distinct: int
    first_count: int


class Update(NamedTuple):
    """Changes of the table for one call.

    Attributes:
        arrays: arguments of :func:`~vllm_module.kernels.rows.adjust_logits.count_tokens`, to be
            copied to the device.
        places: the table row of each sequence.
        needed: numbers of rows and columns that the call uses.
        anew: True if the table is allocated anew, because it was too large.

    """

    arrays: tuple[array[int], ...]
    places: list[int]
    entries: dict[Hashable, _Entry]
    size: tuple[int, int]
    needed: tuple[int, int]
    anew: bool


class TokenCounts:
    """A table of the tokens of sequences, on the device.

    A new sequence sends its distinct tokens; after that, it sends one token a step. A sequence with
    several new tokens, or one that is no longer in the table, sends all again. So preemption, forks
    and another order of the batch change nothing.

    The table has a row for each sequence of the largest call, and at most two columns for each
    distinct token of the sequence that has most, both rounded up to a power of two. An entry takes
    8 bytes. If no row is free, the one that was not used for longest is written anew. A table of
    which 256 calls have used a quarter at most is made anew.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}  # the least recently used first
        self._table = torch.empty(2, 0, 1, dtype=torch.int32)  # tokens, and their counts
        self._calls = 0  # calls since the size was checked; _needed is the most they used
        self._needed = (1, 1)

    @property
    def nbytes(self) -> int:
        """The memory of the table."""
        return self._table.nbytes

    def plan(self, rows: Sequence[Row], vocab: int) -> Update:
        """Return the changes that :meth:`apply` must make; nothing is changed yet.

        Raises:
            ValueError: a token is outside of the vocabulary, or two rows have the same key.

        """
        _, height, width = self._table.shape
        most = _power_of_two(self._needed[0]) * _power_of_two(self._needed[1])
        anew = self._calls >= _CHECKED and 4 * most <= height * width
        if anew:
            height, width = 0, 1
        entries = {} if anew else dict(self._entries)
        known = [None if row.key is None else entries.pop(row.key, None) for row in rows]
        height = _power_of_two(len(rows), height)
        used = {entry.place for entry in (*known, *entries.values()) if entry is not None}
        free = [place for place in range(height) if place not in used]
        places: list[int] = []
        plan, tokens, counts = array("q"), array("q"), array("q")
        needed = 1
        for row, entry in zip(rows, known, strict=True):
            length = len(row.token_ids)
            few = entry is not None and entry.distinct <= 2 * max(_FEW, entry.first_count)
            if entry is not None and few and 0 <= length - entry.counted <= 1:
                added = row.token_ids[entry.counted :]
                check_tokens(added, vocab)
                plan.extend((entry.place, added[0] if added else NONE, entry.distinct, -1, -1))
                distinct = entry.distinct + len(added)
                entry = entry._replace(counted=length, distinct=distinct)
            else:
                counted = _count(row, vocab)
                if entry is not None:
                    place = entry.place
                else:
                    place = free.pop() if free else entries.pop(next(iter(entries))).place
                plan.extend((place, NONE, 0, len(tokens), len(tokens) + len(counted)))
                tokens.extend(counted.keys())
                counts.extend(counted.values())
                entry = _Entry(place, length, len(counted), len(counted))
            if row.key in entries:
                raise ValueError(f"two rows have the key {row.key!r}; each sequence needs its own")
            if row.key is not None:
                entries[row.key] = entry
            places.append(entry.place)
            needed = max(needed, entry.distinct)
        size = height, _power_of_two(needed, width)
        return Update((plan, tokens, counts), places, entries, size, (len(rows), needed), anew)

    def apply(self, update: Update, sent: Sequence[Tensor]) -> Tensor:
        """Update the table and return it.

        Args:
            update: the result of the last :meth:`plan`; no other was applied since.
            sent: its arrays, on the device.

        """
        plan, tokens, counts = sent
        self._entries = {}  # after an interrupt, every sequence sends all again
        is_new = update.anew or not self._table.numel()
        if is_new or self._calls >= _CHECKED:
            self._calls, self._needed = 0, (1, 1)
        self._calls += 1
        rows, columns = self._needed
        self._needed = max(rows, update.needed[0]), max(columns, update.needed[1])
        _, height, width = self._table.shape
        if is_new or update.size != (height, width):
            table = plan.new_full((2, *update.size), EMPTY, dtype=torch.int32)
            if not is_new:
                table[:, :height, :width] = self._table
            self._table = table
        count_tokens(self._table, plan.view(-1, 5), tokens, counts)
        self._entries = update.entries
        return self._table


def _count(row: Row, vocab: int) -> dict[int, int]:
    """Return each token's count in the output; 0 for the prompt's, if they are penalized."""
    penalized = row.token_ids[: row.prompt_len] if row.params.repetition_penalty != 1 else ()
    counts = dict.fromkeys(penalized, 0)
    for token, count in Counter(row.token_ids[row.prompt_len :]).items():
        counts[token] = count
    check_tokens(counts, vocab)
    return counts


def _power_of_two(number: int, least: int = 1) -> int:
    """Return ``least``, or the next power of two if that is less than ``number``."""
    return least if number <= least else 1 << (number - 1).bit_length()
