"""Biases, penalties, bans and allowances on logits before a token is drawn, in Triton.

A table has the tokens of sequences and their counts, so that a step sends one new token for each
sequence. Both operations take one launch for rows of all kinds.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.operators import expect, nothing, operator, tl, triton

EMPTY = -1  # token of an unused column of the table
NONE = -2  # value for no new token
_CHUNK = 8192  # tokens of a program
_TILE = 1024


def count_tokens(
    table: torch.Tensor, plan: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
) -> None:
    """Write the tokens of sequences into their rows of a table, or add a token to a row.

    Args:
        table: int32 ``[2, height, width]``: the distinct tokens of each row, ``EMPTY`` in unused
            columns, and their counts; written in place.
        plan: int64 ``[n, 5]``, for each sequence: its row of the table; a token to count once more,
            or ``NONE``; the column for it, if the row lacks it; and the begin and end of its part
            of ``tokens``, if the row is written anew, or -1 twice. No two have the same row.
        tokens, counts: int64 ``[any]``: distinct tokens of rows that are written anew, end to end,
            and their counts.

    """
    expect("table", table, (2, None, None), (torch.int32,))
    expect("plan", plan, (None, 5), (torch.int64,), table)
    expect("tokens", tokens, (None,), (torch.int64,), table)
    expect("counts", counts, tokens.shape, (torch.int64,), table)
    _count_tokens(table, plan.contiguous(), tokens.contiguous(), counts.contiguous())


def count_tokens_reference(
    table: torch.Tensor, plan: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
) -> None:
    """Count in plain torch; see :func:`count_tokens`."""
    grown = []
    for index, (place, new, _, begin, end) in enumerate(plan.tolist()):
        if begin >= 0:
            table[0, place] = EMPTY
            for part, numbers in enumerate((tokens, counts)):
                table[part, place, : end - begin] = numbers[begin:end]
        elif new >= 0:
            grown.append(index)
    if grown:
        place, new, column, *_ = plan[grown].unbind(1)
        ids, times = table
        same = ids.index_select(0, place) == new.unsqueeze(1)
        times.index_add_(0, place, same.int())
        known, at = same.any(1), (place, column.clamp(max=ids.shape[1] - 1))
        ids.index_put_(at, torch.where(known, ids[at], new.int()))
        times.index_put_(at, torch.where(known, times[at], 1))


def count_tokens_triton(
    table: torch.Tensor, plan: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
) -> None:
    """Count by a Triton kernel; see :func:`count_tokens`."""
    if len(plan):
        _, height, width = table.shape
        _count[(len(plan),)](table, plan, tokens, counts, height, width, TILE=_TILE)


@triton.jit(do_not_specialize=["height", "width"])
def _count(table_ptr, plan_ptr, tokens_ptr, counts_ptr, height, width, TILE: tl.constexpr):
    """Write or update the row of one sequence."""
    plan_ptr += tl.program_id(0) * 5
    place, new = tl.load(plan_ptr), tl.load(plan_ptr + 1)
    begin, end = tl.load(plan_ptr + 3), tl.load(plan_ptr + 4)
    ids_ptr = table_ptr + place * width
    times_ptr = ids_ptr + height.to(tl.int64) * width
    found = 0
    for start in range(0, width, TILE):
        column = start + tl.arange(0, TILE)
        inside = column < width
        if begin >= 0:
            given = begin + column < end
            token = tl.load(tokens_ptr + begin + column, mask=given, other=-1)
            count = tl.load(counts_ptr + begin + column, mask=given, other=0)
            tl.store(ids_ptr + column, token.to(tl.int32), mask=inside)
            tl.store(times_ptr + column, count.to(tl.int32), mask=inside)
        elif new >= 0:
            same = (tl.load(ids_ptr + column, mask=inside, other=-1) == new) & inside
            times = tl.load(times_ptr + column, mask=same, other=0)
            tl.store(times_ptr + column, times + 1, mask=same)
            found += tl.sum(same.to(tl.int32), 0)
    if (begin < 0) & (new >= 0) & (found == 0):
        column = tl.load(plan_ptr + 2)
        tl.store(ids_ptr + column, new.to(tl.int32))
        tl.store(times_ptr + column, 1)


def adjust_logits(
    logits: torch.Tensor,
    plan: torch.Tensor,
    penalties: torch.Tensor,
    biases: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """Return a float32 copy of rows of logits with their adjustments.

    First biases are added. Then tokens of the row's sequence are penalized: positive logits are
    divided by the repetition penalty and others multiplied by it, and ``presence + frequency *
    times`` is subtracted from those that occur ``times`` times in the output. Then banned tokens
    get -inf, and in a row with allowed tokens, all others do.

    Args:
        logits: ``[any, vocab]``, bfloat16, float16 or float32, contiguous.
        plan: int64 ``[n, 8]``, for each row: its index in ``logits``; its row of the table, or -1
            without penalties; then begin and end in ``tokens`` of its biased, banned and allowed
            tokens, the last two -1 if all are allowed.
        penalties: float64 ``[n, 3]``: repetition, presence and frequency.
        biases: float64, for the tokens at the same indices.
        tokens: token ids, int64.
        table: as for :func:`count_tokens`. The count 0 means that only the prompt has the token.

    Returns:
        float32 ``[n, vocab]``.

    """
    expect("logits", logits, (None, None), FLOATS)
    expect("plan", plan, (None, 8), (torch.int64,), logits)
    expect("penalties", penalties, (len(plan), 3), (torch.float64,), logits)
    expect("biases", biases, (None,), (torch.float64,), logits)
    expect("tokens", tokens, (None,), (torch.int64,), logits)
    expect("table", table, (2, None, None), (torch.int32,), logits)
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous")
    plan, penalties = plan.contiguous(), penalties.contiguous()
    return _adjust_logits(logits, plan, penalties, biases.contiguous(), tokens.contiguous(), table)


def adjust_logits_reference(
    logits: torch.Tensor,
    plan: torch.Tensor,
    penalties: torch.Tensor,
    biases: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """Adjust in plain torch; see :func:`adjust_logits`."""
    x = logits.index_select(0, plan[:, 0]).float()
    rows = plan.tolist()
    for own, (_, _, begin, end, *_) in zip(x, rows, strict=True):
        if begin < end:
            own.index_add_(0, tokens[begin:end], biases[begin:end].float())
    penalized = [index for index, row in enumerate(rows) if row[1] >= 0]
    if penalized:
        ids, times = table.index_select(1, plan[penalized, 1])
        row, column = (ids != EMPTY).nonzero(as_tuple=True)
        own = torch.tensor(penalized, device=x.device)[row]
        at, times = (own, ids[row, column].long()), times[row, column]
        repetition, presence, frequency = penalties[own].float().unbind(1)
        before = x[at]
        after = torch.where(before > 0, before / repetition, before * repetition)
        x[at] = after - torch.where(times > 0, frequency * times + presence, 0)
    for own, (*_, begin, end, first, last) in zip(x, rows, strict=True):
        if begin < end:
            own.index_fill_(0, tokens[begin:end], -torch.inf)
        if first >= 0:
            kept = own[tokens[first:last]]
            own.fill_(-torch.inf)[tokens[first:last]] = kept
    return x


def adjust_logits_triton(*arguments: Any) -> torch.Tensor:
    """Adjust by a Triton kernel; see :func:`adjust_logits`."""
    logits, plan, *_, table = arguments
    x = _empty(logits, plan)
    if len(plan):
        vocab, (_, height, width) = logits.shape[1], table.shape
        grid = len(plan), -(-vocab // _CHUNK)
        _adjust[grid](*arguments, x, vocab, height, width, CHUNK=_CHUNK, TILE=_TILE,
                      num_warps=8, enable_fp_fusion=False)  # fmt: skip
    return x


@triton.jit(do_not_specialize=["vocab", "height", "width"])
def _adjust(
    logits_ptr, plan_ptr, penalties_ptr, biases_ptr, tokens_ptr, table_ptr, out_ptr, vocab, height,
    width, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy and adjust a chunk of a row.

    A row with allowed tokens starts with -inf for all others, which nothing changes.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK
    last = tl.minimum(first + CHUNK, vocab)
    plan_ptr += row * 8
    penalties_ptr += row * 3
    x_ptr = logits_ptr + tl.load(plan_ptr) * vocab
    out_ptr += row * vocab
    begin, end = tl.load(plan_ptr + 6), tl.load(plan_ptr + 7)
    lane = tl.arange(0, TILE)
    for start in range(first, last, TILE):
        token = start + lane
        x = tl.load(x_ptr + token, mask=(token < last) & (begin < 0), other=float("-inf"))
        tl.store(out_ptr + token, x.to(tl.float32), mask=token < last)
    tl.debug_barrier()  # other threads of this program load and change the stored values
    for start in range(tl.maximum(begin, 0), end, TILE):
        token = tl.load(tokens_ptr + start + lane, mask=start + lane < end, other=-1)
        here = (token >= first) & (token < last)
        tl.store(out_ptr + token, tl.load(x_ptr + token, mask=here).to(tl.float32), mask=here)
    tl.debug_barrier()
    begin, end = tl.load(plan_ptr + 2), tl.load(plan_ptr + 3)
    for start in range(begin, end, TILE):
        token = tl.load(tokens_ptr + start + lane, mask=start + lane < end, other=-1)
        here = (token >= first) & (token < last)
        bias = tl.load(biases_ptr + start + lane, mask=here, other=0).to(tl.float32)
        tl.store(out_ptr + token, tl.load(out_ptr + token, mask=here) + bias, mask=here)
    tl.debug_barrier()
    place = tl.load(plan_ptr + 1)
    if place >= 0:
        repetition = tl.load(penalties_ptr).to(tl.float32)
        presence = tl.load(penalties_ptr + 1).to(tl.float32)
        frequency = tl.load(penalties_ptr + 2).to(tl.float32)
        ids_ptr = table_ptr + place * width
        times_ptr = ids_ptr + height.to(tl.int64) * width
        for at in range(0, width, TILE):
            column = at + lane
            token = tl.load(ids_ptr + column, mask=column < width, other=-1)
            here = (token >= first) & (token < last)
            times = tl.load(times_ptr + column, mask=here, other=0)
            x = tl.load(out_ptr + token, mask=here, other=0)
            x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            x -= tl.where(times > 0, frequency * times.to(tl.float32) + presence, 0)
            tl.store(out_ptr + token, x, mask=here)
    tl.debug_barrier()
    begin, end = tl.load(plan_ptr + 4), tl.load(plan_ptr + 5)
    for start in range(begin, end, TILE):
        token = tl.load(tokens_ptr + start + lane, mask=start + lane < end, other=-1)
        here = (token >= first) & (token < last)
        tl.store(out_ptr + token, tl.full((TILE,), float("-inf"), tl.float32), mask=here)


def _empty(logits: torch.Tensor, plan: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Return an empty result."""
    shape = len(plan), logits.shape[1]
    return torch.empty(shape, dtype=torch.float32, device=logits.device)


_count_tokens = operator(count_tokens_reference, count_tokens_triton, nothing, ["table"])
_adjust_logits = operator(adjust_logits_reference, adjust_logits_triton, _empty)
