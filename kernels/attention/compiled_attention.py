"""Loops of a step's attention, which numba compiles for this CPU.

They are no operations by themselves: they belong to
:mod:`~vllm_module.kernels.attention.attention_on_pages`, and need the extra ``cpu``.

Each is a function of C whose argument is the address of integers of 64 bits: addresses of tensors,
strides in elements, sizes, and floats as the bits of a float64. Features are side by side in
memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_module.kernels.matmul.kept_loops import compiled
from vllm_module.kernels.matmul.torch_threads import numbers, thread, threads
from vllm_module.kernels.rows.compiled_numbers import USED, load, rounded, store


def _score(query: Any, key: Any, scale: Any, cap: Any, at: Any, scores: Any) -> None:
    """Write the scores of a key for some heads."""
    for head in range(len(query)):
        own, total = query[head], np.float32(0)
        for feature in range(len(key)):
            total += own[feature] * key[feature]
        total *= scale
        scores[head, at] = cap * np.tanh(total / cap) if cap else total


def _add(weights: Any, at: Any, value: Any, sums: Any) -> None:
    """Add a value to the sums of some heads."""
    for head in range(len(sums)):
        own, weight = sums[head], weights[head, at]
        for feature in range(len(value)):
            own[feature] += weight * value[feature]


def _softmax(scores: Any, largest: Any) -> None:
    """Replace scores by weights; ``largest`` is a score without a value, or minus infinity."""
    most = largest
    for score in scores:
        most = max(most, score)
    total = np.exp(largest - most)
    for at in range(len(scores)):
        scores[at] = np.exp(scores[at] - most)
        total += scores[at]
    for at in range(len(scores)):
        scores[at] /= total


def _wide(stored: Any, out: Any) -> None:
    """Write the numbers of bfloat16 bits."""
    for at in range(len(stored)):
        out[at] = np.uint32(np.uint32(stored[at]) << np.uint32(16)).view(np.float32)


def _norm(x: Any, eps: Any) -> Any:
    """Return one over the root mean square of a head."""
    total = np.float32(0)
    for feature in range(len(x)):
        total += x[feature] * x[feature]
    return np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps)


def _normalize(x: Any, weight: Any, eps: Any, offset: Any, early: Any, narrow: Any) -> None:
    """Replace a head by its root mean square norm, if there is a weight."""
    if len(weight):
        factor = _norm(x, eps)
        if narrow and early:
            for feature in range(len(x)):
                x[feature] = rounded(rounded(x[feature] * factor) * weight[feature])
        else:
            for feature in range(len(x)):
                value = x[feature] * factor * (weight[feature] + offset)
                x[feature] = rounded(value) if narrow else value


def _rotate(x: Any, cos: Any, sin: Any, step: Any, apart: Any, out: Any) -> None:
    """Write a head with its pairs rotated; a pair is ``apart``, and ``step`` from the next."""
    for feature in range(2 * len(cos), len(x)):
        out[feature] = x[feature]
    for pair in range(len(cos)):
        one, other = step * pair, step * pair + apart
        a, b = x[one], x[other]
        out[one] = a * cos[pair] - b * sin[pair]
        out[other] = b * cos[pair] + a * sin[pair]


@compiled
def compiled_attention(bfloat16: bool) -> Any:
    """Return the attention of one new token of each sequence to its pages.

    A thread takes some heads of some sequences, and reads a token's keys for all of them before the
    next token's, as they are in memory. Sums are float32, and a token's bits depend on its own
    sequence alone.

    Arguments: query with strides of tokens and heads; keys and values with strides of pages, tokens
    and heads; block tables, int32, with the stride of sequences; contexts, int32; the row of each
    sequence in query and output, int64; the number of sequences; output, contiguous; heads, KV
    heads, head size, page size; the window or 0; slopes and sinks, float32, or 0; scale; the cap or
    0. Query and output are float32.

    Args:
        bfloat16: whether the cache is; otherwise it is float32.

    Raises:
        ImportError: numba is not installed, or torch has no threads of OpenMP.

    """
    from numba.extending import register_jitable

    stored, size = (np.uint16, 2) if bfloat16 else (np.float32, 4)
    for inlined in (_score, _add, _softmax, _wide):
        register_jitable(inline="always")(inlined)
    for function in USED:
        register_jitable(function)

    def attend(argument: Any) -> None:
        at = numbers(argument, np.int64, (27,))
        narrow = at[26]
        bytes_of_one = 2 if narrow else 4
        query_token, query_head = at[1], at[2]
        sequences, heads, kv_heads, columns = at[15], at[17], at[18], at[19]
        page_size, window = at[20], at[21]
        contexts = numbers(at[13], np.int32, (sequences,))
        rows = numbers(at[14], np.int64, (sequences,))
        slopes = numbers(at[22], np.float32, (heads if at[22] else 0,))
        sinks = numbers(at[23], np.float32, (heads if at[23] else 0,))
        scale = np.float32(np.int64(at[24]).view(np.float64))
        cap = np.float32(np.int64(at[25]).view(np.float64))
        group, longest = heads // kv_heads, np.int64(0)
        for sequence in range(sequences):
            longest = max(longest, np.int64(contexts[sequence]))
        query, sums = np.empty((heads, columns), np.float32), np.empty((heads, columns), np.float32)
        scores = np.empty((heads, longest), np.float32)
        wide = np.empty(columns, np.float32)
        begin = sequences * kv_heads * thread() // threads()
        end = sequences * kv_heads * (thread() + 1) // threads()
        while begin < end:
            sequence, low = begin // kv_heads, begin % kv_heads
            high = min(kv_heads, low + end - begin)
            begin += high - low
            context, row = np.int64(contexts[sequence]), rows[sequence]
            first = max(np.int64(0), context - window) if window else np.int64(0)
            table = numbers(at[11] + 4 * sequence * at[12], np.int32, (at[12],))
            for head in range(low * group, high * group):
                place = at[0] + bytes_of_one * (row * query_token + head * query_head)
                load(place, narrow, query[head])
                sums[head] = 0
            for token in range(first, context):
                place = table[token // page_size] * at[4] + token % page_size * at[5]
                for kv_head in range(low, high):
                    own = slice(kv_head * group, (kv_head + 1) * group)
                    address = at[3] + size * (place + kv_head * at[6])
                    key = numbers(address, stored, (columns,))
                    if bfloat16:
                        _wide(key, wide)
                    read = wide if bfloat16 else key
                    _score(query[own], read, scale, cap, token - first, scores[own])
            for head in range(low * group, high * group):
                own_scores = scores[head, : context - first]
                if at[22]:
                    for token in range(first, context):
                        own_scores[token - first] += slopes[head] * np.float32(token - context + 1)
                _softmax(own_scores, sinks[head] if at[23] else np.float32(-np.inf))
            for token in range(first, context):
                place = table[token // page_size] * at[8] + token % page_size * at[9]
                for kv_head in range(low, high):
                    own = slice(kv_head * group, (kv_head + 1) * group)
                    address = at[7] + size * (place + kv_head * at[10])
                    value = numbers(address, stored, (columns,))
                    if bfloat16:
                        _wide(value, wide)
                    read = wide if bfloat16 else value
                    _add(scores[own], token - first, read, sums[own])
            for head in range(low * group, high * group):
                place = at[16] + bytes_of_one * (row * heads + head) * columns
                store(sums[head], place, narrow)

    return attend


@compiled
def compiled_rotation() -> Any:
    """Return the norm and rotation of a step's queries and keys, which are stored with values.

    A thread takes some of the tokens. Rounding to bfloat16 is that of the operations one by one.

    Arguments: tokens; query, with strides of tokens and heads, and its heads; key and value, with
    such strides; KV heads; head size; cos and sin, with the stride of tokens; the number of pairs,
    the distance of one pair from the next, and that within a pair; caches of keys and values, with
    strides of pages, tokens and heads; page size; slots, int64, with their stride; weights of query
    and key, or 0; eps; the offset of the weights; whether a norm is rounded before the weight
    multiplies; whether all but cos and sin are bfloat16, or all are float32. The query is written.
    A slot below 0 stores nothing.

    Raises:
        ImportError: numba is not installed, or torch has no threads of OpenMP.

    """
    from numba.extending import register_jitable

    for function in (*USED, _norm, _normalize, _rotate):
        register_jitable(function)

    def rotate(argument: Any) -> None:
        at = numbers(argument, np.int64, (37,))
        columns, pairs, step, apart, page_size = at[12], at[17], at[18], at[19], at[28]
        eps = np.float32(np.int64(at[33]).view(np.float64))
        offset = np.float32(np.int64(at[34]).view(np.float64))
        early, narrow = at[35], at[36]
        size = 2 if narrow else 4
        q_weight = np.empty(columns if at[31] else 0, np.float32)
        k_weight = np.empty(columns if at[32] else 0, np.float32)
        load(at[31], narrow, q_weight)
        load(at[32], narrow, k_weight)
        head, rotated = np.empty(columns, np.float32), np.empty(columns, np.float32)
        for token in range(at[0] * thread() // threads(), at[0] * (thread() + 1) // threads()):
            cos = numbers(at[13] + 4 * token * at[14], np.float32, (pairs,))
            sin = numbers(at[15] + 4 * token * at[16], np.float32, (pairs,))
            for index in range(at[4]):
                place = at[1] + size * (token * at[2] + index * at[3])
                load(place, narrow, head)
                _normalize(head, q_weight, eps, offset, early, narrow)
                _rotate(head, cos, sin, step, apart, rotated)
                store(rotated, place, narrow)
            slot = numbers(at[29] + 8 * token * at[30], np.int64, (1,))[0]
            if slot < 0:
                continue
            page, inside = slot // page_size, slot % page_size
            for index in range(at[11]):
                load(at[5] + size * (token * at[6] + index * at[7]), narrow, head)
                _normalize(head, k_weight, eps, offset, early, narrow)
                _rotate(head, cos, sin, step, apart, rotated)
                place = page * at[21] + inside * at[22] + index * at[23]
                store(rotated, at[20] + size * place, narrow)
                load(at[8] + size * (token * at[9] + index * at[10]), narrow, head)
                place = page * at[25] + inside * at[26] + index * at[27]
                store(head, at[24] + size * place, narrow)

    return rotate
