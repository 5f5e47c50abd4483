"""Which tokens each sequence has, and how often, kept on the device from step to step."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_module.runtime.sampling_row import Row

_NO_TOKEN = -1  # in the table
_NONE_NEW = -2
_FEW = 64  # distinct tokens, which are not worth another count
_CHECKED = 256  # calls, after which a table that was too large for all of them is made anew


class _Entry(NamedTuple):
    """In which row of the table a sequence is, and what is counted.

    ``distinct`` is a bound: every token since the last count, which found ``at_first``, may be new.
    """

    place: int
    counted: int
    distinct: int
    at_first: int


class Update(NamedTuple):
    """What a call changes in the table.

    Attributes:
        arrays: for the device: of each sequence its row of the table, its new token, and the first
            free column; then the rows that are written anew, how many distinct tokens each has,
            these tokens, and how often each occurs.
        needed: the rows and columns that the call takes.
        anew: whether the table is made anew, because it was too large.

    """

    arrays: tuple[array[int], ...]
    entries: dict[Hashable, _Entry]
    size: tuple[int, int]
    needed: tuple[int, int]
    anew: bool


class TokenCounts:
    """A table of the tokens of sequences, on the device.

    A sequence that is new sends its distinct tokens; after that, it sends one token a step. A
    sequence of which several tokens are new, or that is not in the table any more, sends all again.
    So preemption, forks and another order of the batch change nothing.

    The table has a row for each sequence of the largest call, and at most two columns for each
    distinct token of the sequence that has most, both rounded up to a power of two. An entry takes
    8 bytes. If no row is free, the one that was not used for longest is written anew. A table of
    which 256 calls have used a quarter at most is made anew.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}  # the one not used for longest first
        # A row may have a token in several columns, each with the same count: what is written to
        # the token's logit is then the same.
        self._ids = torch.empty(0, 1, dtype=torch.int32)
        self._counts = torch.empty(0, 1, dtype=torch.int32)
        self._calls = 0  # since the size was checked, and what they took at most
        self._needed = (1, 1)

    @property
    def nbytes(self) -> int:
        """The memory of the table."""
        return self._ids.nbytes + self._counts.nbytes

    def plan(self, rows: Sequence[Row], vocab: int) -> Update:
        """Return what :meth:`apply` has to change, and change nothing yet.

        Raises:
            ValueError: a token is outside of the vocabulary, or two rows have the same key.

        """
        height, width = self._ids.shape
        most = _power_of_two(self._needed[0]) * _power_of_two(self._needed[1])
        anew = self._calls >= _CHECKED and 4 * most <= height * width
        if anew:
            height, width = 0, 1
        entries = {} if anew else dict(self._entries)
        known = [None if row.key is None else entries.pop(row.key, None) for row in rows]
        height = _power_of_two(len(rows), height)
        used = {entry.place for entry in (*known, *entries.values()) if entry is not None}
        free = [place for place in range(height) if place not in used]
        places, new, columns, written = array("q"), array("q"), array("q"), array("q")
        counted: list[dict[int, int]] = []
        needed = 1
        for row, entry in zip(rows, known, strict=True):
            length = len(row.token_ids)
            few = entry is not None and entry.distinct <= 2 * max(_FEW, entry.at_first)
            if entry is not None and few and 0 <= length - entry.counted <= 1:
                added = row.token_ids[entry.counted :]
                check_tokens(added, vocab)
                new.append(added[0] if added else _NONE_NEW)
                columns.append(entry.distinct)
                distinct = entry.distinct + len(added)
                entry = entry._replace(counted=length, distinct=distinct)
            else:
                counted.append(_count(row, vocab))
                new.append(_NONE_NEW)
                columns.append(0)
                if entry is not None:
                    place = entry.place
                else:
                    place = free.pop() if free else entries.pop(next(iter(entries))).place
                written.append(place)
                entry = _Entry(place, length, len(counted[-1]), len(counted[-1]))
            if row.key in entries:
                raise ValueError(f"two rows have the key {row.key!r}; each sequence needs its own")
            if row.key is not None:
                entries[row.key] = entry
            places.append(entry.place)
            needed = max(needed, entry.distinct)
        arrays = (places, new, columns, written, *_end_to_end(counted))
        size = height, _power_of_two(needed, width)
        return Update(arrays, entries, size, (len(rows), needed), anew)

    def apply(self, update: Update, sent: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the tokens ``[n, any]`` of each sequence, and how often its output has each.

        A token may be repeated, with the same count. A sequence without tokens has the token 0 with
        the count -1.

        Args:
            update: of :meth:`plan`, since which nothing was applied.
            sent: its arrays, on the device.

        """
        places, new, columns, written, *counted = sent
        height, width = update.size
        self._entries = {}  # if this is interrupted, every sequence sends all again
        if update.anew or not self._ids.numel():
            self._ids = self._counts = new.new_zeros(0, 1, dtype=torch.int32)
            self._calls, self._needed = 0, (1, 1)
        elif self._calls >= _CHECKED:
            self._calls, self._needed = 0, (1, 1)
        self._calls += 1
        self._needed = (
            max(self._needed[0], update.needed[0]),
            max(self._needed[1], update.needed[1]),
        )
        self._ids = _grow(self._ids, height, width)
        self._counts = _grow(self._counts, height, width)
        if len(written):
            lengths, *values = counted
            ends = lengths.cumsum(0)
            total = len(values[0])
            owner = torch.repeat_interleave(lengths, output_size=total)
            column = torch.arange(total, device=new.device) - (ends - lengths)[owner]
            for table, each in zip((self._ids, self._counts), values, strict=True):
                each = each.int()
                table.index_copy_(0, written, each[ends - 1].unsqueeze(1).expand(-1, width))
                table.index_put_((written[owner], column), each)
        ids, counts = self._ids.index_select(0, places), self._counts.index_select(0, places)
        new = new.int().unsqueeze(1)
        same = ids == new
        free = torch.arange(width, device=new.device) >= columns.unsqueeze(1)
        free &= (new >= 0) & ~same.any(1, keepdim=True)
        ids, counts = torch.where(free, new, ids), torch.where(free, 1, counts + same)
        self._ids.index_copy_(0, places, ids)
        self._counts.index_copy_(0, places, counts)
        self._entries = update.entries
        return ids.long().clamp_(min=0), counts


def check_tokens(ids: Iterable[int], vocab: int) -> None:
    """Raise ``ValueError`` for a token outside of the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab:
            raise ValueError(f"token {token} is outside of the vocabulary of {vocab}")


def _count(row: Row, vocab: int) -> dict[int, int]:
    """Return how often the output has each token; 0 for the prompt's, if they are penalized."""
    penalized = row.token_ids[: row.prompt_len] if row.params.repetition_penalty != 1 else ()
    counts = dict.fromkeys(penalized, 0)
    for token, count in Counter(row.token_ids[row.prompt_len :]).items():
        counts[token] = count
    check_tokens(counts, vocab)
    return counts


def _end_to_end(
    counted: Sequence[dict[int, int]],
) -> tuple[array[int], array[int], array[int]]:
    """Return how many tokens each sequence has, the tokens, and their counts."""
    lengths, ids, counts = array("q"), array("q"), array("q")
    for each in counted:
        of = each or {_NO_TOKEN: -1}
        lengths.append(len(of))
        ids.extend(of.keys())
        counts.extend(of.values())
    return lengths, ids, counts


def _grow(table: Tensor, height: int, width: int) -> Tensor:
    """Add rows of any content, and columns that repeat the last one."""
    if table.shape[1] < width:
        more = table[:, -1:].expand(-1, width - table.shape[1])
        table = torch.cat([table, more], 1)
    if len(table) < height:
        table = torch.cat([table, table.new_zeros(height - len(table), width)])
    return table


def _power_of_two(number: int, least: int = 1) -> int:
    """Return ``least``, or if that is less than ``number``, the next power of two."""
    return least if number <= least else 1 << (number - 1).bit_length()
