"""Where programs find their tokens, if the tokens of sequences lie end to end."""

from __future__ import annotations

from vllm_module.kernels.operators import tl, triton


@triton.jit
def sequence_of(program, starts_ptr, sequences, ROWS: tl.constexpr):
    """Return the sequence that a program computes, of ``tokens // ROWS + sequences`` programs.

    A sequence whose tokens start at ``start`` has the programs from ``start // ROWS + sequence``
    on. There are enough of them, and no two sequences share one, so the host makes no list of
    blocks.
    """
    # Binary search for the first sequence whose programs begin after this one.
    low, high = 0, sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // ROWS + middle <= program:
            low = middle + 1
        else:
            high = middle
    return low - 1
