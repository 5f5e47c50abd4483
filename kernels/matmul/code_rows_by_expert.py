"""Products of rows, sorted by expert, with the weights of all experts, in one call of the loops.

A call from Python for each expert takes about as long as its product with a few rows, and all
threads wait for each other after it. Here each thread computes its part of the outputs of one
expert after the other. How many rows an expert has is read when the loops run, so a recorded step
(:mod:`~vllm_module.kernels.recording`) needs no Python code for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_module.kernels.matmul.code_rows import CodeRows
from vllm_module.kernels.matmul.code_rows_matmul import (
    NARROW,
    compiled_loops,
    lasts,
    memory_of,
    takes_code_rows,
    tell,
)
from vllm_module.kernels.matmul.compiled_rows import AT_ONCE
from vllm_module.kernels.matmul.torch_threads import (
    call,
    compiled,
    in_threads,
    numbers,
    thread,
    threads,
)
from vllm_module.kernels.rows.compiled_numbers import WRITTEN

_MOST_TOLD = 1 << 10  # layers of which it is kept what the loops are told
_NUMBERS = 26  # integers that the loops are given for one product; see compiled_rows


class _Told(NamedTuple):
    """What the loops are told of the weights of all experts.

    Attributes:
        kind: which loops they are.
        each: int64 ``[experts, 26]``, what the loops are told of each one.
        order: the input of each number in the order of rows; ``None`` if that is their order.
        outputs: number of outputs of an expert.

    """

    kind: int
    each: torch.Tensor
    order: torch.Tensor | None
    outputs: int


_told: dict[object, _Told | None] = {}


def multiplied_by_experts(
    x: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    describe: Callable[..., CodeRows | None],
    *weight: Any,
) -> torch.Tensor | None:
    """Return products of rows and the weights of their experts; ``None`` if they are not for loops.

    The number of rows that an expert has on average chooses. What the loops are told of the weights
    is kept by the addresses of their tensors.

    Args:
        x: ``[rows, input]``, bfloat16, float16 or float32, on the CPU.
        offsets: int32 ``[experts + 1]``. Row ``r`` is that of the expert ``e`` with
            ``offsets[e] <= r < offsets[e + 1]``.
        bias: ``[experts, output]``, of the dtype of ``x``, or ``None``.
        describe: a function of :mod:`~vllm_module.kernels.matmul.code_rows`, which describes the
            weight of one expert.
        weight: its arguments; each tensor has a leading dimension of experts, and the first one
            holds the codes or floats.

    Returns:
        ``[rows, output]``, of the dtype of ``x``. Rows from ``offsets[experts]`` on are zeros.

    """
    experts = len(offsets) - 1
    if not experts or not takes_code_rows(x, weight[0], -(-len(x) // experts)):
        return None
    key = describe, *map(memory_of, weight)
    try:  # other threads may drop all at any time
        told = _told[key]
    except KeyError:
        told = _tell(experts, describe, weight)
        if len(_told) >= _MOST_TOLD:
            _told.clear()
        _told[key] = told
    return None if told is None else _product(x, offsets, bias, told)


def _tell(
    experts: int, describe: Callable[..., CodeRows | None], weight: tuple[Any, ...]
) -> _Told | None:
    """Return what the loops are told, if it depends on nothing but where the weights are."""
    each, first = [], None
    for expert in range(experts):
        own = [part[expert] if isinstance(part, torch.Tensor) else part for part in weight]
        described = describe(*own)
        if described is None:
            return None
        told, made = tell(described)
        first = first or told
        if told.order is not first.order or not lasts(described, made, own):
            return None
        x, weights, y, how = (0, 0, 0), told.numbers, (0, 0, 0), (0, 0, 0)
        each.append([told.zero, *x, *weights, *y, *how])
    assert first is not None
    table = torch.tensor(each, dtype=torch.int64, device="cpu")
    return _Told(first.kind, table, first.order, first.outputs)


def _product(
    x: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None, told: _Told
) -> torch.Tensor:
    rows = (x if x.dtype in NARROW else x.float()).contiguous()
    offsets, padded = offsets.contiguous(), -(-told.outputs // 8) * 8
    # The sum with a bias is rounded once.
    y = rows.new_empty(len(rows), padded, dtype=rows.dtype if bias is None else torch.float32)
    bias = None if bias is None else bias.float().contiguous()
    order = 0 if told.order is None else told.order.data_ptr()
    _by_expert(torch.get_num_threads())(
        (
            compiled_loops(told.kind, False).address,
            told.each.data_ptr(), len(told.each), offsets.data_ptr(),
            rows.data_ptr(), rows.shape[1], NARROW[rows.dtype],
            y.data_ptr(), len(y), padded, NARROW[y.dtype],
            order, 0 if bias is None else bias.data_ptr(), told.outputs,
        ),
        told.each, told.order, bias,
    )  # fmt: skip
    return (y if padded == told.outputs else y[:, : told.outputs]).to(x.dtype)


@functools.cache
def _by_expert(count: int) -> Callable[..., None]:
    return in_threads(_compiled(), count)


@functools.cache
def _compiled() -> Any:
    """Return what calls the loops of one product for each expert, and writes the other rows."""
    written, at_once = WRITTEN, AT_ONCE

    def multiply(argument: Any) -> None:
        assert written
        at = numbers(argument, np.int64, (14,))
        loops, experts, x, columns, x_narrow = at[0], at[2], at[4], at[5], at[6]
        y, rows, padded, y_narrow, outputs = at[7], at[8], at[9], at[10], at[13]
        told = numbers(at[1], np.int64, (experts, _NUMBERS))
        offsets = numbers(at[3], np.int32, (experts + 1,))
        bias = numbers(at[12], np.float32, (experts if at[12] else 0, outputs))
        own = np.empty(_NUMBERS, np.int64)
        # In bytes.
        row_of_x, row_of_y = columns * (2 if x_narrow else 4), padded * (2 if y_narrow else 4)
        # The loops give a thread these outputs, so no other one writes them.
        parts = (outputs + at_once - 1) // at_once
        begin = parts * thread() // threads() * at_once
        end = min(parts * (thread() + 1) // threads() * at_once, outputs)
        for expert in range(experts):
            first, last = np.int64(offsets[expert]), np.int64(offsets[expert + 1])
            if first < last:
                for number in range(_NUMBERS):
                    own[number] = told[expert, number]
                own[1], own[2], own[3] = x + first * row_of_x, last - first, columns
                own[20], own[21], own[22] = y + first * row_of_y, last - first, padded
                own[23], own[24], own[25] = x_narrow, y_narrow, at[11]
                call(loops, own.ctypes.data)
            for row in range(first, last if len(bias) else first):
                wide = numbers(y + row * row_of_y, np.float32, (outputs,))
                for output in range(begin, end):
                    wide[output] += bias[expert, output]
        if not thread():
            first = np.int64(offsets[experts])
            rest = numbers(y + first * row_of_y, np.uint8, ((rows - first) * row_of_y,))
            rest[:] = 0

    return compiled(multiply)
