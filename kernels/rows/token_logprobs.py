"""Logprobs of a token and of the most probable ones, and the token's rank, in Triton."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.operators import expect, operator, tl, triton

_CHUNK = 8192  # tokens of a program
_TILE = 1024
_BATCH = 2**24  # numbers of 8 bytes that are sorted at once: 128 MiB


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, width: int
) -> torch.Tensor:
    """Return logprobs and ranks of each row's token and of its ``width`` most probable tokens.

    Tokens have one order: by logit, the largest first, and equal logits by token id.

    Args:
        logits: ``[any, vocab]``, bfloat16, float16 or float32, contiguous.
        rows: indices of rows of ``logits``, int64 ``[n]``.
        tokens: int64 ``[n]``; a negative one means token 0.
        width: number of most probable tokens, at most the size of the vocabulary.

    Returns:
        float64 ``[n, 3 + 2 * width]``: 1 if the row has a finite logit and neither NaN nor
        infinity, else 0, and then the other numbers are arbitrary; the token's rank, from 1; its
        natural logprob; the logprobs of the first tokens, and their ids. Logprobs are rounded to
        float32.

    """
    expect("logits", logits, (None, None), FLOATS)
    expect("rows", rows, (None,), (torch.int64,), logits)
    expect("tokens", tokens, (len(rows),), (torch.int64,), logits)
    if not logits.is_contiguous() or not 0 <= width <= logits.shape[1]:
        raise ValueError(
            f"logits must be contiguous, and width from 0 to {logits.shape[1]}, got {width}"
        )
    return _token_logprobs(logits, rows.contiguous(), tokens.contiguous(), width)


def token_logprobs_reference(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, width: int
) -> torch.Tensor:
    """Compute in plain torch; see :func:`token_logprobs`."""
    x, token = logits[rows].float(), tokens.clamp(min=0).unsqueeze(1)
    order = x.sort(dim=-1, descending=True, stable=True).indices
    logprobs, first = x.log_softmax(-1).double(), order[:, :width]
    rank = 1 + (order == token).double().argmax(-1, keepdim=True)
    finite = x.amax(-1, keepdim=True).isfinite()
    own = logprobs.gather(1, token)
    return torch.cat([finite.double(), rank.double(), own, logprobs.gather(1, first), first], 1)


def token_logprobs_triton(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, width: int
) -> torch.Tensor:
    """Compute by Triton kernels; see :func:`token_logprobs`."""
    vocab, found = logits.shape[1], _empty(logits, rows, tokens, width)
    chunks, step = -(-vocab // _CHUNK), max(1, _BATCH // vocab)
    for start in range(0, len(rows), step):
        batch = slice(start, start + step)
        own, count = tokens[batch], len(rows[batch])
        parts = torch.empty(count, 3, chunks, dtype=torch.float64, device=logits.device)
        shape = count, vocab if width else 0
        keys = torch.empty(shape, dtype=torch.int64, device=logits.device)
        _add_chunks[(count, chunks)](logits, rows[batch], own, parts, keys, vocab, chunks,
                                     SORTED=width > 0, CHUNK=_CHUNK, TILE=_TILE)  # fmt: skip
        first = keys.topk(width).values if width else keys
        _finish[(count,)](logits, rows[batch], own, parts, first, found[batch], vocab, chunks,
                          width, TILE=_TILE)  # fmt: skip
    return found


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _add_chunks(
    logits_ptr, rows_ptr, tokens_ptr, parts_ptr, keys_ptr, vocab, chunks,
    SORTED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find a chunk's largest logit and sum of exponentials, and count tokens before the own.

    Keys order tokens: a logit's bits, and then a number that is larger for smaller token ids.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x_ptr = logits_ptr + tl.load(rows_ptr + row) * vocab
    own = tl.maximum(tl.load(tokens_ptr + row), 0)
    logit = tl.load(x_ptr + own).to(tl.float32)
    peak = tl.full((), float("-inf"), tl.float32)
    total, before = tl.full((), 0, tl.float32), tl.full((), 0, tl.int32)
    for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocab), TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        before += tl.sum(((x > logit) | ((x == logit) & (token < own))).to(tl.int32), 0)
        if SORTED:
            bits = (x + 0.0).to(tl.int32, bitcast=True)  # adding 0 turns -0 to 0
            key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32
            key += 4294967295 - token.to(tl.int64)
            tl.store(keys_ptr + row * vocab + token, key, mask=token < vocab)
        x = tl.where(x == x, x, float("inf"))
        largest = tl.maximum(peak, tl.max(x, 0))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(x - base), 0)
        peak = largest
    parts_ptr += row * 3 * chunks + chunk
    tl.store(parts_ptr, peak.to(tl.float64))
    tl.store(parts_ptr + chunks, total.to(tl.float64))
    tl.store(parts_ptr + 2 * chunks, before.to(tl.float64))


@triton.jit(do_not_specialize=["vocab", "chunks", "width"])
def _finish(
    logits_ptr, rows_ptr, tokens_ptr, parts_ptr, first_ptr, found_ptr, vocab, chunks, width,
    TILE: tl.constexpr,
):  # fmt: skip
    """Combine the chunks of a row and write its result."""
    row = tl.program_id(0).to(tl.int64)
    parts_ptr += row * 3 * chunks
    found_ptr += row * (3 + 2 * width)
    peak = tl.load(parts_ptr)
    for chunk in range(1, chunks):
        peak = tl.maximum(peak, tl.load(parts_ptr + chunk))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total, before = tl.full((), 0, tl.float64), tl.full((), 0, tl.float64)
    for chunk in range(chunks):
        total += tl.load(parts_ptr + chunks + chunk) * tl.exp(tl.load(parts_ptr + chunk) - base)
        before += tl.load(parts_ptr + 2 * chunks + chunk)
    log_total = base + tl.log(total)
    own = tl.maximum(tl.load(tokens_ptr + row), 0)
    x = tl.load(logits_ptr + tl.load(rows_ptr + row) * vocab + own).to(tl.float64)
    finite = (peak != float("inf")) & (peak != float("-inf"))
    tl.store(found_ptr, finite.to(tl.float64))
    tl.store(found_ptr + 1, before + 1)
    tl.store(found_ptr + 2, (x - log_total).to(tl.float32).to(tl.float64))
    for start in range(0, width, TILE):
        column = start + tl.arange(0, TILE)
        key = tl.load(first_ptr + row * width + column, mask=column < width, other=0)
        order = (key >> 32).to(tl.int32)
        bits = order ^ ((order >> 31) & 0x7FFFFFFF)
        logits = bits.to(tl.float32, bitcast=True).to(tl.float64)
        logprob = (logits - log_total).to(tl.float32).to(tl.float64)
        token = 4294967295 - (key & 4294967295)
        tl.store(found_ptr + 3 + column, logprob, mask=column < width)
        tl.store(found_ptr + 3 + width + column, token.to(tl.float64), mask=column < width)


def _empty(logits: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return an empty result."""
    rows, _, width = others
    shape = len(rows), 3 + 2 * width
    return torch.empty(shape, dtype=torch.float64, device=logits.device)


_token_logprobs = operator(token_logprobs_reference, token_logprobs_triton, _empty)
