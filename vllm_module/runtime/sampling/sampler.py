"""Sampling: choosing tokens and computing logprobs for a batch of rows.

A row of logits gets the same token and logprobs in every batch, because they depend only on the row
and its parameters. Parameters are copied to the device at once, results are copied back at once,
and nothing waits for the device before the results are read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_module.kernels.rows.draw_tokens import draw_tokens
from vllm_module.kernels.rows.token_logprobs import token_logprobs
from vllm_module.runtime.sampling import ops as ops
from vllm_module.runtime.sampling.adjustments import Adjustments
from vllm_module.runtime.sampling.block_ops import FIRST, SEVERAL, Logits, batches, first_ids
from vllm_module.runtime.sampling.processed import processed_logits
from vllm_module.runtime.sampling.row import Row, check_tokens
from vllm_module.runtime.sampling.token_counts import TokenCounts
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.transfers import Download, Numbers, Wait, synchronize, upload


@dataclass(slots=True)
class Logprob:
    """A token's natural log-probability, its rank from 1, and its text, set by callers."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class SampledToken:
    """A chosen token; ``logprob`` and ``logprobs`` are None unless they were requested."""

    token_id: int
    logprob: float | None = None
    logprobs: dict[int, Logprob] | None = None


class LogitsError(ValueError):
    """Some rows of logits give no logprobs; ``rows`` has their indices."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(
            f"the logits of row {', '.join(map(str, rows))} contain NaN or +inf, or are all -inf: "
            "check the model's weights"
        )
        self.rows = rows


class Sampled:
    """Tokens that :func:`sample` launched on a device, and that are not read yet.

    Args:
        tokens: int64 ``[rows]``, on the device; -1 for a row that leaves no token to choose.
        ranked: rows that requested logprobs, in groups.
        logprobs: results of :func:`_logprobs` for each group.

    """

    def __init__(
        self,
        tokens: Tensor,
        ranked: Sequence[_Ranked] = (),
        logprobs: Sequence[Tensor] = (),
    ) -> None:
        self.tokens, self._ranked = tokens, ranked
        self._download = Download(torch.cat([tokens, *logprobs]) if ranked else tokens)

    def read(self, wait: Wait = synchronize) -> list[SampledToken | None]:
        """Wait and return each row's token; None if its logits contain NaN or +inf.

        None also stands for a row of which every token is -inf or banned. ``logprobs`` has the
        token itself first and then the most probable ones, under the model's own distribution in
        float32: before bias, penalties and temperature (vLLM's ``raw_logprobs``), unless
        :func:`sample` was asked for processed ones.
        """
        numbers = self._download.read(wait)
        end = len(self.tokens)
        sampled: list[SampledToken | None] = [
            SampledToken(int(number)) if number >= 0 else None for number in numbers[:end]
        ]
        for each in self._ranked:
            start, end = end, end + len(each.rows) * _entry_size(max(each.counts))
            ids = [int(numbers[row]) for row in each.rows]
            for row, entry in zip(each.rows, _entries(numbers[start:end], ids, each), strict=True):
                token = sampled[row]
                if token is None or entry is None:
                    sampled[row] = None
                else:
                    token.logprob, token.logprobs = entry[token.token_id].logprob, entry
        return sampled


@torch.inference_mode()
def sample(
    logits: Tensor,
    rows: Sequence[Row],
    counts: TokenCounts | None = None,
    first: Callable[[Tensor], Tensor] | None = None,
    *,
    processed: bool = False,
) -> Sampled:
    """Have the device choose the next token of each row as its :class:`SamplingParams` say.

    Args:
        logits: ``[rows, vocab]`` of any floating dtype, on any device; not modified. Logits are
            converted to float32, and probabilities computed in float64.
        rows: one for each row of ``logits``.
        counts: what earlier calls have counted for rows with a key; brought up to date.
        first: returns what :func:`first_tokens` does; by default that function.
        processed: whether logprobs are of the distribution that tokens are drawn from (vLLM's
            ``processed_logprobs``), and not of the model's own.

    Raises:
        ValueError: ``logits`` has another shape or dtype, a token id is outside of the
            vocabulary, or two rows have the same key.

    """
    shape = logits.shape
    if len(shape) != 2 or len(rows) != shape[0] or not shape[1] or not logits.is_floating_point():
        raise ValueError(
            f"logits should be floating and of shape [{len(rows)} rows, vocab], and are "
            f"{logits.dtype} {list(logits.shape)}"
        )
    if not rows:
        return Sampled(torch.empty(0, dtype=torch.int64, device=logits.device))
    logits = _contiguous(logits)
    if all(row.plain for row in rows):
        return Sampled((first or first_tokens)(logits))
    vocab = shape[1]
    # A CPU draws in groups. A GPU draws all rows at once, unadjusted rows with the others.
    groups = ops.group_rows(rows, vocab) if logits.is_cpu else []
    order = [index for group in groups for index in group.indices] or list(range(len(rows)))
    adjusts = any(row.adjusted for row in rows)
    changed = [index for index in order if rows[index].adjusted or (adjusts and not groups)]
    adjustments = None
    if changed:
        counts = TokenCounts() if counts is None else counts
        adjustments = Adjustments([rows[index] for index in changed], changed, vocab, counts)
    ranked = _by_width([row.params.logprobs for row in rows], vocab)
    arrays: list[Numbers] = [array("q", order), ops.settings_array(rows[index] for index in order)]
    arrays += [array("q", each.rows) for each in ranked]
    if adjustments is not None:
        arrays += adjustments.arrays
    indices, settings, *sent = upload(arrays, logits.device)
    settings = settings.view(-1, 5)
    if adjustments is not None:
        adjustments.place(sent[len(ranked) :])
    masked = _masked(logits, rows) if any(row.mask is not None for row in rows) else logits
    if groups:
        tokens = ops.choose(masked, groups, settings, indices, adjustments)
    else:
        tokens = _draw(masked, rows, settings, indices, adjustments)
    logprobs = []
    if processed and ranked:
        logits = _as_drawn(masked, settings, indices, changed, adjustments)
    for each, where in zip(ranked, sent, strict=False):
        own = tokens if len(where) == len(tokens) else tokens.index_select(0, where)
        logprobs.append(_logprobs(logits, where, own, max(each.counts)))
    return Sampled(tokens, ranked, logprobs)


def _as_drawn(
    logits: Tensor,
    settings: Tensor,
    indices: Tensor,
    changed: Sequence[int],
    adjustments: Adjustments | None,
) -> Tensor:
    """Return the logits of all rows after adjustments, temperature and what it excludes."""
    own = torch.empty_like(settings).index_copy_(0, indices, settings)
    adjusted = logits.float().clone()
    if adjustments is not None:
        (at,) = upload([array("q", changed)], logits.device)
        for batch in batches(len(changed), max(1, logits.shape[1] // 8), logits.device):
            adjusted.index_copy_(0, at[batch], adjustments.apply(logits, batch))
    return processed_logits(adjusted, own)


def _masked(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return logits that are -inf where a row's mask allows no token; broken ones stay broken."""
    at = [index for index, row in enumerate(rows) if row.mask is not None]
    words = torch.stack([row.mask for row in rows if row.mask is not None]).to(logits.device)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = (words.unsqueeze(-1) >> places & 1).view(len(at), -1)[:, : logits.shape[1]].bool()
    masked = logits.clone()
    own = masked[at]
    masked[at] = own.masked_fill(~bits & own.isfinite(), -torch.inf)
    return masked


def _draw(
    logits: Tensor,
    rows: Sequence[Row],
    settings: Tensor,
    indices: Tensor,
    adjustments: Adjustments | None,
) -> Tensor:
    """Draw a token for each row in few launches, whatever the rows request."""
    vocab = logits.shape[1]
    params = [row.params for row in rows if not row.params.greedy]
    searches = any(0 < p.top_k < vocab for p in params), any(p.top_p < 1 for p in params)
    if adjustments is None:
        return draw_tokens(logits, indices, settings, *searches).view(-1)
    tokens = []
    for batch in batches(len(rows), max(1, vocab // 8), logits.device):
        x = adjustments.apply(logits, batch)
        tokens.append(draw_tokens(x, indices[: len(x)], settings[batch], *searches).view(-1))
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def first_tokens(logits: Tensor) -> Tensor:
    """Return each row's first token, int64 ``[rows]``; -1 for a broken row."""
    if logits.is_cpu:
        x = Logits.of(logits, FIRST)
        finite = x.maxima.amax(-1, keepdim=True).isfinite()
        return torch.where(finite, first_ids(x), -1).view(-1)
    return draw_tokens(logits, *plain_rows(len(logits), logits.device), False, False).view(-1)


def plain_rows(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first ``count`` rows, and the settings that take each one's first token."""
    settings = torch.zeros(count, 5, dtype=torch.float64, device=device)
    return torch.arange(count, device=device), settings


@torch.inference_mode()
def warm_up(logits: Tensor) -> None:
    """Compile every variant of a kernel that sampling from these logits of a GPU may launch."""
    logits = _contiguous(logits)
    for each in {logits.dtype: logits, torch.float32: logits.float()}.values():
        settings = each.new_ones(len(each), 5, dtype=torch.float64)
        places = torch.arange(len(each), device=each.device)
        for top_k, top_p in product((False, True), repeat=2):
            draw_tokens(each, places, settings, top_k, top_p)
        for width in (0, 1):
            token_logprobs(each, places, places, width)
        plain = Row(SamplingParams(presence_penalty=1.0), (0,))
        adjustments = Adjustments([plain] * len(each), range(len(each)), 1, TokenCounts())
        adjustments.place(upload(adjustments.arrays, each.device))
        adjustments.apply(each, slice(None))


@torch.inference_mode()
def prompt_logprobs(
    logits: Tensor, next_tokens: Sequence[int], count: int, wait: Wait = synchronize
) -> list[dict[int, Logprob]]:
    """Return the logprobs of a prompt's tokens, each given the tokens before it.

    Args:
        logits: ``[tokens, vocab]`` of any floating dtype.
        next_tokens: the token after each position.
        count: number of most probable tokens in each entry after the prompt's own.
        wait: function that waits for the device.

    Raises:
        LogitsError: rows contain NaN or +inf, or are all -inf.
        ValueError: ``next_tokens`` has another length, or a token outside of the vocabulary.

    """
    if logits.dim() != 2 or len(logits) != len(next_tokens):
        raise ValueError(
            f"logits should have the shape [{len(next_tokens)} tokens, vocab], and have "
            f"{list(logits.shape)}"
        )
    if not next_tokens:
        return []
    check_tokens(next_tokens, logits.shape[1])
    count = min(count, logits.shape[1])
    arrays = [array("q", range(len(logits))), array("q", next_tokens)]
    where, own = upload(arrays, logits.device)
    numbers = Download(_logprobs(_contiguous(logits), where, own, count)).read(wait)
    entries = _entries(numbers, next_tokens, _Ranked([], [count] * len(next_tokens)))
    broken = [row for row, entry in enumerate(entries) if entry is None]
    if broken:
        raise LogitsError(broken)
    return [entry for entry in entries if entry is not None]


def _contiguous(logits: Tensor) -> Tensor:
    """Return logits of at most 32 bits."""
    return (logits.float() if logits.dtype == torch.float64 else logits).contiguous()


class _Ranked(NamedTuple):
    """Rows whose logprobs are computed together, and the number that each requests."""

    rows: Sequence[int]
    counts: Sequence[int]


def _by_width(counts: Sequence[int | None], vocab: int) -> list[_Ranked]:
    """Group the rows that request logprobs; those that request many form a group of their own."""
    widths: dict[int, list[int]] = {}
    for row, count in enumerate(counts):
        if count is not None:
            widths.setdefault(ops.sorted_width(count, vocab), []).append(row)
    return [
        _Ranked(rows, [min(counts[row] or 0, vocab) for row in rows]) for rows in widths.values()
    ]


def _logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Return the numbers that :func:`_entries` reads, for each row, in float64."""
    if logits.is_cpu:
        x = Logits.of(logits, SEVERAL).select(rows)
        return ops.token_logprobs(x, tokens.clamp(min=0).unsqueeze(1), count).view(-1)
    return token_logprobs(logits, rows, tokens, count).view(-1)


def _entry_size(count: int) -> int:
    """Return the length of a row in the result of :func:`_logprobs`."""
    return 3 + 2 * count


def _entries(
    numbers: Sequence[float], tokens: Sequence[int], ranked: _Ranked
) -> list[dict[int, Logprob] | None]:
    """Return the logprobs of rows, each token's own first; None for a broken row."""
    entries: list[dict[int, Logprob] | None] = []
    width = max(ranked.counts)
    size = _entry_size(width)
    for start, token, count in zip(
        range(0, len(numbers), size), tokens, ranked.counts, strict=True
    ):
        finite, rank, logprob, *values = numbers[start : start + size]
        entry = {token: Logprob(logprob, int(rank))}
        for column in range(count):
            entry.setdefault(int(values[width + column]), Logprob(values[column], 1 + column))
        entries.append(entry if finite else None)
    return entries
