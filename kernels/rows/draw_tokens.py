"""Drawing a token from each row of logits: temperature, min_p, top_k and top_p, in Triton.

Probabilities become integers before they are summed, so every order of summation, and every order
of atomic additions, gives the same bits. Tokens have one order: by logit, the largest first, and
equal logits by token id. A position in this order is found by a radix search of the logits' bits,
one digit after the other: programs add up the tokens of each digit, and the last program of a row
finds the digit at which a number is reached. Nothing waits for a device, and no row affects
another.
"""

from __future__ import annotations

import math

import torch

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.operators import expect, operator, tl, triton

SORTED = 64  # number of tokens above which a nucleus is drawn from in the order of ids
_CHUNK = 8192  # tokens of a program
_TILE = 1024
_BINS = 2048
_SCRATCH = 1 << 28  # bytes of the sums of searches: rows beyond these are drawn afterwards
_STATE = 9  # numbers in the state of a row: see _advance


def draw_tokens(
    logits: torch.Tensor, rows: torch.Tensor, settings: torch.Tensor, top_k: bool, top_p: bool
) -> torch.Tensor:
    """Draw a token for each row by its fraction of the mass that may be drawn.

    The mass of a token is ``int(2**(62 - bits of vocab) * exp((logit - largest) / temperature))``,
    in float64, and 0 if that exponential is below ``min_p``. Among the first ``top_k`` tokens,
    those may be drawn that are needed for ``top_p`` of their mass. The fraction ``uniform`` of
    their mass is located in the order of logits; without top_k and top_p, or in a nucleus of more
    than 64 tokens, in the order of ids.

    Args:
        logits: ``[any, vocab]``, bfloat16, float16 or float32, contiguous.
        rows: indices of rows of ``logits``, int64 ``[n]``.
        settings: float64 ``[n, 5]``: temperature, 0 for the first token; ``min_p``; ``top_k``, 0 or
            less for all; ``top_p``; and ``uniform``, in [0, 1).
        top_k, top_p: True if it has an effect on any row.

    Returns:
        int64 ``[n, 1]``; -1 for a row with NaN or infinity, or with only -inf.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.

    """
    expect("logits", logits, (None, None), FLOATS)
    expect("rows", rows, (None,), (torch.int64,), logits)
    expect("settings", settings, (len(rows), 5), (torch.float64,), logits)
    if not logits.is_contiguous() or not logits.shape[1]:
        raise ValueError("logits must be contiguous, and of at least one token")
    return _draw_tokens(logits, rows, settings.contiguous(), top_k, top_p)


def draw_tokens_reference(
    logits: torch.Tensor, rows: torch.Tensor, settings: torch.Tensor, top_k: bool, top_p: bool
) -> torch.Tensor:
    """Draw in plain torch, row by row, from sorted tokens; see :func:`draw_tokens`."""
    drawn = [
        _draw_one(logits[row].float(), own.tolist())
        for row, own in zip(rows, settings, strict=True)
    ]
    return torch.tensor(drawn, dtype=torch.int64, device=logits.device).view(-1, 1)


def _draw_one(x: torch.Tensor, settings: list[float]) -> int:
    temperature, min_p, top_k, top_p, uniform = settings
    peak = x.max()
    if not bool(peak.isfinite()):
        return -1
    order = x.argsort(descending=True, stable=True)
    if temperature == 0:
        return int(order[0])
    ratio = ((x.double() - peak) / temperature).exp()
    ratio = torch.where(ratio >= min_p, ratio, 0.0)
    mass = (ratio * 2.0 ** (62 - len(x).bit_length())).long()
    kept = order[: int(top_k)] if 0 < top_k < len(x) else order
    sums = mass[kept].cumsum(0)
    if top_p < 1:
        total = int(sums[-1])
        needed = min(max(1, math.ceil(total * top_p)), total)
        kept = kept[: int(torch.searchsorted(sums, needed)) + 1]
    if not 0 < top_k < len(x) and (top_p >= 1 or len(kept) > SORTED):
        kept = kept.sort().values
    sums = mass[kept].cumsum(0)
    total = int(sums[-1])
    target = min(int(total * uniform), total - 1)
    return int(kept[torch.searchsorted(sums, target, right=True)])


def draw_tokens_triton(
    logits: torch.Tensor, rows: torch.Tensor, settings: torch.Tensor, top_k: bool, top_p: bool
) -> torch.Tensor:
    """Draw by Triton kernels; see :func:`draw_tokens`."""
    count, vocab = len(rows), logits.shape[1]
    drawn = torch.empty(count, 1, dtype=torch.int64, device=logits.device)
    if not count:
        return drawn
    chunks = -(-vocab // _CHUNK)
    most = max(1, _SCRATCH // (chunks * 4 * _BINS * 8)) if top_k or top_p else count
    if count > most:
        batches = zip(rows.split(most), settings.split(most), strict=True)
        return torch.cat([draw_tokens_triton(logits, *each, top_k, top_p) for each in batches])
    peaks = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(count, 3, chunks, dtype=torch.int64, device=logits.device)
    state = torch.empty(count, _STATE, dtype=torch.int64, device=logits.device)
    unit = 2.0 ** (62 - vocab.bit_length())
    shared = (logits, rows, settings, peaks)
    sizes = {"CHUNK": _CHUNK, "TILE": _TILE, "num_warps": 8}
    grid = count, chunks
    _find_peaks[grid](*shared[:2], peaks, sums, state, vocab, chunks, **sizes)
    if top_k or top_p:
        first, digits = torch.empty(
            2, count, chunks, 2, _BINS, dtype=torch.int64, device=logits.device
        )
        searches = [1] * top_k + [2] * top_p + [3]
        # Each launch sums a digit and finds it, together with the first digit of the next search.
        launches = [(0, 0, first, 0, searches[0], 0)]
        for search, following in zip(searches, [*searches[1:], 0], strict=True):
            launches.append((search, 1, digits, 0, search, 1))
            launches.append((search, 2, digits, search, following, 0))
        # By default, the compiler uses 128 registers for 8.0 and spills some.
        for search, digit, added, ended, found, found_digit in launches:
            _find_digit[grid](*shared, state, first, added, vocab, chunks, unit, SEARCH=search,
                              DIGIT=digit, ENDS=ended, FOUND=found, FOUND_DIGIT=found_digit,
                              BINS=_BINS, **sizes | {"num_warps": 4, "maxnreg": 160})  # fmt: skip
    _find_token[grid](*shared, state, sums, drawn, vocab, chunks, unit,
                      SEARCHED=top_k or top_p, **sizes)  # fmt: skip
    return drawn


@triton.jit
def _keys(x):
    """Return sort keys of logits: int64, not negative, the largest logit first."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # adding 0 turns -0 to 0
    return 2147483647 - (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _masses(x, peak, temperature, min_p, unit):
    """Return the integer masses of logits ``x`` in float32, of a row that is not greedy."""
    ratio = tl.exp((x.to(tl.float64) - peak) / temperature)
    return (tl.where(ratio >= min_p, ratio, 0.0) * unit).to(tl.int64)


@triton.jit
def _setting(settings_ptr, row, index: tl.constexpr):
    return tl.load(settings_ptr + row * 5 + index)


@triton.jit
def _peak(peaks_ptr, row, chunks):
    """Return the largest logit of a row, in float64; infinity if it has NaN."""
    peak = tl.load(peaks_ptr + row * chunks)
    for chunk in range(1, chunks):
        peak = tl.maximum(peak, tl.load(peaks_ptr + row * chunks + chunk))
    return peak.to(tl.float64)


@triton.jit
def _takes_part(settings_ptr, row, vocab, SEARCH: tl.constexpr):
    """Return whether a row needs a search: 1 for top_k, 2 for top_p, 3 for its token, 0 for any."""
    greedy = _setting(settings_ptr, row, 0) == 0
    top_k = _setting(settings_ptr, row, 2)
    few = (top_k > 0) & (top_k < vocab)
    nucleus = _setting(settings_ptr, row, 3) < 1
    if SEARCH == 1:
        part = few
    elif SEARCH == 2:
        part = nucleus
    else:
        part = few | nucleus
    return part & (greedy == 0)


@triton.jit
def _is_last(state_ptr, row, chunks):
    """Return whether this is a row's last program, which can load what the others stored.

    The last program resets the counter of finished programs to 0.
    """
    tl.debug_barrier()  # every thread has finished its stores
    done = tl.atomic_add(state_ptr + row * 9 + 8, 1, sem="acq_rel", scope="gpu")
    last = done == chunks - 1
    if last:
        tl.store(state_ptr + row * 9 + 8, 0)
    tl.debug_barrier()
    return last


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _find_peaks(
    logits_ptr, rows_ptr, peaks_ptr, ids_ptr, state_ptr, vocab, chunks,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the largest logit of a chunk and the first token that has it; NaN is infinite."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x_ptr = logits_ptr + tl.load(rows_ptr + row) * vocab
    largest = tl.full((), float("-inf"), tl.float32)
    first = chunk * CHUNK
    for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocab), TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        value = tl.max(x, 0)
        at = tl.min(tl.where(x == value, token, vocab), 0)
        first = tl.where(value > largest, at, first)
        largest = tl.maximum(largest, value)
    tl.store(peaks_ptr + row * chunks + chunk, largest)
    tl.store(ids_ptr + row * 3 * chunks + chunk, first.to(tl.int64))
    if chunk == 0:
        tl.store(state_ptr + row * 9 + 8, 0)  # counter of _is_last in the following launches


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _find_digit(
    logits_ptr, rows_ptr, settings_ptr, peaks_ptr, state_ptr, first_ptr, digits_ptr, vocab, chunks,
    unit, SEARCH: tl.constexpr, DIGIT: tl.constexpr, ENDS: tl.constexpr, FOUND: tl.constexpr,
    FOUND_DIGIT: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum a digit of a search (0 for none); the row's last program calls :func:`_advance`."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _takes_part(settings_ptr, row, vocab, SEARCH):
        _add_digits(logits_ptr, rows_ptr, settings_ptr, peaks_ptr, state_ptr, digits_ptr, row,
                    chunk, vocab, chunks, unit, DIGIT, CHUNK, TILE)  # fmt: skip
    if _is_last(state_ptr, row, chunks):
        _advance(settings_ptr, state_ptr, first_ptr, digits_ptr, row, vocab, chunks,
                 ENDS, FOUND, FOUND_DIGIT, BINS)  # fmt: skip


@triton.jit
def _add_digits(
    logits_ptr, rows_ptr, settings_ptr, peaks_ptr, state_ptr, digits_ptr, row, chunk, vocab, chunks,
    unit, DIGIT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum tokens and masses by digit, for tokens that match the digits found so far.

    Each chunk has its own counts and sums, ``[2, 2048]``.
    """
    peak = _peak(peaks_ptr, row, chunks)
    temperature, min_p = _setting(settings_ptr, row, 0), _setting(settings_ptr, row, 1)
    x_ptr = logits_ptr + tl.load(rows_ptr + row) * vocab
    counts_ptr = digits_ptr + (row * chunks + chunk) * 4096
    bins = tl.arange(0, 2048)
    tl.store(counts_ptr + bins, tl.zeros((2048,), tl.int64))
    tl.store(counts_ptr + 2048 + bins, tl.zeros((2048,), tl.int64))
    tl.debug_barrier()  # before another thread adds to the cleared memory
    prefix = tl.full((), 0, tl.int64)
    if DIGIT > 0:
        prefix = tl.load(state_ptr + row * 9)
    shift: tl.constexpr = 22 - 11 * DIGIT
    for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocab), TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        key = _keys(x)
        counted = token < vocab
        if DIGIT > 0:
            counted = counted & ((key >> (shift + 11)) == prefix)
        digit = (key >> shift) & 2047
        mass = _masses(x, peak, temperature, min_p, unit)
        tl.atomic_add(counts_ptr + digit, tl.full((TILE,), 1, tl.int64), mask=counted)
        tl.atomic_add(counts_ptr + 2048 + digit, mass, mask=counted & (mass > 0))


@triton.jit
def _reach(digits_ptr, row, chunks, number, BY_COUNT: tl.constexpr, BINS: tl.constexpr):
    """Return the first digit up to which the sum exceeds ``number``.

    Also return the tokens and the mass before it, the tokens that have it, and the mass of all.
    """
    bins = tl.arange(0, BINS)
    counts, sums = tl.zeros((BINS,), tl.int64), tl.zeros((BINS,), tl.int64)
    for chunk in range(chunks):
        at = digits_ptr + (row * chunks + chunk) * 2 * BINS + bins
        counts += tl.load(at)
        sums += tl.load(at + BINS)
    by = counts if BY_COUNT else sums
    total = tl.cumsum(by, 0)
    digit = tl.minimum(tl.sum((total <= number).to(tl.int32), 0), BINS - 1)
    before, here = bins < digit, bins == digit
    return (
        digit.to(tl.int64),
        tl.sum(tl.where(before, counts, 0), 0), tl.sum(tl.where(before, sums, 0), 0),
        tl.sum(tl.where(here, counts, 0), 0), tl.sum(tl.where(here, sums, 0), 0),
        tl.sum(sums, 0),
    )  # fmt: skip


@triton.jit
def _advance(
    settings_ptr, state_ptr, first_ptr, digits_ptr, row, vocab, chunks,
    ENDS: tl.constexpr, SEARCH: tl.constexpr, DIGIT: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Find the next digit of a search; with ENDS, first the last digit of the search before.

    A row's state: 0 the digits so far; 1 the number that is searched for, less the sum before these
    digits; 2 and 3 tokens and mass before them; 4 the mass that may be drawn, or -1; 5 the key of
    the last token that may be drawn; 6 how many tokens of this key may be drawn; 7 whether the
    token is located in the order of logits; 8 the number of finished programs.
    """
    at = state_ptr + row * 9
    if ENDS > 0:
        ends = _takes_part(settings_ptr, row, vocab, ENDS)
        if ENDS == 3:
            ends = ends & (tl.load(at + 7) != 0)
        if ends:
            number = tl.load(at + 1)
            digit, before, sum_before, count, sum_here, _ = _reach(
                digits_ptr, row, chunks, number, ENDS == 1, BINS
            )
            tokens, mass = tl.load(at + 2), tl.load(at + 3)
            each = sum_here // tl.maximum(count, 1)  # equal logits have equal masses
            last = (number - sum_before) // tl.maximum(each, 1)
            if ENDS == 1:
                last = number - before
            tl.store(at + 5, tl.load(at) * BINS + digit)
            tl.store(at + 6, last + 1)
            if ENDS < 3:
                tl.store(at + 4, mass + sum_before + (last + 1) * each)
                few = _takes_part(settings_ptr, row, vocab, 1) | (tokens + before + last < 64)
                tl.store(at + 7, few.to(tl.int64))
        tl.debug_barrier()  # other threads of this program load the stored values
    if SEARCH > 0:  # noqa: SIM102 - SEARCH is known when the kernel is compiled
        if _takes_part(settings_ptr, row, vocab, SEARCH):
            number = tl.load(at + 1)
            ptr = digits_ptr
            if DIGIT == 0:
                ptr = first_ptr
                if SEARCH == 1:
                    number = _setting(settings_ptr, row, 2).to(tl.int64) - 1
                else:
                    total = tl.load(at + 4)
                    if SEARCH == 2:
                        if not _takes_part(settings_ptr, row, vocab, 1):
                            _, _, _, _, _, total = _reach(
                                first_ptr, row, chunks, number, False, BINS
                            )
                        wanted = tl.ceil(total.to(tl.float64) * _setting(settings_ptr, row, 3))
                        number = tl.minimum(tl.maximum(wanted.to(tl.int64), 1), total) - 1
                    else:
                        wanted = total.to(tl.float64) * _setting(settings_ptr, row, 4)
                        number = tl.minimum(wanted.to(tl.int64), total - 1)
            digit, before, sum_before, _, _, _ = _reach(ptr, row, chunks, number, SEARCH == 1, BINS)
            if SEARCH == 1:
                number -= before
            else:
                number -= sum_before
            prefix, tokens, mass = tl.load(at), tl.load(at + 2), tl.load(at + 3)
            if DIGIT == 0:
                prefix, tokens, mass = prefix * 0, tokens * 0, mass * 0
            tl.debug_barrier()  # every thread has loaded the values that are overwritten now
            tl.store(at, prefix * BINS + digit)
            tl.store(at + 1, number)
            tl.store(at + 2, tokens + before)
            tl.store(at + 3, mass + sum_before)


@triton.jit
def _parts(x, exists, key, last, peak, temperature, min_p, unit, MODE: tl.constexpr):
    """Return the mass of each token before the last key, and whether it has the last key.

    In the order of logits (0) only the last key counts. In the order of ids, masses count: those of
    all tokens (2), or of tokens before the last key (1).
    """
    mass = tl.where(exists, _masses(x, peak, temperature, min_p, unit), 0)
    tie = exists & (key == last)
    if MODE == 0:
        mass = mass * 0
    elif MODE == 1:
        mass = tl.where(key < last, mass, 0)
    else:
        tie = tie & (key != key)
    return mass, tie


@triton.jit
def _add_parts(x_ptr, chunk, vocab, last, peak, temperature, min_p, unit,
               MODE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    total, ties = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocab), TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        mass, tie = _parts(x, token < vocab, _keys(x), last, peak, temperature, min_p, unit, MODE)
        total += tl.sum(mass, 0)
        ties += tl.sum(tie.to(tl.int64), 0)
    return total, ties


@triton.jit
def _mode_and_last(settings_ptr, state_ptr, row, vocab, SEARCHED: tl.constexpr):
    """Return the mode of a row (:func:`_parts`), the last key, and how many tokens may have it."""
    most = tl.full((), 0, tl.int64)
    mode, last = most + 2, most - 1
    if SEARCHED:  # noqa: SIM102 - SEARCHED is known when the kernel is compiled
        if _takes_part(settings_ptr, row, vocab, 3):
            at = state_ptr + row * 9
            mode = tl.where(tl.load(at + 7) != 0, 0, 1).to(tl.int64)
            last, most = tl.load(at + 5), tl.load(at + 6)
    return mode, last, most


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _find_token(
    logits_ptr, rows_ptr, settings_ptr, peaks_ptr, state_ptr, sums_ptr, drawn_ptr, vocab, chunks,
    unit, SEARCHED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum the parts of each chunk's tokens; the row's last program finds the token."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _add_chunk(logits_ptr, rows_ptr, settings_ptr, peaks_ptr, state_ptr, sums_ptr, row, chunk,
               vocab, chunks, unit, SEARCHED, CHUNK, TILE)  # fmt: skip
    if _is_last(state_ptr, row, chunks):
        _pick(logits_ptr, rows_ptr, settings_ptr, peaks_ptr, state_ptr, sums_ptr, drawn_ptr, row,
              vocab, chunks, unit, SEARCHED, CHUNK, TILE)  # fmt: skip


@triton.jit
def _add_chunk(
    logits_ptr, rows_ptr, settings_ptr, peaks_ptr, state_ptr, sums_ptr, row, chunk, vocab, chunks,
    unit, SEARCHED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum the masses of a chunk's tokens, and the number of those with the last key."""
    temperature, min_p = _setting(settings_ptr, row, 0), _setting(settings_ptr, row, 1)
    if temperature == 0:
        return
    x_ptr, peak = logits_ptr + tl.load(rows_ptr + row) * vocab, _peak(peaks_ptr, row, chunks)
    mode, last, _ = _mode_and_last(settings_ptr, state_ptr, row, vocab, SEARCHED)
    total, ties = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if mode == 0:
        total, ties = _add_parts(
            x_ptr, chunk, vocab, last, peak, temperature, min_p, unit, 0, CHUNK, TILE
        )
    elif mode == 1:
        total, ties = _add_parts(
            x_ptr, chunk, vocab, last, peak, temperature, min_p, unit, 1, CHUNK, TILE
        )
    else:
        total, ties = _add_parts(
            x_ptr, chunk, vocab, last, peak, temperature, min_p, unit, 2, CHUNK, TILE
        )
    tl.store(sums_ptr + (row * 3 + 1) * chunks + chunk, total)
    tl.store(sums_ptr + (row * 3 + 2) * chunks + chunk, ties)


@triton.jit
def _mass_of(key, peak, temperature, min_p, unit):
    """Return the mass of tokens with a key; its bits give the logit."""
    order = (2147483647 - key).to(tl.int32)
    x = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return _masses(x, peak, temperature, min_p, unit)


@triton.jit
def _pick(
    logits_ptr, rows_ptr, settings_ptr, peaks_ptr, state_ptr, sums_ptr, drawn_ptr, row, vocab,
    chunks, unit, SEARCHED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the chunk of a row's token, and the token in it."""
    temperature, min_p = _setting(settings_ptr, row, 0), _setting(settings_ptr, row, 1)
    peak = _peak(peaks_ptr, row, chunks)
    if (peak == float("inf")) | (peak == float("-inf")):
        tl.store(drawn_ptr + row, tl.full((), -1, tl.int64))
        return
    sums_ptr += row * 3 * chunks
    if temperature == 0:
        token = tl.load(sums_ptr)
        largest = tl.load(peaks_ptr + row * chunks)
        for chunk in range(1, chunks):
            value = tl.load(peaks_ptr + row * chunks + chunk)
            token = tl.where(value > largest, tl.load(sums_ptr + chunk), token)
            largest = tl.maximum(largest, value)
        tl.store(drawn_ptr + row, token)
        return
    x_ptr = logits_ptr + tl.load(rows_ptr + row) * vocab
    mode, last, most = _mode_and_last(settings_ptr, state_ptr, row, vocab, SEARCHED)
    each = _mass_of(tl.maximum(last, 0), peak, temperature, min_p, unit)
    each = tl.where(mode == 0, 1, each)
    total, ties = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for chunk in range(chunks):
        total += tl.load(sums_ptr + chunks + chunk)
    total += tl.where(mode == 1, most * each, 0)
    wanted = (total.to(tl.float64) * _setting(settings_ptr, row, 4)).to(tl.int64)
    target = tl.where(mode == 0, most - 1, tl.minimum(wanted, total - 1))
    most = tl.where(mode == 0, vocab, most)
    # The chunk in which the sum exceeds the target, and the sum before it.
    found, found_ties, before = tl.full((), 0, tl.int64), ties, target * 0
    passed = target * 0
    for chunk in range(chunks):
        here = tl.load(sums_ptr + 2 * chunks + chunk)
        kept = tl.minimum(tl.maximum(most - ties, 0), here)
        is_before = passed <= target
        found = tl.where(is_before, chunk, found)
        found_ties = tl.where(is_before, ties, found_ties)
        before = tl.where(is_before, passed, before)
        passed += tl.load(sums_ptr + chunks + chunk) + kept * each
        ties += here
    token_found = tl.full((), -1, tl.int64)
    first = found * CHUNK
    for start in range(first, tl.minimum(first + CHUNK, vocab), TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        key = _keys(x)
        exists = token < vocab
        mass = tl.where(exists, _masses(x, peak, temperature, min_p, unit), 0)
        tie = exists & (key == last) & (mode != 2)
        rank = found_ties + tl.cumsum(tie.to(tl.int64), 0) - 1
        counted = tl.where(mode == 2, mass, tl.where((mode == 1) & (key < last), mass, 0))
        counted += tl.where(tie & (rank < most), each, 0)
        sums = before + tl.cumsum(counted, 0)
        at = tl.min(tl.where(exists & (sums > target), token, vocab), 0)
        token_found = tl.where((token_found < 0) & (at < vocab), at, token_found)
        before += tl.sum(counted, 0)
        found_ties += tl.sum(tie.to(tl.int64), 0)
    tl.store(drawn_ptr + row, token_found)


def _empty(logits: torch.Tensor, rows: torch.Tensor, *_: object) -> torch.Tensor:
    """Return an empty result."""
    return torch.empty(len(rows), 1, dtype=torch.int64, device=logits.device)


_draw_tokens = operator(draw_tokens_reference, draw_tokens_triton, _empty)
