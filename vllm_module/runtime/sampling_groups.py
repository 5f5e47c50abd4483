"""Which rows are sampled alike, and so together."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_module.kernels.draw_tokens import draw_tokens
from vllm_module.runtime import sampling_ops as ops
from vllm_module.runtime.adjustments import Adjustments
from vllm_module.runtime.block_ops import FIRST, SEVERAL, Logits, batches
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.sampling_row import Row

_SORTED = 64  # most probable tokens that are sorted at first; 16 times as many for a large count

_Draw = Callable[[Logits, Tensor, ops.Settings, int], Tensor]


class Group(NamedTuple):
    """Rows that are sampled alike.

    Attributes:
        draw: chooses their tokens.
        width: how many of the most probable tokens it sorts.
        adjusted: whether a bias, a penalty or a ban changes their logits.
        indices: of the rows.

    """

    draw: _Draw
    width: int
    adjusted: bool
    indices: list[int]

    @property
    def block(self) -> int:
        """How many tokens a block of the logits should have."""
        return SEVERAL if self.width else FIRST

    def choose(self, x: Logits, settings: ops.Settings) -> Tensor:
        """Return a token ``[n, 1]`` for each row, or -1 for a row with NaN, inf or only -inf."""
        peak = x.maxima.amax(-1, keepdim=True)
        token = self.draw(x, peak, settings, self.width)
        return token.masked_fill_(~peak.isfinite(), -1)


def group_rows(rows: Sequence[Row], vocab: int) -> list[Group]:
    """Return all rows in groups, adjusted ones first."""
    groups: dict[tuple[_Draw, int, bool], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault((*_method(row.params, vocab), row.adjusted), []).append(index)
    found = [Group(*how, indices) for how, indices in groups.items()]
    return sorted(found, key=lambda group: not group.adjusted)


def choose(
    logits: Tensor,
    x: Logits | None,
    groups: Sequence[Group],
    settings: Sequence[ops.Settings],
    indices: Tensor,
    adjustments: Adjustments,
) -> Tensor:
    """Return a token ``[rows, 1]`` for each row of the groups, in their order; -1 if it is broken.

    Args:
        logits: of the model, ``[rows, vocab]``.
        x: the same, unless all groups are adjusted.
        groups: adjusted ones first.
        settings: of each group.
        indices: of the rows of all groups.
        adjustments: of the rows of adjusted groups.

    """
    tokens, end = [], 0
    for group, of in zip(groups, settings, strict=True):
        start, end = end, end + len(group.indices)
        if not group.adjusted:
            assert x is not None
            tokens.append(group.choose(x.select(indices[start:end]), of))
            continue
        # Batches are larger than others, since little more is done than to copy the logits.
        for batch in batches(end - start, max(1, logits.shape[1] // 8), logits.device):
            copied = logits.index_select(0, indices[start:end][batch]).float()
            adjustments.apply(copied, start + batch.start)
            tokens.append(group.choose(Logits.of(copied, group.block), of.select(batch)))
    return torch.cat(tokens)


def draw(
    logits: Tensor,
    groups: Sequence[Group],
    rows: Sequence[Row],
    settings: Tensor,
    indices: Tensor,
    adjustments: Adjustments,
) -> Tensor:
    """Return what :func:`choose` does, on a GPU: rows of all methods are drawn together.

    Args:
        logits, groups, indices, adjustments: as for :func:`choose`.
        rows: that the groups index.
        settings: on the device, float64 ``[rows, 5]``, in the order of the groups.

    """
    vocab = logits.shape[1]
    params = [row.params for row in rows if not row.params.greedy]
    searches = any(0 < p.top_k < vocab for p in params), any(p.top_p < 1 for p in params)
    adjusted = sum(len(group.indices) for group in groups if group.adjusted)
    tokens = []
    for batch in batches(adjusted, max(1, vocab // 8), logits.device):
        copied = logits.index_select(0, indices[batch]).float()
        adjustments.apply(copied, batch.start)
        places = torch.arange(len(copied), device=logits.device)
        tokens.append(draw_tokens(copied, places, settings[batch], *searches))
    if adjusted < len(indices):
        rest = slice(adjusted, None)
        tokens.append(draw_tokens(logits, indices[rest], settings[rest], *searches))
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def settings_array(rows: Iterable[Row]) -> array[float]:
    """Return what :func:`settings_of` wants on the device."""
    settings = array("d")
    for row in rows:
        each = row.params
        settings.extend((each.temperature, each.min_p, each.top_k, each.top_p, row.uniform))
    return settings


def settings_of(groups: Sequence[Group], rows: Sequence[Row], sent: Tensor) -> list[ops.Settings]:
    """Return the settings of each group.

    Args:
        groups: of rows.
        rows: that the groups index.
        sent: the settings on the device, in the order of the groups.

    """
    parts = torch.split(sent.view(-1, 5), [len(group.indices) for group in groups])
    settings = []
    for group, part in zip(groups, parts, strict=True):
        params = [rows[index].params for index in group.indices]
        scaled = any(each.temperature != 1 for each in params)
        cut = any(each.min_p for each in params)
        temperature, min_p, top_k, top_p, uniform = part.unsqueeze(2).unbind(1)
        settings.append(ops.Settings(temperature, min_p, top_k, top_p, uniform, scaled, cut))
    return settings


def sorted_width(count: int, vocab: int) -> int:
    """Return how many tokens are sorted for ``count``: one number for many counts."""
    width = _SORTED
    while width < count:
        width *= 16
    return min(width, vocab)


def _method(params: SamplingParams, vocab: int) -> tuple[_Draw, int]:
    """Return how to draw, and how many of the most probable tokens to sort for it."""
    if params.greedy:
        return ops.draw_first, 0
    if 0 < params.top_k < vocab:
        return ops.draw_top_k, sorted_width(params.top_k, vocab)
    return (ops.draw_top_p, min(_SORTED, vocab)) if params.top_p < 1 else (ops.draw_any, 0)
