"""From logits to tokens. What a row gets depends on nothing but that row.

Probabilities become whole numbers before they are added up, so that every order of adding them
gives the same bits. The order of logits is whole as well: the larger first and, of equal ones, the
lower token id first.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_module.runtime.sampling_params import SamplingParams

_BLOCK = 32  # tokens, of which only those of blocks with large maxima are candidates
_WIDE = 256  # tokens of a block, by which a CPU looks for the largest of many
_MANY = 1 << 16
_FIRST = 64  # most probable tokens that are looked at; sixteen times as many for large top_k
_LOW = 2**32 - 1


@dataclass(slots=True)
class Row:
    """A sequence at the step that gives its next token.

    Attributes:
        params: of its request.
        token_ids: of its prompt and its output up to now; read only where a penalty needs them,
            and fastest from an ``array("q")``.
        prompt_len: how many of them are the prompt's.
        uniform: this step's random number, in [0, 1), of the sequence's own generator:
            ``random.Random(seed).random()``.
        banned: tokens not to choose: what ends the sequence, until it has ``min_tokens``.

    """

    params: SamplingParams
    token_ids: Sequence[int] = ()
    prompt_len: int = 0
    uniform: float = 0.0
    banned: Collection[int] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.uniform < 1:
            raise ValueError(f"uniform should be in [0, 1), and is {self.uniform}")


@dataclass(slots=True)
class Logprob:
    """A token's natural log-probability, its rank from 1 on, and its text, for others to fill."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class SampledToken:
    """What :func:`sample` chose; the log-probabilities are None unless they were asked for."""

    token_id: int
    logprob: float | None = None
    logprobs: dict[int, Logprob] | None = None


class LogitsError(ValueError):
    """Rows without a token to choose; ``rows`` has their numbers, and others can go on."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(
            f"the logits of row {', '.join(map(str, rows))} leave no token to choose: there is "
            "NaN or +inf among them, or each of them is -inf or banned; check the model's weights"
        )
        self.rows = rows


def sample(logits: Tensor, rows: Sequence[Row]) -> list[SampledToken]:
    """Choose the next token of each row by its own parameters, as :class:`SamplingParams` says.

    Args:
        logits: ``[rows, vocab]`` of any floating dtype, on any device, worked on in float32 and
            left as they are; probabilities are taken in float64.
        rows: what belongs to each row of ``logits``.

    Returns:
        A token for each row. ``logprobs`` has the token itself first and then the most probable
        ones, under the model's own distribution in float32: before bias, penalties and
        temperature (vLLM's ``raw_logprobs``).

    Raises:
        LogitsError: a row has no token to choose; a ``ValueError`` that names all such rows.
        ValueError: shapes that do not fit, or a token outside of the vocabulary.

    """
    shape = logits.shape
    if len(shape) != 2 or len(rows) != shape[0] or not shape[1] or not logits.is_floating_point():
        raise ValueError(
            f"logits should be floating and of shape [{len(rows)} rows, vocab], and are "
            f"{logits.dtype} {list(logits.shape)}"
        )
    if not rows:
        return []
    if logits.dtype == torch.float64:
        logits = logits.float()
    chosen = [SampledToken(token) for token in _choose(logits, rows)]
    asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if asked:
        tokens = [chosen[index].token_id for index in asked]
        counts = [rows[index].params.logprobs or 0 for index in asked]
        for index, entries in zip(asked, _logprobs(logits, asked, tokens, counts), strict=True):
            token = chosen[index]
            token.logprob, token.logprobs = entries[token.token_id].logprob, entries
    return chosen


def prompt_logprobs(
    logits: Tensor, next_tokens: Sequence[int], top: int
) -> list[dict[int, Logprob]]:
    """Return the log-probabilities of a prompt's tokens, each given those before it.

    Args:
        logits: ``[tokens, vocab]`` of any floating dtype.
        next_tokens: the token that follows each position.
        top: how many of the most probable tokens follow it in its entry.

    Raises:
        ValueError: numbers of tokens that differ, one outside of the vocabulary, or logits that
            are no distribution.

    """
    if logits.dim() != 2 or len(logits) != len(next_tokens):
        raise ValueError(
            f"logits should have the shape [{len(next_tokens)} tokens, vocab], and have "
            f"{list(logits.shape)}"
        )
    return _logprobs(logits, range(len(logits)), next_tokens, [top] * len(logits))


def _choose(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    if all(row.params.greedy and not _adjusted(row) for row in rows):
        token = _argmax(logits)
        token = torch.where(logits.gather(1, token).isfinite(), token, -1)
        tokens: list[int] = token.squeeze(1).tolist()
    else:
        vocab = logits.shape[1]
        groups: dict[tuple[_Draw, int, bool], list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault((*_way(row.params, vocab), _adjusted(row)), []).append(index)
        tokens = [-1] * len(rows)
        for (draw, width, adjusted), members in groups.items():
            for part in _parts(members, logits):
                these = [rows[index] for index in part]
                x = logits.index_select(0, torch.tensor(part, device=logits.device)).float()
                if adjusted:
                    _adjust(x, these)
                for index, token_id in zip(part, _draw_all(x, these, draw, width), strict=True):
                    tokens[index] = token_id
    broken = [index for index, token_id in enumerate(tokens) if token_id < 0]
    if broken:
        raise LogitsError(broken)
    return tokens


def _argmax(x: Tensor) -> Tensor:
    """Return the id ``[n, 1]`` of each row's first token; NaN comes before numbers."""
    vocab = x.shape[1]
    if x.device.type == "cpu" and x.numel() > _MANY:
        # A CPU finds maxima several times as fast as it finds where they are: so first the block.
        whole = vocab - vocab % _WIDE
        x = x.float()
        maxima = x[:, :whole].view(len(x), -1, _WIDE).amax(-1)
        if whole < vocab:
            maxima = torch.cat((maxima, x[:, whole:].amax(-1, keepdim=True)), 1)
        start = maxima.argmax(-1, keepdim=True) * _WIDE
        ids = (start + torch.arange(_WIDE)).clamp_(max=vocab - 1)
        return start + x.gather(1, ids).argmax(-1, keepdim=True)
    return x.argmax(-1, keepdim=True)  # of equal ones the first


def _parts(members: Sequence[int], logits: Tensor) -> list[Sequence[int]]:
    # Few enough rows that what is made of them stays in a CPU's cache, and is small beside a model.
    values = 2**17 if logits.device.type == "cpu" else 2**23
    step = max(1, values // logits.shape[1])
    return [members[start : start + step] for start in range(0, len(members), step)]


def _adjusted(row: Row) -> bool:
    params = row.params
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or row.banned
    )


def _adjust(x: Tensor, rows: list[Row]) -> None:
    """Apply bias, penalties and bans to float32 ``x``, in place."""
    flat = x.view(-1)

    def per_token(values: list[float], position: Tensor) -> Tensor:
        return torch.tensor(values, device=x.device)[position // x.shape[1]]

    biases = [row.params.logit_bias or {} for row in rows]
    position = _positions(biases, x)
    flat[position] += torch.tensor(
        [value for bias in biases for value in bias.values()], device=x.device
    )

    # A token that comes twice is written twice, with the same value.
    repetition = [row.params.repetition_penalty for row in rows]
    position = _positions(
        [
            row.token_ids if penalty != 1 else ()
            for row, penalty in zip(rows, repetition, strict=True)
        ],
        x,
    )
    value, penalty = flat[position], per_token(repetition, position)
    flat[position] = torch.where(value > 0, value / penalty, value * penalty)

    presence = [row.params.presence_penalty for row in rows]
    frequency = [row.params.frequency_penalty for row in rows]
    position = _positions(
        [
            row.token_ids[row.prompt_len :] if any(penalties) else ()
            for row, *penalties in zip(rows, presence, frequency, strict=True)
        ],
        x,
    )
    times = torch.bincount(position)[position]
    flat[position] -= per_token(frequency, position) * times + per_token(presence, position)

    flat[_positions([row.banned for row in rows], x)] = -torch.inf


def _positions(tokens: Sequence[Iterable[int]], x: Tensor) -> Tensor:
    """Return where in ``x.view(-1)`` each row's tokens are, in their order."""
    vocab = x.shape[1]
    ids = array("q")
    counts = []
    for several in tokens:
        before = len(ids)
        ids.extend(several)
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


# Chooses from logits [n, vocab] with their maxima and settings, each [n, ...]: tokens [n, 1].
_Draw = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def _way(params: SamplingParams, vocab: int) -> tuple[_Draw, int]:
    """Return how a row draws, and from how many sorted columns."""
    if params.greedy:
        return _draw_peak, 0
    if 0 < params.top_k < vocab:
        width = _FIRST
        while width < params.top_k:
            width *= 16
        return _draw_top_k, min(width, vocab)
    return (_draw_top_p, min(_FIRST, vocab)) if params.top_p < 1 else (_draw_any, 0)


def _draw_all(x: Tensor, rows: list[Row], draw: _Draw, width: int) -> list[int]:
    """Choose from float32 ``x``, one part of one group; -1 for a row that is broken."""
    peak = x.amax(-1, keepdim=True)
    broken = ~peak.isfinite()
    if broken.any():
        x, peak = x.masked_fill(broken, 0), peak.masked_fill(broken, 0)
    settings = torch.tensor(
        [
            (p.temperature, p.min_p, min(p.top_k, x.shape[1]), p.top_p, row.uniform)
            for row in rows
            for p in [row.params]
        ],
        dtype=torch.float64,
    )
    token = draw(x, peak, settings.to(x.device), width)
    tokens: list[int] = token.masked_fill(broken, -1).squeeze(1).tolist()
    return tokens


def _draw_peak(x: Tensor, peak: Tensor, settings: Tensor, width: int) -> Tensor:
    return _argmax(x)


def _draw_any(x: Tensor, peak: Tensor, settings: Tensor, width: int) -> Tensor:
    mass = _weights(x, peak, settings, x.shape[1]).cumsum(-1)
    return _pick(mass, mass[:, -1:], settings)


def _draw_top_k(x: Tensor, peak: Tensor, settings: Tensor, width: int) -> Tensor:
    ids = _first(x, width)
    weights = _weights(x.gather(1, ids), peak, settings, x.shape[1])
    top_k, top_p = settings[:, 2:3], settings[:, 3:4]
    mass = weights.masked_fill_(torch.arange(width, device=x.device) >= top_k, 0).cumsum(-1)
    end = torch.searchsorted(mass, _share(mass[:, -1:], top_p))
    return ids.gather(1, _pick(mass, mass.gather(1, end), settings))


def _draw_top_p(x: Tensor, peak: Tensor, settings: Tensor, width: int) -> Tensor:
    weights = _weights(x, peak, settings, x.shape[1])
    need = _share(weights.sum(-1, keepdim=True), settings[:, 3:4])
    ids = _first(x, width)
    mass = weights.gather(1, ids).cumsum(-1)
    end = torch.searchsorted(mass, need)
    token = ids.gather(1, _pick(mass, mass.gather(1, end.clamp(max=width - 1)), settings))
    short = (end == width).squeeze(1)
    if short.any():
        mass = _nucleus(x[short], weights[short], need[short]).cumsum(-1)
        token[short] = _pick(mass, mass[:, -1:], settings[short])
    return token


def _nucleus(x: Tensor, weights: Tensor, need: Tensor) -> Tensor:
    """Return ``weights`` of the first tokens that together have ``need``, and 0 for the others.

    They may be most of the vocabulary, which is not sorted: where they end is found by adding up
    the weights of tokens with equal digits, and then of those with the next digits equal.
    """
    key = _LOW // 2 - _ordered(x)  # from 0 on, the larger logits first
    last = torch.zeros_like(need)
    rest = weights
    for shift in (22, 11, 0):
        digit = (key >> shift) & 2047
        parts = need.new_zeros(len(x), 2048).scatter_add_(1, digit, rest)
        mass = parts.cumsum(-1)
        at = torch.searchsorted(mass, need)
        need = need - (mass - parts).gather(1, at)
        rest = torch.where(digit == at, rest, 0)
        last += at << shift
    # What is left has the last one's logit, and comes by its ids.
    rest = torch.where(rest.cumsum(-1) - rest < need, rest, 0)
    return torch.where(key < last, weights, rest)


def _weights(x: Tensor, peak: Tensor, settings: Tensor, vocab: int) -> Tensor:
    """Return whole numbers in proportion to the probabilities of ``x``, together below 2**62.

    What is less than some 2**-44 times as probable as the first token has none.
    """
    temperature, min_p = settings[:, 0:1], settings[:, 1:2]
    part = x.double().sub_(peak.double()).div_(temperature).exp_()
    if min_p.any():
        part.masked_fill_(part < min_p, 0)  # the first one's part is 1
    return part.mul_(2.0 ** (62 - vocab.bit_length())).long()


def _share(total: Tensor, top_p: Tensor) -> Tensor:
    return torch.minimum((total * top_p).ceil().long().clamp_(min=1), total)


def _pick(mass: Tensor, total: Tensor, settings: Tensor) -> Tensor:
    """Return the column in whose part of the cumulated ``mass``, up to ``total``, uniform falls."""
    target = torch.minimum((total * settings[:, 4:5]).long(), total - 1)
    # The first column whose mass exceeds it: never one that adds none.
    return torch.searchsorted(mass, target, right=True)


def _first(x: Tensor, width: int) -> Tensor:
    """Return the ids ``[n, width]`` of each row's first tokens, in order; NaN is taken for inf."""
    vocab = x.shape[1]
    ids = torch.arange(vocab, device=x.device).expand(len(x), -1)
    if 2 * _BLOCK * width <= vocab:
        # A token among the first is in one of the blocks that are first by their maxima: each of
        # these has a token that precedes whatever is in the others.
        whole = vocab - vocab % _BLOCK
        maxima = [x[:, :whole].view(len(x), -1, _BLOCK).amax(-1)]
        if whole < vocab:
            maxima.append(x[:, whole:].amax(-1, keepdim=True))
        block = _first(torch.cat(maxima, 1), width)
        ids = (block.unsqueeze(-1) * _BLOCK + torch.arange(_BLOCK, device=x.device)).flatten(1)
        x = x.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, -torch.inf)
    key = (_ordered(x) << 32) + (_LOW - ids)  # without ties, which topk breaks as it likes
    return _LOW - (key.topk(width).values & _LOW)


def _ordered(x: Tensor) -> Tensor:
    """Return whole numbers of 32 bits, as int64, that are ordered as ``x`` is."""
    # A float's bits are, once those of negative ones are turned round; adding 0 makes 0 of -0.
    bits = x.float().nan_to_num(torch.inf, torch.inf, -torch.inf).add_(0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _logprobs(
    logits: Tensor, members: Sequence[int], tokens: Sequence[int], counts: Sequence[int]
) -> list[dict[int, Logprob]]:
    """Return the entry of each row's token and of its ``count`` first ones."""
    vocab = logits.shape[1]
    outside = [token for token in tokens if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"token {outside[0]} is outside of the vocabulary of {vocab}")
    entries: list[dict[int, Logprob]] = []
    broken: list[int] = []
    ids = torch.arange(vocab, device=logits.device)
    for part in _parts(members, logits):
        here = slice(len(entries), len(entries) + len(part))
        x = logits.index_select(0, torch.tensor(part, device=logits.device)).float()
        broken += [
            index for index, ok in zip(part, x.amax(-1).isfinite().tolist(), strict=True) if not ok
        ]
        logprobs = x.log_softmax(-1)
        token = torch.tensor(tokens[here], device=logits.device).unsqueeze(1)
        value = x.gather(1, token)
        rank = 1 + ((x > value) | ((x == value) & (ids < token))).sum(-1)
        width = min(max(counts[here]), vocab)
        first = _first(x, width) if width else token[:, :0]
        both = torch.cat([token, first], 1)
        for token_id, its_rank, values, top, count in zip(
            tokens[here],
            rank.tolist(),
            logprobs.gather(1, both).tolist(),
            first.tolist(),
            counts[here],
            strict=True,
        ):
            entry = {token_id: Logprob(values[0], its_rank)}
            for column in range(min(count, vocab)):
                entry.setdefault(top[column], Logprob(values[1 + column], 1 + column))
            entries.append(entry)
    if broken:
        raise LogitsError(broken)
    return entries
