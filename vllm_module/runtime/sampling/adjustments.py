"""Biases, penalties and bans that change logits before a token is chosen."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_module.kernels.rows.adjust_logits import adjust_logits
from vllm_module.runtime.sampling.row import NamedTokens, Row, check_tokens
from vllm_module.runtime.sampling.token_counts import TokenCounts
from vllm_module.runtime.transfers import Numbers


class Adjustments:
    """Biases, penalties, bans and allowances of rows; a row may have none.

    Args:
        rows: the rows to change.
        indices: indices of these rows in the logits.
        vocab: size of the vocabulary.
        counts: counts of the tokens of each sequence.

    Attributes:
        arrays: arrays that :meth:`place` takes after they were copied to the device.

    Raises:
        ValueError: a token is outside of the vocabulary, or two rows have the same key.

    """

    def __init__(
        self, rows: Sequence[Row], indices: Sequence[int], vocab: int, counts: TokenCounts
    ) -> None:
        self._counts = counts
        self._update = counts.plan([row for row in rows if row.penalized], vocab)
        places = iter(self._update.places)
        plan, tokens = array("q"), array("q")
        penalties, biases = array("d"), array("d")
        sent: dict[NamedTokens, tuple[int, int, int, int]] = {}
        for row, index in zip(rows, indices, strict=True):
            params, named = row.params, row.named or NamedTokens(row.params)
            if named not in sent:
                named.check(vocab)
                begin, biased = len(tokens), named.biased
                biases.extend(array("d", bytes(8 * (begin - len(biases)))))
                biases.extend(named.biases)
                tokens.extend(biased)
                middle = len(tokens)
                tokens.extend(named.allowed or ())
                ends = (-1, -1) if named.allowed is None else (middle, len(tokens))
                sent[named] = begin, middle, *ends
            plan.extend((index, next(places) if row.penalized else -1))
            penalties.append(params.repetition_penalty)
            penalties.extend((params.presence_penalty, params.frequency_penalty))
            check_tokens(row.banned, vocab)
            banned = len(tokens)
            tokens.extend(row.banned)
            begin, end, *allowed = sent[named]
            plan.extend((begin, end, banned, len(tokens), *allowed))
        self.arrays: tuple[Numbers, ...] = plan, penalties, biases, tokens, *self._update.arrays

    def place(self, sent: Sequence[Tensor]) -> None:
        """Store the arrays, which are now on the device, and update the token counts."""
        plan, penalties, self._biases, self._tokens, *update = sent
        self._plan, self._penalties = plan.view(-1, 8), penalties.view(-1, 3)
        self._table = plan.new_empty(2, 0, 0, dtype=torch.int32)
        if len(update[0]):
            self._table = self._counts.apply(self._update, update)

    def apply(self, logits: Tensor, rows: slice) -> Tensor:
        """Return some of the rows in float32, with their adjustments."""
        plan, penalties = self._plan[rows], self._penalties[rows]
        return adjust_logits(logits, plan, penalties, self._biases, self._tokens, self._table)
