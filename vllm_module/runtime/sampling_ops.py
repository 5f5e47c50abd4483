"""The arithmetic of sampling, on logits ``x`` ``[n rows, vocab]`` in float32.

Probabilities become integers before they are summed, so every order of summation gives the same
bits. Tokens have one order: by logit, the largest first, and equal logits by token id. No row
affects another. Results on a CPU and on a GPU have the same shapes and meaning.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ARGMAX_BLOCK = 256  # tokens
_ARGMAX_BY_BLOCKS = 1 << 16  # logits, above which a CPU searches by blocks
_TOP_BLOCK = 32  # tokens
_LOW_BITS = 2**32 - 1


class Settings(NamedTuple):
    """Sampling parameters of n rows, each ``[n, 1]`` in float64; ``uniform`` is in [0, 1)."""

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor


def add_bias(x: Tensor, biases: Sequence[Mapping[int, float]]) -> None:
    """Add each row's biases, by token id, in place."""
    values = [value for bias in biases for value in bias.values()]
    x.view(-1)[_flat_indices(biases, x)] += torch.tensor(values, device=x.device)


def penalize_repetition(
    x: Tensor, token_ids: Sequence[Iterable[int]], penalties: Sequence[float]
) -> None:
    """Divide positive logits of each row's tokens by its penalty, multiply others, in place."""
    flat, index = x.view(-1), _flat_indices(token_ids, x)
    value, penalty = flat[index], _per_token(penalties, index, x)
    # A token that occurs twice is written twice, with the same value.
    flat[index] = torch.where(value > 0, value / penalty, value * penalty)


def penalize_occurrences(
    x: Tensor,
    token_ids: Sequence[Iterable[int]],
    presence: Sequence[float],
    frequency: Sequence[float],
) -> None:
    """Subtract ``presence + frequency * occurrences`` from each row's tokens, in place."""
    index = _flat_indices(token_ids, x)
    occurrences = torch.bincount(index)[index]
    penalty = _per_token(frequency, index, x) * occurrences + _per_token(presence, index, x)
    x.view(-1)[index] -= penalty


def ban(x: Tensor, token_ids: Sequence[Iterable[int]]) -> None:
    """Set the logits of each row's tokens to -inf, in place."""
    x.view(-1)[_flat_indices(token_ids, x)] = -torch.inf


def _per_token(values: Sequence[float], index: Tensor, x: Tensor) -> Tensor:
    return torch.tensor(values, device=x.device)[index // x.shape[1]]


def _flat_indices(token_ids: Sequence[Iterable[int]], x: Tensor) -> Tensor:
    """Return the indices into ``x.view(-1)`` of each row's tokens, in their order."""
    vocab = x.shape[1]
    ids = array("q")
    counts = []
    for row in token_ids:
        before = len(ids)
        ids.extend(row)
        counts.append(len(ids) - before)
    if not ids:
        return torch.empty(0, dtype=torch.long, device=x.device)
    flat = torch.frombuffer(ids, dtype=torch.long)
    outside = flat[(flat < 0) | (flat >= vocab)]
    if len(outside):
        raise ValueError(
            f"token {int(outside[0])} of a row is outside of the vocabulary of {vocab}"
        )
    starts = torch.arange(0, len(x) * vocab, vocab).repeat_interleave(torch.tensor(counts))
    return (flat + starts).to(x.device)


def argmax(x: Tensor) -> Tensor:
    """Return the id ``[n, 1]`` of each row's first token, NaN before all numbers; any dtype."""
    vocab = x.shape[1]
    if x.device.type == "cpu" and x.numel() > _ARGMAX_BY_BLOCKS:
        # A CPU computes maxima several times as fast as their indices: find the block first.
        whole = vocab - vocab % _ARGMAX_BLOCK
        x = x.float()
        maxima = x[:, :whole].view(len(x), -1, _ARGMAX_BLOCK).amax(-1)
        if whole < vocab:
            maxima = torch.cat((maxima, x[:, whole:].amax(-1, keepdim=True)), 1)
        start = maxima.argmax(-1, keepdim=True) * _ARGMAX_BLOCK
        ids = (start + torch.arange(_ARGMAX_BLOCK)).clamp_(max=vocab - 1)
        return start + x.gather(1, ids).argmax(-1, keepdim=True)
    return x.argmax(-1, keepdim=True)  # the first of equal logits


def top_ids(x: Tensor, width: int) -> Tensor:
    """Return the ids ``[n, width]`` of each row's first tokens, in order; NaN counts as inf."""
    vocab = x.shape[1]
    ids = torch.arange(vocab, device=x.device).expand(len(x), -1)
    if 2 * _TOP_BLOCK * width <= vocab:
        # The first tokens are in the ``width`` blocks with the largest maxima: each of these
        # blocks has a token that precedes all tokens of the other blocks.
        whole = vocab - vocab % _TOP_BLOCK
        maxima = [x[:, :whole].view(len(x), -1, _TOP_BLOCK).amax(-1)]
        if whole < vocab:
            maxima.append(x[:, whole:].amax(-1, keepdim=True))
        block = top_ids(torch.cat(maxima, 1), width)
        within = torch.arange(_TOP_BLOCK, device=x.device)
        ids = (block.unsqueeze(-1) * _TOP_BLOCK + within).flatten(1)
        x = x.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, -torch.inf)
    # topk returns equal keys in any order, so the id is part of the key.
    key = (_sort_key(x) << 32) + (_LOW_BITS - ids)
    return _LOW_BITS - (key.topk(width).values & _LOW_BITS)


def _sort_key(x: Tensor) -> Tensor:
    """Return 32-bit integers, as int64, in the order of ``x``."""
    # The bits of a float are in its order once negative ones are inverted; adding 0 turns -0 to 0.
    bits = x.float().nan_to_num(torch.inf, torch.inf, -torch.inf).add_(0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def draw_first(x: Tensor, peak: Tensor, settings: Settings, width: int) -> Tensor:
    """Take each row's most probable token; this and the draws return token ids ``[n, 1]``.

    Arguments of all four: logits, their maxima ``[n, 1]``, settings, and how many of the most
    probable tokens to sort.
    """
    return argmax(x)


def draw_any(x: Tensor, peak: Tensor, settings: Settings, width: int) -> Tensor:
    """Draw from the whole vocabulary."""
    mass = _integer_weights(x, peak, settings).cumsum(-1)
    return _pick(mass, mass[:, -1:], settings)


def draw_top_k(x: Tensor, peak: Tensor, settings: Settings, width: int) -> Tensor:
    """Draw from the ``top_k`` most probable tokens, at most ``width``, cut to ``top_p``."""
    ids = top_ids(x, width)
    weights = _integer_weights(x.gather(1, ids), peak, settings, x.shape[1])
    beyond = torch.arange(width, device=x.device) >= settings.top_k
    mass = weights.masked_fill_(beyond, 0).cumsum(-1)
    end = torch.searchsorted(mass, _needed_mass(mass[:, -1:], settings))
    return ids.gather(1, _pick(mass, mass.gather(1, end), settings))


def draw_top_p(x: Tensor, peak: Tensor, settings: Settings, width: int) -> Tensor:
    """Draw from the nucleus: the fewest most probable tokens whose mass reaches ``top_p``."""
    weights = _integer_weights(x, peak, settings)
    needed = _needed_mass(weights.sum(-1, keepdim=True), settings)
    ids = top_ids(x, width)
    mass = weights.gather(1, ids).cumsum(-1)
    end = torch.searchsorted(mass, needed)
    token = ids.gather(1, _pick(mass, mass.gather(1, end.clamp(max=width - 1)), settings))
    wider = (end == width).squeeze(1)  # rows whose nucleus has more than ``width`` tokens
    if wider.any():
        mass = _nucleus_weights(x[wider], weights[wider], needed[wider]).cumsum(-1)
        token[wider] = _pick(mass, mass[:, -1:], Settings(*(each[wider] for each in settings)))
    return token


def _integer_weights(x: Tensor, peak: Tensor, settings: Settings, vocab: int = 0) -> Tensor:
    """Return int64 weights in proportion to the probabilities of ``x``, with a sum below 2**62.

    ``vocab`` is the size of the vocabulary if ``x`` has only some of it. A token that is less than
    about 2**-44 times as probable as the first one has the weight 0.
    """
    ratio = x.double().sub_(peak.double()).div_(settings.temperature).exp_()  # to the first token
    if settings.min_p.any():
        ratio.masked_fill_(ratio < settings.min_p, 0)
    return ratio.mul_(2.0 ** (62 - (vocab or x.shape[1]).bit_length())).long()


def _needed_mass(total: Tensor, settings: Settings) -> Tensor:
    return torch.minimum((total * settings.top_p).ceil().long().clamp_(min=1), total)


def _pick(mass: Tensor, total: Tensor, settings: Settings) -> Tensor:
    """Return the column of cumulative ``mass`` at the fraction ``uniform`` of ``total``."""
    target = torch.minimum((total * settings.uniform).long(), total - 1)
    # The first column above the target: never one of weight 0.
    return torch.searchsorted(mass, target, right=True)


def _nucleus_weights(x: Tensor, weights: Tensor, needed: Tensor) -> Tensor:
    """Return ``weights`` of the first tokens that together have ``needed``, and 0 for the others.

    The nucleus may be most of the vocabulary, so nothing is sorted. Its last logit is found by a
    radix search: sum the weights by the key's highest digit, find the digit that reaches
    ``needed``, and go on with the tokens of that digit.
    """
    key = _LOW_BITS // 2 - _sort_key(x)  # not negative, the largest logits first
    last = torch.zeros_like(needed)
    rest = weights
    for shift in (22, 11, 0):
        digit = (key >> shift) & 2047
        by_digit = needed.new_zeros(len(x), 2048).scatter_add_(1, digit, rest)
        mass = by_digit.cumsum(-1)
        reached = torch.searchsorted(mass, needed)
        needed = needed - (mass - by_digit).gather(1, reached)
        rest = torch.where(digit == reached, rest, 0)
        last += reached << shift
    # ``rest`` has the tokens with the last logit; of these, the lowest ids are in the nucleus.
    rest = torch.where(rest.cumsum(-1) - rest < needed, rest, 0)
    return torch.where(key < last, weights, rest)


def token_logprobs(
    x: Tensor, token: Tensor, ids: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs of each row's token and of its ``width`` most probable tokens.

    Args:
        x: logits ``[n, vocab]``.
        token: ids ``[n, 1]``.
        ids: ``arange(vocab)``, which callers with several batches make once.
        width: at most ``vocab``.

    Returns:
        Natural logprobs ``[n, 1 + width]``, the token's first; its rank ``[n]``, from 1; and the
        ids of the most probable tokens ``[n, width]``.

    """
    logprobs = x.log_softmax(-1)
    value = x.gather(1, token)
    rank = 1 + ((x > value) | ((x == value) & (ids < token))).sum(-1)
    top = top_ids(x, width) if width else token[:, :0]
    return logprobs.gather(1, torch.cat([token, top], 1)), rank, top
