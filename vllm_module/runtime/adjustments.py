"""Biases, penalties, bans and allowances: what changes logits before a token is chosen."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_module.runtime.sampling_row import Row
from vllm_module.runtime.token_counts import TokenCounts, check_tokens
from vllm_module.runtime.uploading import Numbers


class Adjustments:
    """What changes the logits of n rows. The first half is made by the host, the rest on a device.

    Args:
        rows: that are changed.
        vocab: its size.
        counts: the tokens of each sequence.

    Attributes:
        arrays: that :meth:`place` wants on the device.

    Raises:
        ValueError: a token is outside of the vocabulary, or two rows have the same key.

    """

    def __init__(self, rows: Sequence[Row], vocab: int, counts: TokenCounts) -> None:
        self._vocab = vocab
        self._counts = counts
        self._update = counts.plan([row for row in rows if row.penalized], vocab)
        starts, penalties = array("q"), array("d")
        biased, biases, banned, allowed = array("q"), array("d"), array("q"), array("q")
        self._ends = [_Ends(0, 0, 0, 0)]
        self._limited: list[int] = []  # rows that may have few tokens only
        for start, row in zip(range(0, len(rows) * vocab, vocab), rows, strict=True):
            params = row.params
            if row.penalized:
                starts.append(start)
                penalties.append(params.repetition_penalty)
                penalties.extend((params.presence_penalty, params.frequency_penalty))
            if params.logit_bias:
                check_tokens(params.logit_bias, vocab)
                biased.extend(start + token for token in params.logit_bias)
                biases.extend(params.logit_bias.values())
            check_tokens(row.banned, vocab)
            banned.extend(start + token for token in row.banned)
            if params.allowed_token_ids is not None:
                check_tokens(params.allowed_token_ids, vocab)
                self._limited.append(start // vocab)
                allowed.extend(start + token for token in params.allowed_token_ids)
            self._ends.append(_Ends(len(starts), len(biased), len(banned), len(allowed)))
        self.arrays: tuple[Numbers, ...] = (
            starts,
            penalties,
            biased,
            biases,
            banned,
            allowed,
            *self._update.arrays,
        )

    def place(self, sent: Sequence[Tensor]) -> None:
        """Take the arrays, on the device."""
        starts, penalties, self._biased, biases, self._banned, self._allowed, *update = sent
        self._biases = biases.float()
        if len(starts):
            ids, self._times = self._counts.apply(self._update, update)
            self._ids = ids.add_(starts.unsqueeze(1))
            self._penalties = penalties.float().view(-1, 3)

    def apply(self, x: Tensor, start: int) -> None:
        """Change float32 ``x`` in place, which has the rows from ``start``."""
        flat, offset = x.view(-1), start * self._vocab
        first, last = self._ends[start], self._ends[start + len(x)]
        if last.biased > first.biased:
            batch = slice(first.biased, last.biased)
            index = self._biased[batch] - offset
            flat.index_copy_(0, index, flat.index_select(0, index).add_(self._biases[batch]))
        if last.penalized > first.penalized:
            batch = slice(first.penalized, last.penalized)
            index = (self._ids[batch] - offset).view(-1)
            before = flat.index_select(0, index).view(-1, self._ids.shape[1])
            after = _penalize(before, self._times[batch], self._penalties[batch])
            # A token that occurs twice is written twice, with the same value.
            flat.index_copy_(0, index, after.view(-1))
        if last.banned > first.banned:
            index = self._banned[first.banned : last.banned] - offset
            flat.index_fill_(0, index, -torch.inf)
        if last.allowed > first.allowed:
            index = self._allowed[first.allowed : last.allowed] - offset
            kept = flat.index_select(0, index)
            for row in self._limited:
                if start <= row < start + len(x):
                    x[row - start].fill_(-torch.inf)
            flat.index_copy_(0, index, kept)


class _Ends(NamedTuple):
    """How many penalized rows, and biased, banned and allowed tokens, come before a row."""

    penalized: int
    biased: int
    banned: int
    allowed: int


def _penalize(x: Tensor, times: Tensor, penalties: Tensor) -> Tensor:
    """Penalize logits of tokens that occur ``times`` in the output: -1 for those of no sequence.

    Positive logits are divided by the repetition penalty, others multiplied. Then ``presence +
    frequency * times`` is subtracted from tokens of the output.
    """
    repetition, presence, frequency = torch.split(penalties, 1, dim=1)
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(times >= 0, repeated, x)
    return x - torch.where(times > 0, frequency * times + presence, 0)
