"""Loops over experts, whose products are those of compiled_rows (the extra ``cpu``).

They are no operation by themselves: they belong to
:mod:`~vllm_module.kernels.matmul.code_rows_by_expert`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_module.kernels.matmul.compiled_rows import AT_ONCE
from vllm_module.kernels.matmul.kept_loops import compiled
from vllm_module.kernels.matmul.torch_threads import call, numbers, thread, threads

NUMBERS = 26  # integers that the loops are given for one product; see compiled_rows


@compiled
def compiled_experts() -> Any:
    """Return what calls the loops of one product for each expert, and writes the other rows.

    Arguments: the loops; what they are told of each expert, and how many there are; the first row
    of each; the input, its columns, and whether it is bfloat16; what is written, its rows, the
    bytes that a row of outputs is padded to, and whether it is bfloat16; the order of inputs, or 0;
    the bias, or 0; outputs.
    """

    def multiply(argument: Any) -> None:
        at = numbers(argument, np.int64, (14,))
        loops, experts, x, columns, x_narrow = at[0], at[2], at[4], at[5], at[6]
        y, rows, padded, y_narrow, outputs = at[7], at[8], at[9], at[10], at[13]
        told = numbers(at[1], np.int64, (experts, NUMBERS))
        offsets = numbers(at[3], np.int32, (experts + 1,))
        bias = numbers(at[12], np.float32, (experts if at[12] else 0, outputs))
        own = np.empty(NUMBERS, np.int64)
        # In bytes.
        row_of_x, row_of_y = columns * (2 if x_narrow else 4), padded * (2 if y_narrow else 4)
        # The loops give a thread these outputs, so no other one writes them.
        parts = (outputs + AT_ONCE - 1) // AT_ONCE
        begin = parts * thread() // threads() * AT_ONCE
        end = min(parts * (thread() + 1) // threads() * AT_ONCE, outputs)
        for expert in range(experts):
            first, last = np.int64(offsets[expert]), np.int64(offsets[expert + 1])
            if first < last:
                for number in range(NUMBERS):
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

    return multiply
