"""Routing of a few tokens, which numba compiles for this CPU (the extra ``cpu``).

They are no operations by themselves: they belong to :mod:`~vllm_module.kernels.experts.few_tokens`.
Each is a function of C whose argument is the address of integers of 64 bits: addresses of tensors,
which are contiguous, sizes, flags, and floats as the bits of a float64. One thread runs it, but for
:func:`compiled_combination`, where each takes some of the features.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_module.kernels.matmul.kept_loops import compiled
from vllm_module.kernels.matmul.torch_threads import numbers, thread, threads
from vllm_module.kernels.rows.compiled_numbers import USED, exp, load, store

_LEAST = np.int64(-(2**63))  # of what cannot be chosen


def _key(value: Any, place: Any) -> Any:
    """Return an integer that is larger for larger floats, then for lower places; NaN is largest."""
    bits = np.float32(value).view(np.int32)
    if value != value:
        bits = np.int32(0x7FFFFFFF)
    elif value == 0:  # -0 is 0
        bits = np.int32(0)
    elif bits < 0:
        bits = np.int32(bits ^ np.int32(0x7FFFFFFF))
    return np.int64(np.int64(np.int64(bits) << np.int64(32)) - np.int64(place))


def _largest(keys: Any) -> Any:
    """Return where the largest of some integers is."""
    at = 0
    for other in range(1, len(keys)):
        if keys[other] > keys[at]:
            at = other
    return at


@compiled
def compiled_choice() -> Any:
    """Return what chooses experts, as :func:`~vllm_module.kernels.experts.topk_routing` does.

    Arguments: tokens; experts; experts of a token; whether scores are sigmoids, and whether their
    sum divides them; groups, and how many are chosen; the bits of the factor; the logits, and
    whether they are bfloat16; the bias, or 0; what is written: weights, and experts.

    Raises:
        ImportError: numba is not installed, or torch has no threads of OpenMP.

    """
    from numba.extending import register_jitable

    for function in (*USED, exp, _key, _largest):
        register_jitable(function)

    def choose(argument: Any) -> None:
        at = numbers(argument, np.int64, (13,))
        tokens, experts, top_k, groups = at[0], at[1], at[2], at[5]
        size = experts // groups
        factor = np.float32(np.int64(at[7]).view(np.float64))
        bias = numbers(at[10], np.float32, (experts if at[10] else 0,))
        weights = numbers(at[11], np.float32, (tokens, top_k))
        chosen = numbers(at[12], np.int32, (tokens, top_k))
        choice, scores = np.empty(experts, np.float32), np.empty(experts, np.float32)
        keys, of_groups = np.empty(experts, np.int64), np.empty(groups, np.int64)
        for token in range(tokens):
            load(at[8] + (2 if at[9] else 4) * token * experts, at[9], choice)
            if at[3]:
                for expert in range(experts):
                    scores[expert] = np.float32(1) / (np.float32(1) + exp(-choice[expert]))
            else:
                most, total = choice[0], np.float32(0)
                for expert in range(experts):
                    if choice[expert] > most or choice[expert] != choice[expert]:
                        most = choice[expert]
                for expert in range(experts):
                    scores[expert] = exp(choice[expert] - most)
                    total += scores[expert]
                for expert in range(experts):
                    scores[expert] /= total
            for expert in range(experts):
                if len(bias):
                    choice[expert] = scores[expert] + bias[expert]
                keys[expert] = _key(choice[expert], expert)
            if at[6] < groups:
                for group in range(groups):
                    own = keys[group * size : (group + 1) * size]
                    first = _largest(own)
                    best, kept = choice[group * size + first], own[first]
                    if len(bias) and size > 1:
                        own[first] = _LEAST
                        best += choice[group * size + _largest(own)]
                        own[first] = kept
                    of_groups[group] = _key(best, group)
                for _ in range(at[6]):
                    of_groups[_largest(of_groups)] = _LEAST
                for group in range(groups):
                    if of_groups[group] != _LEAST:
                        keys[group * size : (group + 1) * size] = _LEAST
            total = np.float32(0)
            for place in range(top_k):
                expert = _largest(keys)
                keys[expert] = _LEAST
                chosen[token, place], weights[token, place] = expert, scores[expert]
                total += scores[expert]
            for place in range(top_k):
                if at[4]:
                    weights[token, place] /= total + np.float32(1e-20)
                weights[token, place] *= factor

    return choose


@compiled
def compiled_order() -> Any:
    """Return what sorts rows by expert, as ``sort_by_expert`` does.

    Arguments: rows; the first expert, and how many there are; the experts of all rows; what is
    written: the order, and offsets.

    Raises:
        ImportError: numba is not installed, or torch has no threads of OpenMP.

    """

    def order(argument: Any) -> None:
        at = numbers(argument, np.int64, (6,))
        rows, first, count = at[0], at[1], at[2]
        experts = numbers(at[3], np.int32, (rows,))
        ordered = numbers(at[4], np.int32, (rows,))
        offsets = numbers(at[5], np.int32, (count + 1,))
        ends = np.zeros(count + 2, np.int64)
        for row in range(rows):
            own = np.int64(experts[row]) - first
            ends[(own if own >= 0 and own < count else count) + 1] += 1
        for expert in range(count + 1):
            offsets[expert] = ends[expert]
            ends[expert + 1] += ends[expert]
        for row in range(rows):
            own = np.int64(experts[row]) - first
            own = own if own >= 0 and own < count else count
            ordered[ends[own]] = row
            ends[own] += 1

    return order


@compiled
def compiled_combination() -> Any:
    """Return what sums the rows of each token's experts, as ``combine_experts`` does.

    Arguments: tokens; experts of a token; features; the rows, and whether they are bfloat16; the
    order; the first row of other ranks' experts; the weights; what is written; bytes from one row
    to the next.

    Raises:
        ImportError: numba is not installed, or torch has no threads of OpenMP.

    """
    from numba.extending import register_jitable

    for function in USED:
        register_jitable(function)

    def combine(argument: Any) -> None:
        at = numbers(argument, np.int64, (10,))
        tokens, top_k, features, narrow = at[0], at[1], at[2], at[4]
        order = numbers(at[5], np.int32, (tokens * top_k,))
        last = numbers(at[6], np.int32, (1,))[0]
        weights = numbers(at[7], np.float32, (tokens * top_k,))
        place = np.full(tokens * top_k, last, np.int64)
        for row in range(len(order)):
            if order[row] >= 0 and order[row] < len(place):
                place[order[row]] = row
        begin = features * thread() // threads()
        row_of_one = np.empty(features * (thread() + 1) // threads() - begin, np.float32)
        total = np.empty(len(row_of_one), np.float32)
        size = 2 if narrow else 4
        for token in range(tokens):
            total[:] = 0
            for row in range(token * top_k, (token + 1) * top_k):
                if place[row] < last:
                    load(at[3] + place[row] * at[9] + size * begin, narrow, row_of_one)
                    for feature in range(len(total)):
                        total[feature] += weights[row] * row_of_one[feature]
            store(total, at[8] + size * (token * features + begin), narrow)

    return combine
