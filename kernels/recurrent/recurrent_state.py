"""Sequences and their states in operations with a recurrent state.

The tokens of a step's sequences lie end to end. A sequence that begins in this step starts from
zeros, whatever its slot holds, so no slot has to be cleared. The slot of padding is -1: nothing is
read or stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.operators import checks_values, expect, expect_writable, tl, triton
from vllm_module.kernels.recording import recording_in_use

# The exponential of this logarithm of a decay is 0 in float32. In chunks smaller logarithms are
# raised to it: they would take the last digits of sums from which later decays are computed.
FORGOTTEN = -104.0


def check_state(
    tokens: torch.Tensor,
    state: torch.Tensor | None,
    shape: tuple[int, ...],
    state_slots: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    context_lens: torch.Tensor | None,
) -> None:
    """Raise ``ValueError`` unless the arguments describe the sequences of ``tokens``.

    Args:
        tokens: ``[tokens, ...]``.
        state: ``[slots, *shape]``; ``None``, with the other arguments, if the tokens are one whole
            sequence whose state is not kept.
        shape: shape of one sequence's state.
        state_slots: int64 ``[sequences]``; -1 for padding.
        query_start_loc: int32 ``[sequences + 1]``.
        context_lens: int32 ``[sequences]``.

    """
    others = {
        "state_slots": state_slots,
        "query_start_loc": query_start_loc,
        "context_lens": context_lens,
    }
    if state is None:
        given = [name for name, tensor in others.items() if tensor is not None]
        if given:
            raise ValueError(f"{given[0]} is given, and state is not")
        return
    missing = [name for name, tensor in others.items() if tensor is None]
    if missing:
        raise ValueError(f"state is given, and {missing[0]} is not")
    assert state_slots is not None
    assert query_start_loc is not None
    assert context_lens is not None
    count = len(state_slots)
    expect("state", state, (None, *shape), FLOATS, tokens)
    expect_writable("state", state)
    expect("state_slots", state_slots, (count,), (torch.int64,), tokens)
    expect("query_start_loc", query_start_loc, (count + 1,), (torch.int32,), tokens)
    expect("context_lens", context_lens, (count,), (torch.int32,), tokens)
    if count and checks_values(state_slots):
        used = state_slots[state_slots >= 0]
        if len(used) and int(used.max()) >= len(state):
            raise ValueError(f"a state slot is {int(used.max())}, and there are {len(state)}")
        if len(used.unique()) < len(used):
            raise ValueError("two sequences have the same state slot")


def each_sequence(
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
    state: torch.Tensor,
) -> Iterator[tuple[slice, int, torch.Tensor]]:
    """Yield each sequence's tokens, its state slot, and its state before, in float32."""
    starts, contexts = query_start_loc.tolist(), context_lens.tolist()
    for index, slot in enumerate(state_slots.tolist()):
        begin, end = starts[index], starts[index + 1]
        if slot >= 0 and begin < end:
            before = state[slot].float()
            continues = contexts[index] > end - begin
            yield slice(begin, end), slot, before if continues else torch.zeros_like(before)


def single_tokens(tokens: torch.Tensor, state_slots: torch.Tensor, max_query_len: int) -> bool:
    """Return whether each token is a sequence of its own; otherwise some may be padding."""
    return max_query_len == 1 and len(tokens) == len(state_slots)


def empty_output(
    tokens: torch.Tensor, state_slots: torch.Tensor | None, max_query_len: int
) -> torch.Tensor:
    """Allocate an output in the shape of ``tokens``; zeros, if some may be of no sequence."""
    every = state_slots is None or single_tokens(tokens, state_slots, max_query_len)
    make = torch.empty_like if every else torch.zeros_like
    return make(tokens, memory_format=torch.contiguous_format)


def loaded_states(
    state: torch.Tensor, state_slots: torch.Tensor, context_lens: torch.Tensor
) -> torch.Tensor:
    """Return a float32 copy of the states before a step of one token of each sequence.

    Padding gets zeros, as does a sequence without earlier tokens.
    """
    states = state.index_select(0, state_slots.clamp(min=0)).float()
    keeps = (context_lens > 1) & (state_slots >= 0)
    if recording_in_use.get() is not None or not keeps.all():
        states.masked_fill_(~keeps.view(-1, *[1] * (states.dim() - 1)), 0.0)
    return states


def store_states(state: torch.Tensor, state_slots: torch.Tensor, new: torch.Tensor) -> None:
    """Store the states of all sequences but padding, of which a recorded step has none."""
    used = state_slots >= 0
    if (
        recording_in_use.get() is None and not used.all()
    ):  # if all are stored, a copy of them is saved
        state_slots, new = state_slots[used], new[used]
    state.index_copy_(0, state_slots, new.to(state.dtype))


@triton.jit
def place_of(sequence, places, tokens):
    """Return a sequence's first token, its number of tokens, its slot, and whether it continues.

    It continues if its state must be read. ``places`` are pointers to the slots, starts and
    contexts; without them, one new sequence has all ``tokens``.
    """
    state_slots_ptr, query_start_loc_ptr, context_lens_ptr = places
    start, count, continues = tl.zeros((), tl.int64), tokens, False
    slot = tl.zeros((), tl.int64)
    if state_slots_ptr is not None:
        start = tl.load(query_start_loc_ptr + sequence).to(tl.int64)
        count = (tl.load(query_start_loc_ptr + sequence + 1) - start).to(tl.int32)
        slot = tl.load(state_slots_ptr + sequence)
        continues = (tl.load(context_lens_ptr + sequence) > count) & (slot >= 0)
    return start, count, slot, continues
