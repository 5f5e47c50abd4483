"""Causal convolution of each channel with its own few weights, over sequences in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.operators import (
    empty_like,
    expect,
    next_power_of_2,
    operator,
    tl,
    triton,
)
from vllm_module.kernels.recurrent.recurrent_state import (
    check_state,
    each_sequence,
    empty_output,
    loaded_states,
    place_of,
    single_tokens,
    store_states,
)
from vllm_module.kernels.recurrent.states_on_cpu import convolve_states, takes_states
from vllm_module.kernels.rows.packed_sequences import sequence_of

_TOKENS, _CHANNELS = 16, 64  # tokens and channels of a program


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    state_slots: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    context_lens: torch.Tensor | None = None,
    max_query_len: int = 0,
    silu: bool = True,
) -> torch.Tensor:
    """Return the convolution of each channel of each sequence.

    ``y[t]`` is the sum of ``weight[i] x[t - W + 1 + i]`` over ``i``, in float32. Inputs
    before a sequence's first token are zeros.

    Args:
        x: ``[tokens, channels]``, floating point; the tokens of sequences lie end to end.
        weight: ``[channels, W]``; the last weight is that of the token itself.
        bias: ``[channels]``.
        state: ``[slots, channels, W - 1]``: the last inputs of each sequence, the oldest first;
            read and written. Without it, the tokens are one whole sequence.
        state_slots: slot of each sequence, int64 ``[sequences]``; -1 for padding, whose output is
            arbitrary, and finite if its input is. The output of tokens of no sequence is zeros.
        query_start_loc: start of each sequence's tokens, int32 ``[sequences + 1]``.
        context_lens: number of each sequence's tokens up to the end of this step, int32
            ``[sequences]``.
        max_query_len: largest number of tokens of one sequence.
        silu: True to return ``y * sigmoid(y)`` in place of ``y``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; slots do not exist or are
            shared, if :func:`~vllm_module.kernels.operators.checks_values` is true.

    """
    expect("x", x, (None, None), FLOATS)
    channels = x.shape[1]
    expect("weight", weight, (channels, None), FLOATS, x)
    if bias is not None:
        expect("bias", bias, (channels,), FLOATS, x)
    width = weight.shape[1]
    if not 2 <= width <= 8:
        raise ValueError(f"weight must have 2 to 8 weights of each channel, got {width}")
    shape = channels, width - 1
    check_state(x, state, shape, state_slots, query_start_loc, context_lens)
    if takes_states(x, state, state_slots, max_query_len):
        assert state is not None
        assert state_slots is not None
        assert context_lens is not None
        return convolve_states(x, weight, bias, state, state_slots, context_lens, silu)
    places = state_slots, query_start_loc, context_lens
    return _causal_conv1d(x, weight, bias, state, *places, max_query_len, silu)


def causal_conv1d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    state_slots: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    context_lens: torch.Tensor | None,
    max_query_len: int,
    silu: bool,
) -> torch.Tensor:
    """Convolve in plain torch; see :func:`causal_conv1d`."""
    if not x.numel():  # torch's convolution refuses empty input
        return empty_like(x)
    width = weight.shape[1]
    wide, weights = x.float(), weight.float()
    shift = None if bias is None else bias.float()
    if state is None or state_slots is None or query_start_loc is None or context_lens is None:
        y = _convolved(F.pad(wide.t(), (width - 1, 0)), weights, shift)
    elif single_tokens(x, state_slots, max_query_len):
        before = loaded_states(state, state_slots, context_lens)
        window = torch.cat([before, wide.unsqueeze(2)], 2)
        y = (window * weights).sum(2)
        y = y if shift is None else y + shift
        store_states(state, state_slots, window[:, :, 1:])
    else:
        y = torch.zeros_like(wide)  # zeros, without the bias, for tokens of no sequence
        sequences = each_sequence(query_start_loc, context_lens, state_slots, state)
        for tokens, slot, before in sequences:
            window = torch.cat([before, wide[tokens].t()], 1)
            y[tokens] = _convolved(window, weights, shift)
            state[slot] = window[:, 1 - width :]
    return (F.silu(y) if silu else y).to(x.dtype)


def _convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Convolve ``[channels, W - 1 + tokens]``; return ``[tokens, channels]``."""
    return F.conv1d(inputs.unsqueeze(0), weight.unsqueeze(1), bias, groups=len(weight))[0].t()


def causal_conv1d_triton(*arguments: Any) -> torch.Tensor:
    """Convolve by a Triton kernel; see :func:`causal_conv1d`."""
    x, weight, bias, state, *places, max_query_len, silu = arguments
    y = empty_output(x, places[0], max_query_len)
    tokens, channels = x.shape
    sequences, longest = 1, tokens
    if state is not None:
        sequences, longest = len(places[0]), max_query_len
    if not (tokens and channels and sequences):
        return y
    rows = min(_TOKENS, next_power_of_2(longest))
    programs = sequences if rows == 1 else tokens // rows + sequences
    _convolve[programs, -(-channels // _CHANNELS)](
        (x, weight, bias, y, state),
        tuple(places),
        tokens,
        sequences,
        channels,
        x.stride(),
        weight.stride(),
        0 if bias is None else bias.stride(0),
        state.stride() if state is not None else None,
        WIDTH=weight.shape[1],
        SILU=silu,
        ROWS=rows,
        COLUMNS=_CHANNELS,
        num_warps=4,
    )
    return y


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _convolve(
    tensors,
    places,
    tokens,
    sequences,
    channels,
    x_strides,
    weight_strides,
    bias_channel,
    state_strides,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute some tokens of one sequence; the program of its first tokens stores its state.

    Only that program reads the state, so no other one reads what it stores.
    """
    x_ptr, weight_ptr, bias_ptr, y_ptr, state_ptr = tensors
    x_token, x_channel = x_strides
    program = tl.program_id(0)
    sequence, first = program, 0
    if ROWS > 1:
        sequence = 0
        if state_ptr is not None:
            sequence = sequence_of(program, places[1], sequences, ROWS)
    start, count, slot, continues = place_of(sequence, places, tokens)
    if ROWS > 1:
        first = (program - start // ROWS - sequence).to(tl.int32) * ROWS
    if first >= count:
        return
    row = first + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_channel = column < channels
    x_base = x_ptr + start * x_token
    state_base = state_ptr
    if state_ptr is not None:
        state_base = state_ptr + slot * state_strides[0] + column * state_strides[1]

    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    for place in tl.static_range(WIDTH):
        source = row + (place - WIDTH + 1)
        there = (source >= 0) & (source < count)
        at = source.to(tl.int64)[:, None] * x_token + column[None, :] * x_channel
        value = tl.load(x_base + at, mask=there[:, None] & is_channel[None, :], other=0.0)
        value = value.to(tl.float32)
        if state_ptr is not None:
            before = (source < 0) & continues
            at = (source + WIDTH - 1).to(tl.int64)[:, None] * state_strides[2]
            mask = before[:, None] & is_channel[None, :]
            value += tl.load(state_base[None, :] + at, mask=mask, other=0.0).to(tl.float32)
        weight_at = column * weight_strides[0] + place * weight_strides[1]
        weight = tl.load(weight_ptr + weight_at, mask=is_channel, other=0.0)
        y += value * weight.to(tl.float32)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column * bias_channel, mask=is_channel, other=0.0)
        y += bias.to(tl.float32)[None, :]
    if SILU:
        y = y / (1 + tl.exp(-y))
    y_row = row.to(tl.int64) + start
    mask = (row < count)[:, None] & is_channel[None, :]
    tl.store(y_ptr + y_row[:, None] * channels + column[None, :], y, mask=mask)

    if state_ptr is not None:
        if WIDTH == 2:
            # Threads that store have not read the same numbers; other widths have a barrier.
            tl.debug_barrier()
        # The input at ``count + place - WIDTH + 1`` replaces an older one, which is not read again.
        stored = is_channel & (first == 0) & (slot >= 0)
        for place in tl.static_range(WIDTH - 1):
            newest = count + (place - WIDTH + 1)
            newest_at = newest.to(tl.int64) * x_token + column * x_channel
            kept = tl.load(x_base + newest_at, mask=stored & (newest >= 0), other=0.0)
            older_at = (newest + WIDTH - 1).to(tl.int64) * state_strides[2]
            is_older = stored & (newest < 0) & continues
            older = tl.load(state_base + older_at, mask=is_older, other=0.0)
            kept = kept.to(tl.float32) + older.to(tl.float32)
            tl.store(state_base + place * state_strides[2], kept, mask=stored)


_causal_conv1d = operator(causal_conv1d_reference, causal_conv1d_triton, empty_like, ("state",))
