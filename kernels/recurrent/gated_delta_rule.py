"""The gated delta rule: a state that decays, and in which a key's value is replaced.

``S = exp(g) S``, ``u = beta (v - S^T k)``, ``S = S + k u^T`` and ``o = scale S^T q``, from "Gated
Delta Networks" (Yang, Kautz and Hatamizadeh, 2025). In a chunk whose decays add up to ``G[t]``, the
``u`` solve a triangular system: ``u[t]`` plus the sum of ``beta[t] exp(G[t] - G[s]) (k[t] . k[s])
u[s]`` over ``s < t`` is ``beta[t] (v[t] - exp(G[t]) S^T k[t])``. No exponent is positive.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.operators import (
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
from vllm_module.kernels.recurrent.states_on_cpu import replace_in_states, takes_states

_EPSILON = 1e-6  # constant in the norms of queries and keys, as in transformers
CHUNK = 64  # tokens of a chunk in plain torch
_TOKENS, _COLUMNS = 16, 16  # tokens of a chunk and columns of a head's values, in a program


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    state_slots: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    context_lens: torch.Tensor | None = None,
    max_query_len: int = 0,
    scale: float | None = None,
    l2_norm: bool = True,
) -> torch.Tensor:
    """Return the outputs of each sequence's recurrence, ``[tokens, value_heads, dv]``.

    Everything is computed in float32.

    Args:
        q, k: ``[tokens, key_heads, dk]``, floating point; the tokens of sequences lie end to end.
            Neighbouring value heads share a key head.
        v: ``[tokens, value_heads, dv]``.
        g: logarithms of the decays, float32 ``[tokens, value_heads]``, not positive.
        beta: ``[tokens, value_heads]``, from 0 to 1.
        state: ``[slots, value_heads, dk, dv]``, read and written. Without it, the tokens are one
            whole sequence.
        state_slots, query_start_loc, context_lens, max_query_len: as in
            :func:`~vllm_module.kernels.recurrent.causal_conv1d.causal_conv1d`.
        scale: factor of the queries; ``dk ** -0.5`` unless given.
        l2_norm: True if queries and keys are first divided by their lengths.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; value heads are no multiple of
            the key heads; slots do not exist or are shared, if values are checked.

    """
    expect("q", q, (None, None, None), FLOATS)
    tokens, key_heads, dk = q.shape
    expect("k", k, q.shape, FLOATS, q)
    expect("v", v, (tokens, None, None), FLOATS, q)
    heads = v.shape[1]
    expect("g", g, (tokens, heads), (torch.float32,), q)
    expect("beta", beta, (tokens, heads), FLOATS, q)
    if heads % max(1, key_heads):
        raise ValueError(f"v has {heads} heads, no multiple of the {key_heads} heads of q and k")
    shape = heads, dk, v.shape[2]
    check_state(q, state, shape, state_slots, query_start_loc, context_lens)
    places = state_slots, query_start_loc, context_lens
    factor = dk**-0.5 if scale is None else scale
    if takes_states(v, state, state_slots, max_query_len, q, k, beta):
        assert state is not None
        assert state_slots is not None
        assert context_lens is not None
        epsilon = _EPSILON if l2_norm else -1.0
        own = state, state_slots, context_lens
        return replace_in_states(q, k, v, g, beta, *own, factor, epsilon)
    return _gated_delta_rule(q, k, v, g, beta, state, *places, max_query_len, factor, l2_norm)


def gated_delta_rule_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    state_slots: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    context_lens: torch.Tensor | None,
    max_query_len: int,
    scale: float,
    l2_norm: bool,
) -> torch.Tensor:
    """Compute chunks in plain torch; see :func:`gated_delta_rule`."""
    repeats = v.shape[1] // max(1, q.shape[1])
    queries, keys = (_normed(each.float(), l2_norm) for each in (q, k))
    queries, keys = (each.repeat_interleave(repeats, 1) for each in (scale * queries, keys))
    values, strengths = v.float(), beta.float()
    if state is None or state_slots is None or query_start_loc is None or context_lens is None:
        zeros = values.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        return _chunked(queries, keys, values, g, strengths, zeros)[0].to(v.dtype)
    if single_tokens(v, state_slots, max_query_len):
        # In place, because a state is larger than everything else that a token needs.
        s = loaded_states(state, state_slots, context_lens).mul_(g.exp()[:, :, None, None])
        u = strengths.unsqueeze(2) * (values - (keys.unsqueeze(2) @ s).squeeze(2))
        s.addcmul_(keys.unsqueeze(3), u.unsqueeze(2))
        store_states(state, state_slots, s)
        return (queries.unsqueeze(2) @ s).squeeze(2).to(v.dtype)
    o = torch.zeros_like(values)
    for part, slot, s in each_sequence(query_start_loc, context_lens, state_slots, state):
        of_values = values[part], g[part], strengths[part]
        o[part], state[slot] = _chunked(queries[part], keys[part], *of_values, s)
    return o.to(v.dtype)


def _normed(x: torch.Tensor, l2_norm: bool) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON) if l2_norm else x


def _chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    s: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one sequence by chunks; queries and keys have a head for each value head."""
    outputs = []
    for chunk in range(0, len(q), CHUNK):
        rows = slice(chunk, chunk + CHUNK)
        # [heads, tokens, ...]
        q_c, k_c, v_c, g_c, b_c = (each[rows].transpose(0, 1) for each in (q, k, v, g, beta))
        sums = g_c.clamp(min=FORGOTTEN).cumsum(1)
        between = (sums.unsqueeze(2) - sums.unsqueeze(1)).tril().exp().tril()
        strength, since = b_c.unsqueeze(2), sums.exp().unsqueeze(2)
        system = strength * between * (k_c @ k_c.transpose(1, 2))  # ones are added on its diagonal
        right = strength * (v_c - since * (k_c @ s))
        u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        scores = between * (q_c @ k_c.transpose(1, 2))
        outputs.append((since * (q_c @ s) + scores @ u).transpose(0, 1))
        left = (sums[:, -1:] - sums).exp().unsqueeze(2)
        s = sums[:, -1].exp()[:, None, None] * s + (k_c * left).transpose(1, 2) @ u
    return (torch.cat(outputs) if outputs else torch.zeros_like(v)), s


def gated_delta_rule_triton(*arguments: Any) -> torch.Tensor:
    """Compute by a Triton kernel; see :func:`gated_delta_rule`.

    A program has some values of a head. It computes its sequence's chunks one after the other, and
    keeps the state in registers. Single tokens, float32 and keys of more than 128 features are
    computed token by token.
    """
    q, k, v, g, beta, state, *places, max_query_len, scale, l2_norm = arguments
    o = empty_output(v, places[0], max_query_len)
    tokens, heads, dv = v.shape
    sequences = 1 if state is None else len(places[0])
    if not (o.numel() and sequences):
        return o
    columns, keys = min(_COLUMNS, next_power_of_2(dv)), max(16, next_power_of_2(q.shape[2]))
    single = state is not None and max_query_len == 1
    by_token = single or v.dtype == torch.float32 or keys > 128
    _delta_rule[(-(-dv // columns), heads, sequences)](
        (q, k, v, g, beta, o, state),
        tuple(places),
        tokens,
        dv,
        heads // q.shape[1],
        scale,
        strides_of(q, k, v, g, beta, state),
        heads * dv,
        DK=q.shape[2],
        KEYS=keys,
        COLUMNS=columns if by_token else max(16, columns),
        CHUNK=_TOKENS,
        BY_TOKEN=by_token,
        NORM=l2_norm,
        EPSILON=_EPSILON,
        num_warps=4 if by_token else 8,
    )
    return o


@triton.jit(do_not_specialize=["tokens"])
def _delta_rule(
    tensors,
    places,
    tokens,
    dv,
    heads_of_key,
    scale,
    strides,
    o_token,
    DK: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    NORM: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Compute some values of one head of one sequence."""
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, o_ptr, state_ptr = tensors
    q_strides, k_strides, v_strides, g_strides, beta_strides, state_strides = strides
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2)
    key_head = head // heads_of_key
    feature = tl.arange(0, KEYS)
    is_column, is_key = column < dv, feature < DK

    start, count, slot, continues = place_of(sequence, places, tokens)
    s = tl.zeros((KEYS, COLUMNS), tl.float32)
    state_at = state_ptr
    in_state = is_key[:, None] & is_column[None, :]
    if state_ptr is not None:
        at = feature.to(tl.int64)[:, None] * state_strides[2]
        at += column.to(tl.int64)[None, :] * state_strides[3]
        state_at = state_ptr + slot * state_strides[0] + head * state_strides[1] + at
        s = tl.load(state_at, mask=in_state & continues, other=0.0).to(tl.float32)

    q_at = q_ptr + key_head * q_strides[1] + feature.to(tl.int64) * q_strides[2]
    k_at = k_ptr + key_head * k_strides[1] + feature.to(tl.int64) * k_strides[2]
    v_at = v_ptr + head * v_strides[1] + column.to(tl.int64) * v_strides[2]
    g_at, beta_at = g_ptr + head * g_strides[1], beta_ptr + head * beta_strides[1]
    o_at = o_ptr + head * dv + column

    if BY_TOKEN:
        for row in range(count):
            token = start + row
            q = tl.load(q_at + token * q_strides[0], mask=is_key, other=0.0).to(tl.float32)
            k = tl.load(k_at + token * k_strides[0], mask=is_key, other=0.0).to(tl.float32)
            if NORM:
                q *= 1 / tl.sqrt(tl.sum(q * q, axis=0) + EPSILON)
                k *= 1 / tl.sqrt(tl.sum(k * k, axis=0) + EPSILON)
            v = tl.load(v_at + token * v_strides[0], mask=is_column, other=0.0).to(tl.float32)
            g = tl.load(g_at + token * g_strides[0])
            beta = tl.load(beta_at + token * beta_strides[0]).to(tl.float32)
            s = tl.exp(g) * s
            u = beta * (v - tl.sum(s * k[:, None], axis=0))
            s += k[:, None] * u[None, :]
            o = scale * tl.sum(s * q[:, None], axis=0)
            tl.store(o_at + token * o_token, o, mask=is_column)
    else:
        place = tl.arange(0, CHUNK)
        causal = place[:, None] >= place[None, :]
        before = place[:, None] > place[None, :]
        for first in range(0, count, CHUNK):
            there = first + place < count
            token = (start + first + place).to(tl.int64)
            k_mask = there[:, None] & is_key[None, :]
            k_from = k_at[None, :] + token[:, None] * k_strides[0]
            v_mask = there[:, None] & is_column[None, :]
            g = tl.load(g_at + token * g_strides[0], mask=there, other=0.0)
            g = tl.maximum(g, -104.0)  # FORGOTTEN
            beta = tl.load(beta_at + token * beta_strides[0], mask=there, other=0.0)
            beta = beta.to(tl.float32)
            sums, last = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
            between = tl.where(causal, sums[:, None] - sums[None, :], float("-inf"))
            between = tl.exp(between)

            # Products are divided by lengths, which needs fewer registers than dividing keys.
            k = tl.load(k_from, mask=k_mask, other=0.0)
            k_length = _over_length(k, NORM, EPSILON)
            system = tl.dot(k, tl.trans(k), input_precision="tf32") * between
            system *= (k_length * beta)[:, None] * k_length[None, :]
            system = tl.where(before, system, 0.0)
            known = tl.dot(k.to(tl.float32), s, input_precision="tf32")
            known *= (k_length * tl.exp(sums))[:, None]
            v = tl.load(v_at[None, :] + token[:, None] * v_strides[0], mask=v_mask, other=0.0)
            u = beta[:, None] * (v.to(tl.float32) - known)
            for row in range(1, CHUNK):
                is_row = place == row
                factors = tl.sum(tl.where(is_row[:, None], system, 0.0), axis=0)
                known_row = tl.sum(factors[:, None] * u, axis=0)
                u = tl.where(is_row[:, None], u - known_row[None, :], u)

            q = tl.load(q_at[None, :] + token[:, None] * q_strides[0], mask=k_mask, other=0.0)
            q_length = _over_length(q, NORM, EPSILON) * scale
            k = tl.load(k_from, mask=k_mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="tf32") * between
            scores *= k_length[None, :]
            o = tl.dot(q.to(tl.float32), s, input_precision="tf32") * tl.exp(sums)[:, None]
            o += tl.dot(scores, u, input_precision="tf32")
            o *= q_length[:, None]
            tl.store(o_at[None, :] + token[:, None] * o_token, o, mask=v_mask)
            u *= (k_length * tl.exp(last - sums))[:, None]
            added = tl.dot(tl.trans(k.to(tl.float32)), u, input_precision="tf32")
            s = tl.exp(last) * s + added
    if state_ptr is not None:
        tl.store(state_at, s, mask=in_state & (slot >= 0) & (count > 0))


@triton.jit
def _over_length(x, NORM: tl.constexpr, EPSILON: tl.constexpr):
    """Return one over the length of each row, or ones."""
    wide = x.to(tl.float32)
    length = tl.sum(wide * wide, axis=1)
    return 1 / tl.sqrt(length + EPSILON) if NORM else length * 0 + 1


def _empty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    """Return an empty output."""
    return torch.empty_like(v, memory_format=torch.contiguous_format)


_gated_delta_rule = operator(
    gated_delta_rule_reference, gated_delta_rule_triton, _empty, ("state",)
)
