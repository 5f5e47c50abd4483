"""Mamba-2's recurrence, whose state has one decay for each head, in chunks or token by token.

``h = exp(dt A) h + dt x B^T`` and ``y = h C + D x``, from "Transformers are SSMs" (Dao and Gu,
2024). In a chunk whose decays add up to ``c[t]``, ``y[t]`` is ``exp(c[t]) h C[t]`` plus the sum of
``exp(c[t] - c[s]) dt[s] (C[t] . B[s]) x[s]`` over ``s <= t``: products of matrices. No exponent is
positive.
"""

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
    strides_of,
    tl,
    triton,
)
from vllm_module.kernels.recurrent.recurrent_state import (
    FORGOTTEN,
    check_state,
    each_sequence,
    empty_output,
    loaded_states,
    place_of,
    single_tokens,
    store_states,
)
from vllm_module.kernels.recurrent.states_on_cpu import scan_states, takes_states

CHUNK = 64  # tokens of a chunk in plain torch
_TOKENS, _FEATURES = 32, 32  # tokens of a chunk and features of a head, in a program


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    state_slots: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    context_lens: torch.Tensor | None = None,
    max_query_len: int = 0,
    dt_min: float = 0.0,
    dt_max: float = float("inf"),
) -> torch.Tensor:
    """Return the outputs of each sequence's recurrence, ``[tokens, heads, head_dim]``.

    The step is ``softplus(dt + dt_bias)``, limited to ``dt_min`` and ``dt_max``. Everything is
    computed in float32.

    Args:
        x: ``[tokens, heads, head_dim]``, floating point; the tokens of sequences lie end to end.
        dt: ``[tokens, heads]``.
        a: float32 ``[heads]``, negative.
        b, c: ``[tokens, groups, n]``; neighbouring heads share a group.
        d, dt_bias: ``[heads]``.
        state: ``[slots, heads, head_dim, n]``, read and written. Without it, the tokens are one
            whole sequence.
        state_slots, query_start_loc, context_lens, max_query_len: as in
            :func:`~vllm_module.kernels.recurrent.causal_conv1d.causal_conv1d`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; heads are no multiple of the
            groups; slots do not exist or are shared, if values are checked.

    """
    expect("x", x, (None, None, None), FLOATS)
    tokens, heads, features = x.shape
    expect("dt", dt, (tokens, heads), FLOATS, x)
    expect("a", a, (heads,), (torch.float32,), x)
    expect("b", b, (tokens, None, None), FLOATS, x)
    expect("c", c, b.shape, FLOATS, x)
    if heads % max(1, b.shape[1]):
        raise ValueError(f"x has {heads} heads, no multiple of the {b.shape[1]} groups of b and c")
    for name, vector in (("d", d), ("dt_bias", dt_bias)):
        if vector is not None:
            expect(name, vector, (heads,), FLOATS, x)
    shape = heads, features, b.shape[2]
    check_state(x, state, shape, state_slots, query_start_loc, context_lens)
    if takes_states(x, state, state_slots, max_query_len, dt, b, c):
        assert state is not None
        assert state_slots is not None
        assert context_lens is not None
        own = state, state_slots, context_lens, dt_min, dt_max
        return scan_states(x, dt, a, b, c, d, dt_bias, *own)
    places = state_slots, query_start_loc, context_lens
    return _mamba2_scan(
        x, dt, a, b, c, d, dt_bias, state, *places, max_query_len, dt_min, dt_max
    )  # fmt: skip


def mamba2_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor | None,
    state_slots: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    context_lens: torch.Tensor | None,
    max_query_len: int,
    dt_min: float,
    dt_max: float,
) -> torch.Tensor:
    """Compute chunks in plain torch; see :func:`mamba2_scan`."""
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = F.softplus(steps).clamp(dt_min, dt_max)
    wide = x.float()
    skipped = None if d is None else d.float().view(-1, 1) * wide
    repeats = x.shape[1] // max(1, b.shape[1])
    b, c = (each.float().repeat_interleave(repeats, 1) for each in (b, c))
    if state is None or state_slots is None or query_start_loc is None or context_lens is None:
        zeros = wide.new_zeros(*x.shape[1:], b.shape[2])
        y, _ = _chunked(wide, steps, a, b, c, zeros)
    elif single_tokens(x, state_slots, max_query_len):
        h = loaded_states(state, state_slots, context_lens)
        decay = (steps * a).exp()[:, :, None, None]
        # In place, because a state is larger than everything else that a token needs.
        h.mul_(decay).addcmul_((steps[:, :, None] * wide)[..., None], b[:, :, None, :])
        y = (h @ c.unsqueeze(3)).squeeze(3)
        store_states(state, state_slots, h)
    else:
        y = torch.zeros_like(wide)  # zeros, without ``d x``, for tokens of no sequence
        if skipped is not None:
            skipped[query_start_loc[-1] :] = 0
        for part, slot, h in each_sequence(query_start_loc, context_lens, state_slots, state):
            y[part], state[slot] = _chunked(wide[part], steps[part], a, b[part], c[part], h)
    return (y if skipped is None else y + skipped).to(x.dtype)


def _chunked(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    h: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one sequence chunk by chunk; each head has its own group."""
    outputs = []
    for chunk in range(0, len(x), CHUNK):
        rows = slice(chunk, chunk + CHUNK)
        # [heads, tokens, ...]
        steps, x_c, b_c, c_c = (each[rows].transpose(0, 1) for each in (dt, x, b, c))
        sums = (steps * a.unsqueeze(1)).clamp(min=FORGOTTEN).cumsum(1)
        between = (sums.unsqueeze(2) - sums.unsqueeze(1)).tril()
        scores = (c_c @ b_c.transpose(1, 2)) * between.exp().tril()
        weighted = steps.unsqueeze(2) * x_c
        before = sums.exp().unsqueeze(2) * (c_c @ h.transpose(1, 2))
        outputs.append((scores @ weighted + before).transpose(0, 1))
        left = (sums[:, -1:] - sums).exp().unsqueeze(2)
        last = sums[:, -1].exp()[:, None, None]
        h = last * h + (weighted * left).transpose(1, 2) @ b_c
    return (torch.cat(outputs) if outputs else torch.zeros_like(x)), h


def mamba2_scan_triton(*arguments: Any) -> torch.Tensor:
    """Compute by a Triton kernel, a program for some features of a head; see :func:`mamba2_scan`.

    A program computes its sequence's chunks one after the other, and keeps the state in registers.
    Single tokens and float32 are computed token by token.
    """
    x, dt, a, b, c, d, dt_bias, state, *places, max_query_len, dt_min, dt_max = arguments
    y = empty_output(x, places[0], max_query_len)
    tokens, heads, features = x.shape
    sequences = 1 if state is None else len(places[0])
    if not (y.numel() and sequences):
        return y
    columns, size = min(_FEATURES, next_power_of_2(features)), max(16, next_power_of_2(b.shape[2]))
    single = state is not None and max_query_len == 1
    by_token = single or x.dtype == torch.float32
    _scan[(-(-features // columns), heads, sequences)](
        (x, dt, a, b, c, d, dt_bias, y, state),
        tuple(places),
        tokens,
        features,
        heads // b.shape[1],
        dt_min,
        dt_max,
        strides_of(x, dt, b, c, state),
        heads * features,
        N=b.shape[2],
        STATE=size,
        COLUMNS=columns if by_token else max(16, columns),
        CHUNK=_TOKENS if size <= 128 else _TOKENS // 2,
        BY_TOKEN=by_token,
        num_warps=4 if size <= 128 else 8,
    )
    return y


@triton.jit(do_not_specialize=["tokens"])
def _scan(
    tensors,
    places,
    tokens,
    features,
    heads_of_group,
    dt_min,
    dt_max,
    strides,
    y_token,
    N: tl.constexpr,
    STATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    """Compute some features of one head of one sequence."""
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, dt_bias_ptr, y_ptr, state_ptr = tensors
    x_strides, dt_strides, b_strides, c_strides, state_strides = strides
    feature = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2)
    group = head // heads_of_group
    n = tl.arange(0, STATE)
    is_feature, is_n = feature < features, n < N

    start, count, slot, continues = place_of(sequence, places, tokens)
    h = tl.zeros((COLUMNS, STATE), tl.float32)
    state_at = state_ptr
    in_state = is_feature[:, None] & is_n[None, :]
    if state_ptr is not None:
        at = feature.to(tl.int64)[:, None] * state_strides[2]
        at += n.to(tl.int64)[None, :] * state_strides[3]
        state_at = state_ptr + slot * state_strides[0] + head * state_strides[1] + at
        h = tl.load(state_at, mask=in_state & continues, other=0.0).to(tl.float32)

    a = tl.load(a_ptr + head)
    dt_bias = 0.0
    if dt_bias_ptr is not None:
        dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    d = 0.0
    if d_ptr is not None:
        d = tl.load(d_ptr + head).to(tl.float32)
    x_at = x_ptr + head * x_strides[1] + feature.to(tl.int64) * x_strides[2]
    dt_at = dt_ptr + head * dt_strides[1]
    b_at = b_ptr + group * b_strides[1] + n.to(tl.int64) * b_strides[2]
    c_at = c_ptr + group * c_strides[1] + n.to(tl.int64) * c_strides[2]
    y_at = y_ptr + head * features + feature

    if BY_TOKEN:
        for row in range(count):
            token = start + row
            step = tl.load(dt_at + token * dt_strides[0]).to(tl.float32)
            step = _limited(step + dt_bias, dt_min, dt_max)
            x = tl.load(x_at + token * x_strides[0], mask=is_feature, other=0.0).to(tl.float32)
            b = tl.load(b_at + token * b_strides[0], mask=is_n, other=0.0).to(tl.float32)
            c = tl.load(c_at + token * c_strides[0], mask=is_n, other=0.0).to(tl.float32)
            h = tl.exp(step * a) * h + (step * x)[:, None] * b[None, :]
            y = tl.sum(h * c[None, :], axis=1) + d * x
            tl.store(y_at + token * y_token, y, mask=is_feature)
    else:
        place = tl.arange(0, CHUNK)
        causal = place[:, None] >= place[None, :]
        for first in range(0, count, CHUNK):
            there = first + place < count
            token = (start + first + place).to(tl.int64)
            step = tl.load(dt_at + token * dt_strides[0], mask=there, other=0.0)
            step = _limited(step.to(tl.float32) + dt_bias, dt_min, dt_max)
            step = tl.where(there, step, 0.0)
            logarithm = tl.maximum(step * a, -104.0)  # FORGOTTEN
            sums, last = tl.cumsum(logarithm, axis=0), tl.sum(logarithm, axis=0)
            x_mask = there[:, None] & is_feature[None, :]
            x = tl.load(x_at[None, :] + token[:, None] * x_strides[0], mask=x_mask, other=0.0)
            n_mask = there[:, None] & is_n[None, :]
            b = tl.load(b_at[None, :] + token[:, None] * b_strides[0], mask=n_mask, other=0.0)
            c = tl.load(c_at[None, :] + token[:, None] * c_strides[0], mask=n_mask, other=0.0)
            scores = tl.dot(c, tl.trans(b), input_precision="tf32")
            between = tl.where(causal, sums[:, None] - sums[None, :], float("-inf"))
            scores *= tl.exp(between)
            x = x.to(tl.float32)
            weighted = x * step[:, None]
            y = tl.dot(scores, weighted, input_precision="tf32")
            wide_c = c.to(tl.float32) * tl.exp(sums)[:, None]
            y += tl.dot(wide_c, tl.trans(h), input_precision="tf32")
            y += d * x
            tl.store(y_at[None, :] + token[:, None] * y_token, y, mask=x_mask)
            weighted *= tl.exp(last - sums)[:, None]
            h = tl.exp(last) * h
            h += tl.dot(tl.trans(weighted), b.to(tl.float32), input_precision="tf32")
    if state_ptr is not None:
        tl.store(state_at, h, mask=in_state & (slot >= 0) & (count > 0))


@triton.jit
def _limited(step, dt_min, dt_max):
    """Return ``softplus(step)`` between two limits."""
    # Above 20 the logarithm equals the number, as in torch. 1 + power would round small powers.
    power = tl.exp(tl.minimum(step, 20.0))
    small = power * (1 - power * 0.5)
    softplus = tl.where(power < 1e-3, small, tl.log(1 + power))
    softplus = tl.where(step > 20.0, step, softplus)
    return tl.minimum(tl.maximum(softplus, dt_min), dt_max)


_mamba2_scan = operator(mamba2_scan_reference, mamba2_scan_triton, empty_like, ("state",))
