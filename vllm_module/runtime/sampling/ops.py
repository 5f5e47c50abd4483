"""Drawing tokens from rows of logits on a CPU; rows with the same method are drawn together.

Probabilities become integers before they are summed, so every order of summation gives the same
bits, also on a GPU (:mod:`~vllm_module.kernels.rows.draw_tokens`). No row affects another. A row
with NaN, or with no finite logit, gets any token of the vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from vllm_module.runtime.sampling.adjustments import Adjustments
from vllm_module.runtime.sampling.block_ops import (
    FIRST,
    SEVERAL,
    Logits,
    batches,
    by_blocks,
    first_ids,
    sort_key,
    top_ids,
)
from vllm_module.runtime.sampling.row import Row
from vllm_module.runtime.sampling_params import SamplingParams

_SORTED = 64  # number of tokens sorted at first; 16 times as many for a larger count
_MASS_BLOCK = 256  # tokens of a block whose probabilities are summed
_RANKED = 64  # number of most probable tokens whose ranks are known without counting


class DrawSettings(NamedTuple):
    """Sampling parameters of n rows, each ``[n, 1]`` in float64; ``uniform`` is in [0, 1).

    ``scaled`` is True if any temperature is not 1, and ``cut`` if any ``min_p`` is not 0.
    """

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor
    scaled: bool
    cut: bool

    def select(self, rows: slice) -> DrawSettings:
        """Return the settings of some rows."""
        temperature, min_p, top_k, top_p, uniform, *flags = self
        numbers = (temperature[rows], min_p[rows], top_k[rows], top_p[rows], uniform[rows])
        return DrawSettings(*numbers, *flags)


_Draw: TypeAlias = Callable[[Logits, Tensor, DrawSettings, int], Tensor]


class RowGroup(NamedTuple):
    """Rows whose tokens are drawn by the same method.

    Attributes:
        draw: function that chooses their tokens.
        width: number of most probable tokens that it sorts.
        block: number of tokens in a block of the logits.
        adjusted: True if a bias, a penalty or a ban changes their logits.
        indices: indices of the rows.
        params: parameters of each row.

    """

    draw: _Draw
    width: int
    block: int
    adjusted: bool
    indices: list[int]
    params: list[SamplingParams]

    def choose(self, x: Logits, settings: DrawSettings) -> Tensor:
        """Return a token ``[n, 1]`` for each row, or -1 for a row with NaN, inf or only -inf."""
        peak = x.maxima.amax(-1, keepdim=True)
        token = self.draw(x, peak, settings, self.width)
        return token.masked_fill_(~peak.isfinite(), -1)


def group_rows(rows: Sequence[Row], vocab: int) -> list[RowGroup]:
    """Return all rows in groups, adjusted ones first."""
    groups: dict[tuple[_Draw, int, int, bool], RowGroup] = {}
    for index, row in enumerate(rows):
        params, how = row.params, (draw_any, 0, FIRST)
        if params.greedy:
            how = draw_first, 0, FIRST
        elif 0 < params.top_k < vocab:
            how = draw_top_k, sorted_width(params.top_k, vocab), SEVERAL
        elif params.top_p < 1:
            how = draw_top_p, min(_SORTED, vocab), SEVERAL
        key = (*how, row.adjusted)
        if key not in groups:
            groups[key] = RowGroup(*key, [], [])
        groups[key].indices.append(index)
        groups[key].params.append(params)
    return sorted(groups.values(), key=lambda group: not group.adjusted)


def choose(
    logits: Tensor,
    groups: Sequence[RowGroup],
    settings: Tensor,
    indices: Tensor,
    adjustments: Adjustments | None,
) -> Tensor:
    """Return a token for each row, ``[rows]``; -1 if it is broken.

    Args:
        logits: logits of the model, ``[rows, vocab]``.
        groups: groups of rows, adjusted ones first.
        settings: the array of :func:`settings_array`, ``[rows, 5]``, in the order of the groups.
        indices: indices of the rows of all groups, on the device.
        adjustments: adjustments of the rows of adjusted groups; None if there are none.

    """
    found, end = [], 0
    x: Logits | None = None
    for group in groups:
        start, end = end, end + len(group.indices)
        scaled = any(each.temperature != 1 for each in group.params)
        cut = any(each.min_p for each in group.params)
        temperature, min_p, top_k, top_p, uniform = settings[start:end].unsqueeze(2).unbind(1)
        of = DrawSettings(temperature, min_p, top_k, top_p, uniform, scaled, cut)
        if not group.adjusted:
            if x is None:
                x = Logits.of(logits, min(each.block for each in groups if not each.adjusted))
            found.append(group.choose(x.select(indices[start:end]), of))
            continue
        assert adjustments is not None, "these rows have some"
        # These batches are larger than others, because little more is done than copying the logits.
        for batch in batches(end - start, max(1, logits.shape[1] // 8), logits.device):
            copied = adjustments.apply(logits, slice(start + batch.start, start + batch.stop))
            found.append(group.choose(Logits.of(copied, group.block), of.select(batch)))
    tokens = torch.cat(found).view(-1)
    return torch.empty_like(tokens).index_copy_(0, indices, tokens)


def settings_array(rows: Iterable[Row]) -> array[float]:
    """Return temperature, min_p, top_k, top_p and random number of each row: five float64 a row."""
    settings = array("d")
    for row in rows:
        each = row.params
        settings.extend((each.temperature, each.min_p, each.top_k, each.top_p, row.uniform))
    return settings


def sorted_width(count: int, vocab: int) -> int:
    """Return the number of tokens to sort for ``count``; many counts share one number."""
    width = _SORTED
    while width < count:
        width *= 16
    return min(width, vocab)


def draw_first(x: Logits, peak: Tensor, settings: DrawSettings, width: int) -> Tensor:
    """Take each row's most probable token.

    This and the other draws return token ids ``[n, 1]``. Arguments of all four: logits, the largest
    logit of each row ``[n, 1]``, settings, and the number of most probable tokens to sort.
    """
    return first_ids(x)


def draw_any(x: Logits, peak: Tensor, settings: DrawSettings, width: int) -> Tensor:
    """Draw from the whole vocabulary."""
    by_block = _mass_by_blocks(x, peak, settings)
    mass = by_block.cumsum(-1)
    target = _target(mass[:, -1:], settings)
    block = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[1] - 1)
    target -= (mass - by_block).gather(1, block)
    ids = block * _MASS_BLOCK + torch.arange(_MASS_BLOCK, device=block.device)
    values = x.take(ids.clamp(max=x.vocab - 1)).masked_fill_(ids >= x.vocab, -torch.inf)
    mass = _integer_weights(values, peak, settings, x.vocab).cumsum(-1)
    column = torch.searchsorted(mass, target, right=True)
    return (block * _MASS_BLOCK + column).clamp_(max=x.vocab - 1)


def draw_top_k(x: Logits, peak: Tensor, settings: DrawSettings, width: int) -> Tensor:
    """Draw from the ``top_k`` most probable tokens, at most ``width``, cut to ``top_p``."""
    ids = top_ids(x, width)
    weights = _integer_weights(x.take(ids), peak, settings, x.vocab)
    beyond = torch.arange(width, device=ids.device) >= settings.top_k
    mass = weights.masked_fill_(beyond, 0).cumsum(-1)
    needed = _needed_mass(mass[:, -1:], settings)
    return _pick_sorted(ids, mass, torch.searchsorted(mass, needed), settings)


def draw_top_p(x: Logits, peak: Tensor, settings: DrawSettings, width: int) -> Tensor:
    """Draw from the nucleus: the fewest most probable tokens whose mass reaches ``top_p``."""
    total = _mass_by_blocks(x, peak, settings).sum(-1, keepdim=True)
    needed = _needed_mass(total, settings)
    ids = top_ids(x, width)
    mass = _integer_weights(x.take(ids), peak, settings, x.vocab).cumsum(-1)
    end = torch.searchsorted(mass, needed)
    token = _pick_sorted(ids, mass, end, settings)
    wider = end == width  # True if the nucleus has more than ``width`` tokens
    for batch in x.batches(x.vocab):
        if wider[batch].any():
            of = settings.select(batch)
            values = x.select(batch).read()
            weights = _integer_weights(values, peak[batch], of, x.vocab)
            mass = _nucleus_weights(values, weights, needed[batch]).cumsum(-1)
            wide = _pick(mass, mass[:, -1:], of).clamp_(max=x.vocab - 1)
            token[batch] = torch.where(wider[batch], wide, token[batch])
    return token


def _mass_by_blocks(x: Logits, peak: Tensor, settings: DrawSettings) -> Tensor:
    """Return the sums of the integer weights of ``_MASS_BLOCK`` tokens each, ``[n, blocks]``."""
    parts: list[Tensor] = []
    scratch = None
    for batch in x.batches(x.vocab):
        values = x.select(batch).read()
        if scratch is None:
            # Reused: allocating for each batch would take longer than the arithmetic, because the
            # C library returns the memory to the system, which clears it again.
            scratch = values.new_empty((2, *values.shape), dtype=torch.float64)
        of = settings.select(batch)
        weights = _integer_weights(values, peak[batch], of, x.vocab, scratch[:, : len(values)])
        parts.append(by_blocks(weights, _MASS_BLOCK, Tensor.sum))
    return torch.cat(parts)


def _integer_weights(
    x: Tensor, peak: Tensor, settings: DrawSettings, vocab: int, scratch: Tensor | None = None
) -> Tensor:
    """Return int64 weights in proportion to the probabilities of ``x``.

    The weights of all ``vocab`` tokens have a sum below 2**62. A token that is less than about
    2**-44 times as probable as the first one has weight 0. The result is in ``scratch``, if given:
    two tensors of the shape of ``x``, in float64.
    """
    ratio, other = x.new_empty((2, *x.shape), dtype=torch.float64) if scratch is None else scratch
    ratio.copy_(x).sub_(peak)  # log of the ratio to the first token
    if settings.scaled:
        ratio.div_(settings.temperature)
    ratio.exp_()
    if settings.cut:
        ratio.mul_(torch.ge(ratio, settings.min_p, out=other))  # multiply by 0 or 1
    return other.view(torch.int64).copy_(ratio.mul_(2.0 ** (62 - vocab.bit_length())))


def _needed_mass(total: Tensor, settings: DrawSettings) -> Tensor:
    return torch.minimum((total * settings.top_p).ceil().long().clamp_(min=1), total)


def _target(total: Tensor, settings: DrawSettings) -> Tensor:
    """Return the mass at the fraction ``uniform`` of ``total``."""
    return torch.minimum((total * settings.uniform).long(), total - 1)


def _pick(mass: Tensor, total: Tensor, settings: DrawSettings) -> Tensor:
    """Return the column where cumulative ``mass`` passes the fraction ``uniform`` of ``total``."""
    # The first column above the target never has weight 0.
    return torch.searchsorted(mass, _target(total, settings), right=True)


def _pick_sorted(ids: Tensor, mass: Tensor, end: Tensor, settings: DrawSettings) -> Tensor:
    """Draw a token from sorted ``ids`` by inverse CDF; columns after ``end`` are excluded."""
    last = ids.shape[1] - 1
    column = _pick(mass, mass.gather(1, end.clamp(max=last)), settings)
    return ids.gather(1, column.clamp_(max=last))


def _nucleus_weights(x: Tensor, weights: Tensor, needed: Tensor) -> Tensor:
    """Return ``weights`` for the first tokens whose sum reaches ``needed``, and 0 for the others.

    The nucleus may be most of the vocabulary, so nothing is sorted. Its last logit is found by a
    radix search: sum the weights by the key's highest digit, find the digit that reaches
    ``needed``, and continue with the tokens of that digit.
    """
    key = 2**31 - 1 - sort_key(x).long()  # not negative, and smallest for the largest logits
    last = torch.zeros_like(needed)
    rest = weights
    for shift in (22, 11, 0):
        digit = (key >> shift) & 2047
        by_digit = needed.new_zeros(len(x), 2048).scatter_add_(1, digit, rest)
        mass = by_digit.cumsum(-1)
        reached = torch.searchsorted(mass, needed).clamp_(max=2047)
        needed = needed - (mass - by_digit).gather(1, reached)
        rest = torch.where(digit == reached, rest, 0)
        last += reached << shift
    # ``rest`` has the tokens with the last logit; the nucleus has those with the lowest ids.
    rest = torch.where(rest.cumsum(-1) - rest < needed, rest, 0)
    return torch.where(key < last, weights, rest)


def token_logprobs(x: Logits, token: Tensor, width: int) -> Tensor:
    """Return logprobs as the GPU operation of this name does, for ids ``[n, 1]``."""
    top = top_ids(x, max(width, min(_RANKED, x.vocab)))
    wanted = torch.cat([token, top[:, :width]], 1)
    same = top == token
    rank = 1 + (same * torch.arange(top.shape[1], device=top.device)).sum(-1, keepdim=True)
    beyond = ~same.any(-1, keepdim=True)
    ids = torch.arange(x.vocab, device=top.device)
    parts: list[Tensor] = []
    scratch = None
    for batch in x.batches(x.vocab):
        values, last = x.select(batch).read(), token[batch]
        if scratch is None:
            scratch = torch.empty_like(values)
        logprobs = torch.log_softmax(values, -1, out=scratch[: len(values)])
        parts.append(logprobs.gather(1, wanted[batch]))
        if beyond[batch].any():
            of = values.gather(1, last)
            before = (values > of) | ((values == of) & (ids < last))
            counted = 1 + before.sum(-1, keepdim=True)
            rank[batch] = torch.where(beyond[batch], counted, rank[batch])
    finite = x.maxima.amax(-1, keepdim=True).isfinite()
    numbers = (finite, rank, torch.cat(parts), top[:, :width])
    return torch.cat([each.double() for each in numbers], 1)
