"""Which token each sequence gets: what a request's parameters ask of :mod:`sampling_ops`.

A row of logits gets the same token and logprobs in every batch, because nothing but the row and
its parameters decides them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_module.runtime import sampling_ops as ops
from vllm_module.runtime.sampling_params import SamplingParams

_SORTED = 64  # most probable tokens that are sorted at first; 16 times as many for a large top_k
_CPU_BATCH = 2**17  # logits whose float64 copies stay in a CPU's cache
_GPU_BATCH = 2**23  # logits whose copies are small beside a model

_Draw = Callable[[Tensor, Tensor, ops.Settings, int], Tensor]


@dataclass(slots=True)
class Row:
    """How to choose the next token of a sequence.

    Attributes:
        params: of the request.
        token_ids: the prompt and the output so far; read only for penalties, and fastest from an
            ``array("q")``.
        prompt_len: how many of ``token_ids`` are the prompt's.
        uniform: a random number in [0, 1), from the sequence's own generator.
        banned: token ids that may not be chosen.

    Raises:
        ValueError: ``uniform`` is not in [0, 1).

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
    """A token's natural log-probability, its rank from 1, and its text, which callers fill in."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class SampledToken:
    """A token that :func:`sample` chose; ``logprob`` and ``logprobs`` are None unless asked for."""

    token_id: int
    logprob: float | None = None
    logprobs: dict[int, Logprob] | None = None


class LogitsError(ValueError):
    """Some rows of logits leave no token to choose; ``rows`` has their indices."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(
            f"the logits of row {', '.join(map(str, rows))} leave no token to choose: they contain "
            "NaN or +inf, or every token is -inf or banned; check the model's weights"
        )
        self.rows = rows


def sample(logits: Tensor, rows: Sequence[Row]) -> list[SampledToken]:
    """Choose the next token of each row as its :class:`SamplingParams` say.

    Args:
        logits: ``[rows, vocab]`` of any floating dtype, on any device; not modified. Logits are
            converted to float32, and probabilities computed in float64.
        rows: one for each row of ``logits``.

    Returns:
        A token for each row. ``logprobs`` has the token itself first and then the most probable
        ones, under the model's own distribution in float32: before bias, penalties and
        temperature (vLLM's ``raw_logprobs``).

    Raises:
        LogitsError: rows have no token to choose. The other rows can be sampled without them.
        ValueError: ``logits`` has another shape or dtype, or a token id is outside of the
            vocabulary.

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
    sampled = [SampledToken(token_id) for token_id in _choose(logits, rows)]
    asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if asked:
        tokens = [sampled[index].token_id for index in asked]
        counts = [rows[index].params.logprobs or 0 for index in asked]
        for index, entries in zip(asked, _logprobs(logits, asked, tokens, counts), strict=True):
            token = sampled[index]
            token.logprob, token.logprobs = entries[token.token_id].logprob, entries
    return sampled


def prompt_logprobs(
    logits: Tensor, next_tokens: Sequence[int], count: int
) -> list[dict[int, Logprob]]:
    """Return the logprobs of a prompt's tokens, each given the tokens before it.

    Args:
        logits: ``[tokens, vocab]`` of any floating dtype.
        next_tokens: the token after each position.
        count: how many of the most probable tokens each entry has after the prompt's own.

    Raises:
        LogitsError: rows contain NaN or +inf, or are all -inf.
        ValueError: ``next_tokens`` has another length, or a token outside of the vocabulary.

    """
    if logits.dim() != 2 or len(logits) != len(next_tokens):
        raise ValueError(
            f"logits should have the shape [{len(next_tokens)} tokens, vocab], and have "
            f"{list(logits.shape)}"
        )
    return _logprobs(logits, range(len(logits)), next_tokens, [count] * len(logits))


def _choose(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Return a token id for each row; rows that are sampled alike are sampled together."""
    if all(row.params.greedy and not _is_adjusted(row) for row in rows):
        token = ops.argmax(logits)
        token = torch.where(logits.gather(1, token).isfinite(), token, -1)
        tokens: list[int] = token.squeeze(1).tolist()
    else:
        vocab = logits.shape[1]
        groups: dict[tuple[_Draw, int, bool], list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault((*_method(row.params, vocab), _is_adjusted(row)), []).append(index)
        tokens = [-1] * len(rows)
        for (draw, width, adjusted), members in groups.items():
            for batch in _batches(members, logits):
                of_batch = [rows[index] for index in batch]
                x = _select(logits, batch)
                if adjusted:
                    _adjust(x, of_batch)
                for index, token_id in zip(batch, _draw(x, of_batch, draw, width), strict=True):
                    tokens[index] = token_id
    broken = [index for index, token_id in enumerate(tokens) if token_id < 0]
    if broken:
        raise LogitsError(broken)
    return tokens


def _method(params: SamplingParams, vocab: int) -> tuple[_Draw, int]:
    """Return how to draw, and how many of the most probable tokens to sort for it."""
    if params.greedy:
        return ops.draw_first, 0
    if 0 < params.top_k < vocab:
        width = _SORTED
        while width < params.top_k:
            width *= 16
        return ops.draw_top_k, min(width, vocab)
    return (ops.draw_top_p, min(_SORTED, vocab)) if params.top_p < 1 else (ops.draw_any, 0)


def _is_adjusted(row: Row) -> bool:
    """Whether a bias, a penalty or a ban changes the row's logits."""
    params = row.params
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or row.banned
    )


def _adjust(x: Tensor, rows: list[Row]) -> None:
    """Apply biases, penalties and bans to float32 ``x``, in place."""
    params = [row.params for row in rows]
    ops.add_bias(x, [p.logit_bias or {} for p in params])
    repeated = [row.token_ids if row.params.repetition_penalty != 1 else () for row in rows]
    ops.penalize_repetition(x, repeated, [p.repetition_penalty for p in params])
    generated = [
        row.token_ids[row.prompt_len :]
        if row.params.presence_penalty or row.params.frequency_penalty
        else ()
        for row in rows
    ]
    presence = [p.presence_penalty for p in params]
    ops.penalize_occurrences(x, generated, presence, [p.frequency_penalty for p in params])
    ops.ban(x, [row.banned for row in rows])


def _draw(x: Tensor, rows: list[Row], draw: _Draw, width: int) -> list[int]:
    """Return the token ids that ``draw`` chooses from float32 ``x``; -1 for a broken row."""
    peak = x.amax(-1, keepdim=True)
    broken = ~peak.isfinite()
    if broken.any():
        x, peak = x.masked_fill(broken, 0), peak.masked_fill(broken, 0)
    values = [
        (p.temperature, p.min_p, min(p.top_k, x.shape[1]), p.top_p, row.uniform)
        for row in rows
        for p in [row.params]
    ]
    settings = torch.tensor(values, dtype=torch.float64).to(x.device)
    token = draw(x, peak, ops.Settings(*torch.split(settings, 1, dim=1)), width)
    tokens: list[int] = token.masked_fill(broken, -1).squeeze(1).tolist()
    return tokens


def _logprobs(
    logits: Tensor, members: Sequence[int], tokens: Sequence[int], counts: Sequence[int]
) -> list[dict[int, Logprob]]:
    """Return, for each row of ``members``, its token and its ``count`` most probable ones."""
    vocab = logits.shape[1]
    outside = [token for token in tokens if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"token {outside[0]} is outside of the vocabulary of {vocab}")
    entries: list[dict[int, Logprob]] = []
    broken: list[int] = []
    ids = torch.arange(vocab, device=logits.device)
    for batch in _batches(members, logits):
        done = slice(len(entries), len(entries) + len(batch))
        x = _select(logits, batch)
        finite = x.amax(-1).isfinite().tolist()
        broken += [index for index, ok in zip(batch, finite, strict=True) if not ok]
        width = min(max(counts[done]), vocab)
        token = torch.tensor(tokens[done], device=logits.device).unsqueeze(1)
        results = (result.tolist() for result in ops.token_logprobs(x, token, ids, width))
        for token_id, count, values, rank, top in zip(
            tokens[done], counts[done], *results, strict=True
        ):
            entry = {token_id: Logprob(values[0], rank)}
            for column in range(min(count, vocab)):
                entry.setdefault(top[column], Logprob(values[1 + column], 1 + column))
            entries.append(entry)
    if broken:
        raise LogitsError(broken)
    return entries


def _select(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Return a float32 copy of some rows."""
    return logits.index_select(0, torch.tensor(rows, device=logits.device)).float()


def _batches(rows: Sequence[int], logits: Tensor) -> list[Sequence[int]]:
    size = _CPU_BATCH if logits.device.type == "cpu" else _GPU_BATCH
    step = max(1, size // logits.shape[1])
    return [rows[start : start + step] for start in range(0, len(rows), step)]
