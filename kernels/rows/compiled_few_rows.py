"""Norms and gated activations of a few rows, which numba compiles for this CPU (the extra ``cpu``).

They are no operations by themselves: they belong to :mod:`~vllm_module.kernels.rows.few_rows`. A
thread takes some of the rows, or of an activation some of the columns.

Each is a function of C whose argument is the address of integers of 64 bits: addresses of tensors,
sizes, whether tensors are bfloat16, and floats as the bits of a float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_module.kernels.matmul.kept_loops import compiled
from vllm_module.kernels.matmul.torch_threads import numbers, thread, threads
from vllm_module.kernels.rows.compiled_numbers import (
    USED,
    exp,
    load,
    rounded,
    silu,
    store,
)


def _gelu_tanh(x: Any) -> Any:
    """Return GELU by its tanh approximation; tanh(u) is 1 - 2 / (exp(2 u) + 1)."""
    wide = np.float64(x)
    u = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
    return wide * (1 - 1 / (exp(np.float32(2 * u)) + 1))


@compiled
def compiled_norm() -> Any:
    """Return the root mean square norm of rows, and of their sum with a residual.

    Arguments: rows; columns; ``x``; the residual, or 0; the weight; what is written: the norm, and
    the sum if there is a residual; eps; the offset of the weight; whether the norm is rounded
    before the weight multiplies; whether all are bfloat16. Tensors are contiguous.

    Raises:
        ImportError: numba is not installed, or torch has no threads of OpenMP.

    """
    from numba.extending import register_jitable

    for function in USED:
        register_jitable(function)

    def normalize(argument: Any) -> None:
        at = numbers(argument, np.int64, (11,))
        rows, columns, early, narrow = at[0], at[1], at[9], at[10]
        eps = np.float32(np.int64(at[7]).view(np.float64))
        offset = np.float32(np.int64(at[8]).view(np.float64))
        size = 2 if narrow else 4
        x, weight = np.empty(columns, np.float32), np.empty(columns, np.float32)
        load(at[4], narrow, weight)
        for row in range(rows * thread() // threads(), rows * (thread() + 1) // threads()):
            place = size * row * columns
            load(at[2] + place, narrow, x)
            if at[3]:
                residual = np.empty(columns, np.float32)
                load(at[3] + place, narrow, residual)
                for column in range(columns):
                    x[column] += residual[column]
                store(x, at[6] + place, narrow)
                load(at[6] + place, narrow, x)  # the rounded sum
            total = np.float32(0)
            for column in range(columns):
                total += x[column] * x[column]
            factor = np.float32(1) / np.sqrt(total / np.float32(columns) + eps)
            if narrow and early:
                for column in range(columns):
                    x[column] = rounded(x[column] * factor) * weight[column]
            else:
                for column in range(columns):
                    x[column] = x[column] * factor * (weight[column] + offset)
            store(x, at[5] + place, narrow)

    return normalize


@compiled
def compiled_activation(tanh: bool) -> Any:
    """Return an activation of the first half of each row, times the second half.

    Arguments: rows; columns of the result; ``x``; what is written; whether both are bfloat16.

    Args:
        tanh: whether it is GELU by its tanh approximation; else it is SiLU.

    Raises:
        ImportError: numba is not installed, or torch has no threads of OpenMP.

    """
    from numba.extending import register_jitable

    for function in (*USED, exp):
        register_jitable(function)
    activate = register_jitable(_gelu_tanh if tanh else silu)

    def gate(argument: Any) -> None:
        at = numbers(argument, np.int64, (5,))
        rows, columns, narrow = at[0], at[1], at[4]
        size = 2 if narrow else 4
        begin = columns * thread() // threads()
        count = columns * (thread() + 1) // threads() - begin
        first, second = np.empty(count, np.float32), np.empty(count, np.float32)
        for row in range(rows):
            place = at[2] + size * (2 * row * columns + begin)
            load(place, narrow, first)
            load(place + size * columns, narrow, second)
            for column in range(count):
                gated = np.float32(activate(first[column]))
                first[column] = (rounded(gated) if narrow else gated) * second[column]
            store(first, at[3] + size * (row * columns + begin), narrow)

    return gate
