"""Loops over the states of sequences with one new token each, which numba compiles for this CPU.

They are no operations by themselves: they belong to
:mod:`~vllm_module.kernels.recurrent.states_on_cpu`, and need the extra ``cpu``.

Each is a function of C whose argument is the address of integers of 64 bits: addresses of tensors,
strides in elements, sizes, whether tensors are bfloat16, and floats as the bits of a float64. What
has no stride is contiguous; weights are float32. A slot below 0 is padding, whose state is zeros
and is not stored, as that of a sequence without earlier tokens is zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_module.kernels.matmul.kept_loops import compiled
from vllm_module.kernels.matmul.torch_threads import numbers, thread, threads
from vllm_module.kernels.rows.compiled_numbers import USED, exp, load, silu, store


def _softplus(x: Any) -> Any:
    return x if x > 20 else np.log1p(exp(x))


@compiled
def compiled_scan() -> Any:
    """Return one step of the recurrence of Mamba-2, for some heads of some tokens in each thread.

    Arguments: tokens, heads, features of a head, groups, numbers of a state for each feature; ``x``
    with strides of tokens and heads; ``dt`` with the stride of tokens; ``a``; ``b`` and ``c``, each
    with strides of tokens and groups; ``d`` and ``dt_bias``, or 0; states with the stride of slots;
    slots, int64; contexts, int32; the output; least and largest step; whether inputs and output are
    bfloat16, and whether states are.

    Raises:
        ImportError: numba is not installed, or torch has no threads of OpenMP.

    """
    from numba.extending import register_jitable

    for function in (*USED, exp, _softplus):
        register_jitable(function)

    def scan(argument: Any) -> None:
        at = numbers(argument, np.int64, (28,))
        tokens, heads, features, groups, size = at[0], at[1], at[2], at[3], at[4]
        narrow, narrow_state = at[26], at[27]
        bytes_of_one, bytes_of_state = 2 if narrow else 4, 2 if narrow_state else 4
        a = numbers(at[10], np.float32, (heads,))
        d = numbers(at[17], np.float32, (heads if at[17] else 0,))
        shift = numbers(at[18], np.float32, (heads if at[18] else 0,))
        slots = numbers(at[21], np.int64, (tokens,))
        contexts = numbers(at[22], np.int32, (tokens,))
        least = np.float32(np.int64(at[24]).view(np.float64))
        most = np.float32(np.int64(at[25]).view(np.float64))
        x, y = np.empty(features, np.float32), np.empty(features, np.float32)
        b, c = np.empty(size, np.float32), np.empty(size, np.float32)
        h, given = np.empty(size, np.float32), np.empty(1, np.float32)
        items = tokens * heads
        for item in range(items * thread() // threads(), items * (thread() + 1) // threads()):
            token, head = item // heads, item % heads
            group, slot = head // (heads // groups), slots[token]
            load(at[5] + bytes_of_one * (token * at[6] + head * at[7]), narrow, x)
            load(at[8] + bytes_of_one * (token * at[9] + head), narrow, given)
            load(at[11] + bytes_of_one * (token * at[12] + group * at[13]), narrow, b)
            load(at[14] + bytes_of_one * (token * at[15] + group * at[16]), narrow, c)
            step = given[0] + shift[head] if len(shift) else given[0]
            step = min(max(np.float32(_softplus(step)), least), most)
            decay = np.float32(exp(step * a[head]))
            continues = slot >= 0 and contexts[token] > 1
            for feature in range(features):
                place = slot * at[20] + (head * features + feature) * size
                if continues:
                    load(at[19] + bytes_of_state * place, narrow_state, h)
                else:
                    h[:] = 0
                scaled, total = step * x[feature], np.float32(0)
                for number in range(size):
                    own = h[number] * decay + scaled * b[number]
                    h[number] = own
                    total += own * c[number]
                y[feature] = total + d[head] * x[feature] if len(d) else total
                if slot >= 0:
                    store(h, at[19] + bytes_of_state * place, narrow_state)
            store(y, at[23] + bytes_of_one * item * features, narrow)

    return scan


@compiled
def compiled_delta_rule() -> Any:
    """Return one step of the gated delta rule, for some heads of some tokens in each thread.

    A state is read twice and written once: the output is ``exp(g) S^T q + (k . q) u``, which needs
    the state before alone.

    Arguments: tokens, heads, heads of keys, features of keys and of values; ``q``, ``k`` and ``v``,
    each with strides of tokens and heads; ``g``, float32 ``[tokens, heads]``; ``beta`` with the
    stride of tokens; states with the stride of slots; slots, int64; contexts, int32; the output;
    the scale; what is added to the squares of a length, or a negative number where queries and keys
    are not divided by it; whether inputs and output are bfloat16, and whether states are.

    Raises:
        ImportError: numba is not installed, or torch has no threads of OpenMP.

    """
    from numba.extending import register_jitable

    for function in (*USED, exp):
        register_jitable(function)

    def replace(argument: Any) -> None:
        at = numbers(argument, np.int64, (26,))
        tokens, heads, key_heads, keys, values = at[0], at[1], at[2], at[3], at[4]
        narrow, narrow_state = at[24], at[25]
        bytes_of_one, bytes_of_state = 2 if narrow else 4, 2 if narrow_state else 4
        g = numbers(at[14], np.float32, (tokens, heads))
        slots = numbers(at[19], np.int64, (tokens,))
        contexts = numbers(at[20], np.int32, (tokens,))
        scale = np.float32(np.int64(at[22]).view(np.float64))
        epsilon = np.float32(np.int64(at[23]).view(np.float64))
        q, k = np.empty(keys, np.float32), np.empty(keys, np.float32)
        v, given = np.empty(values, np.float32), np.empty(1, np.float32)
        found, y = np.empty(values, np.float32), np.empty(values, np.float32)
        scratch = np.empty((keys, values), np.float32)
        items = tokens * heads
        for item in range(items * thread() // threads(), items * (thread() + 1) // threads()):
            token, head = item // heads, item % heads
            key_head, slot = head // (heads // key_heads), slots[token]
            load(at[5] + bytes_of_one * (token * at[6] + key_head * at[7]), narrow, q)
            load(at[8] + bytes_of_one * (token * at[9] + key_head * at[10]), narrow, k)
            load(at[11] + bytes_of_one * (token * at[12] + head * at[13]), narrow, v)
            load(at[15] + bytes_of_one * (token * at[16] + head), narrow, given)
            of_q, of_k, both = np.float32(0), np.float32(0), np.float32(0)
            for key in range(keys):
                of_q += q[key] * q[key]
                of_k += k[key] * k[key]
                both += q[key] * k[key]
            of_q = np.float32(1) / np.sqrt(of_q + epsilon) if epsilon >= 0 else np.float32(1)
            of_k = np.float32(1) / np.sqrt(of_k + epsilon) if epsilon >= 0 else np.float32(1)
            both *= of_q * of_k * scale
            for key in range(keys):
                q[key] *= of_q * scale
                k[key] *= of_k
            decay, place = np.float32(exp(g[token, head])), np.int64(0)
            state = scratch
            if slot >= 0:
                place = at[17] + bytes_of_state * (slot * at[18] + head * keys * values)
                if not narrow_state:
                    state = numbers(place, np.float32, (keys, values))
            if slot < 0 or contexts[token] <= 1:
                state[:] = 0
            elif narrow_state:
                load(place, narrow_state, state.reshape(keys * values))
            found[:] = 0
            y[:] = 0
            for key in range(keys):
                for value in range(values):
                    found[value] += k[key] * state[key, value]
                    y[value] += q[key] * state[key, value]
            for value in range(values):
                v[value] = given[0] * (v[value] - decay * found[value])
                y[value] = decay * y[value] + both * v[value]
            for key in range(keys):
                for value in range(values):
                    state[key, value] = decay * state[key, value] + k[key] * v[value]
            if slot >= 0 and narrow_state:
                store(state.reshape(keys * values), place, narrow_state)
            store(y, at[21] + bytes_of_one * item * values, narrow)

    return replace


@compiled
def compiled_convolution() -> Any:
    """Return the convolution of one token with its sequence's last inputs, and keep those.

    Arguments: tokens; channels, of which a thread takes some; weights of a channel; ``x`` with the
    stride of tokens; weights, ``[channels, weights]``; biases, or 0; states with the stride of
    slots; slots, int64; contexts, int32; the output; whether it is ``y * sigmoid(y)``; whether
    inputs and output are bfloat16, and whether states are.

    Raises:
        ImportError: numba is not installed, or torch has no threads of OpenMP.

    """
    from numba.extending import register_jitable

    for function in (*USED, exp, silu):
        register_jitable(function)

    def convolve(argument: Any) -> None:
        at = numbers(argument, np.int64, (15,))
        tokens, channels, width = at[0], at[1], at[2]
        narrow, narrow_state = at[13], at[14]
        bytes_of_one, bytes_of_state = 2 if narrow else 4, 2 if narrow_state else 4
        weight = numbers(at[5], np.float32, (channels, width))
        bias = numbers(at[6], np.float32, (channels if at[6] else 0,))
        slots = numbers(at[9], np.int64, (tokens,))
        contexts = numbers(at[10], np.int32, (tokens,))
        begin = channels * thread() // threads()
        count = channels * (thread() + 1) // threads() - begin
        x, y = np.empty(count, np.float32), np.empty(count, np.float32)
        last = np.zeros((count, width - 1), np.float32)
        kept = last.reshape(count * (width - 1))
        for token in range(tokens):
            slot = slots[token]
            place = at[7] + bytes_of_state * (slot * at[8] + begin * (width - 1))
            load(at[3] + bytes_of_one * (token * at[4] + begin), narrow, x)
            if slot >= 0 and contexts[token] > 1:
                load(place, narrow_state, kept)
            else:
                kept[:] = 0
            for channel in range(count):
                total = weight[begin + channel, width - 1] * x[channel]
                for earlier in range(width - 1):
                    total += weight[begin + channel, earlier] * last[channel, earlier]
                for earlier in range(width - 2):
                    last[channel, earlier] = last[channel, earlier + 1]
                last[channel, width - 2] = x[channel]
                total = total + bias[begin + channel] if len(bias) else total
                y[channel] = np.float32(silu(total)) if at[12] else total
            if slot >= 0:
                store(kept, place, narrow_state)
            store(y, at[11] + bytes_of_one * (token * channels + begin), narrow)

    return convolve
