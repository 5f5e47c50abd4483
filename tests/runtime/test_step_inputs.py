"""The numbers of a step, beside loops over its tokens one by one."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
import torch

from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.sequence import Request, Sequence
from vllm_module.runtime.step_inputs import Moves, Step, next_inputs, step_inputs
from vllm_module.runtime.transfers import ALIGNMENT, pack, unpack, upload

SIZE = 4


def drawn(rng: random.Random, row: int) -> tuple[Sequence, int]:
    """Return a running sequence, and how many of its tokens a step computes."""
    prompt = rng.choices(range(100), k=rng.randint(1, 14))
    params = SamplingParams(prompt_logprobs=rng.choice([None, None, 0]))
    (sequence,) = Request("0", prompt, params, 0, 99).sequences
    sequence.tokens += rng.choices(range(100), k=rng.choice([0, 0, 1, 5]))
    sequence.num_computed = rng.randrange(len(sequence.tokens))
    remaining = len(sequence.tokens) - sequence.num_computed
    count = rng.choice([1, rng.randint(1, remaining), remaining])
    pages = -(-(sequence.num_computed + count) // SIZE)
    sequence.pages = rng.sample(range(1000), k=pages + rng.choice([0, 0, 1]))
    sequence.num_listed_pages = rng.choice([0, len(sequence.pages), rng.randint(0, pages)])
    sequence.row = row
    if sequence.request.prompt_logprobs is not None:
        # As many as were computed, and the first token has none; one that starts over has more.
        known = min(sequence.num_computed, len(prompt) - 1)
        known = rng.choice([known, known, len(prompt) - 1])
        sequence.request.prompt_logprobs = [None, *[{} for _ in range(known)]]
    return sequence, count


@pytest.mark.parametrize("seed", range(40))
def test_each_token_has_its_place(seed: int) -> None:
    """Tokens, positions, slots and rows of logits are those of the sequences, in their order."""
    rng = random.Random(seed)
    rows = rng.sample(range(16), k=rng.randint(1, 6))
    step = Step([drawn(rng, row) for row in rows])
    tokens: list[tuple[int, int, int]] = []
    prompts: list[int] = []
    last: list[int] = []
    tables = {}
    starts = [0]
    for sequence, count in step.scheduled:
        for position in range(sequence.num_computed, sequence.num_computed + count):
            page = sequence.pages[position // SIZE]
            known = sequence.request.prompt_logprobs
            # The logits of a position give the logprob of the next token of the prompt.
            if known is not None and len(known) - 1 <= position < sequence.request.prompt_len - 1:
                prompts.append(len(tokens))
            if position == len(sequence.tokens) - 1:
                last.append(len(tokens))
            tokens.append((sequence.tokens[position], position, page * SIZE + position % SIZE))
        starts.append(len(tokens))
        tables[sequence.row] = sequence.pages
    found = step_inputs(step, SIZE)
    assert list(zip(found.input_ids, found.positions, found.slot_mapping, strict=True)) == tokens
    assert found.query_start_loc == starts
    assert found.context_lens == [s.num_computed + count for s, count in step.scheduled]
    assert found.table_rows == rows
    assert found.rows == prompts + last
    assert found.max_query_len == max(count for _, count in step.scheduled)
    assert found.num_table_pages == max(len(s.pages) for s, _ in step.scheduled)
    assert (found.num_sampled, found.states) == (0, None)
    listed = {s.row: s.pages[: s.num_listed_pages] for s, _ in step.scheduled}
    for row, start, pages in found.new_pages:
        assert pages
        assert start == len(listed[row])
        listed[row] = listed[row] + pages
    assert listed == tables


def test_moves_go_with_the_step() -> None:
    """Copies of states for other samples come before those that save a state."""
    rng = random.Random(0)
    moves: list[list[tuple[int, int]]] = [[(at, at + 1)] for at in range(7)]
    step = Step([drawn(rng, 3)])
    step.pages, step.states = Moves(*moves[:3]), Moves(*moves[3:6])
    step.saved = moves[6]
    found = step_inputs(step, SIZE)
    assert found.pages == Moves(*moves[:3])
    assert found.states == Moves(moves[3], moves[4] + moves[6], moves[5])


@pytest.mark.parametrize("what", ["pages", "states", "saved", "nothing"])
@pytest.mark.parametrize("kind", ["swapped_out", "copied", "swapped_in"])
def test_what_cannot_be_copied_again(what: str, kind: str) -> None:
    """Any copy of pages or of states; saved states alone may be given up."""
    step = Step([drawn(random.Random(0), 3)])
    if what == "saved":
        step.saved = [(0, 1)]
    elif what != "nothing":
        getattr(getattr(step, what), kind).append((0, 1))
    assert step.moves == (what in ("pages", "states"))


@pytest.mark.parametrize("seed", range(10))
def test_the_next_token_has_its_place(seed: int) -> None:
    """It comes after all tokens that the host knows, and its number is an index on the device."""
    rng = random.Random(seed)
    rows = rng.sample(range(16), k=rng.randint(1, 6))
    sequences = [drawn(rng, row)[0] for row in rows]
    for sequence in sequences:
        more = len(sequence.tokens) // SIZE + 1 - len(sequence.pages)
        sequence.pages += [rng.randrange(1000) for _ in range(more)]
    sampled = rng.sample(range(9), k=len(rows))
    found: Any = next_inputs(Step([(each, 1) for each in sequences]), sampled, 9, SIZE)
    assert (found.input_ids, found.num_sampled, found.max_query_len) == (sampled, 9, 1)
    ends = [len(sequence.tokens) for sequence in sequences]
    assert found.positions == ends
    assert found.context_lens == [end + 1 for end in ends]
    assert found.slot_mapping == [
        s.pages[end // SIZE] * SIZE + end % SIZE for s, end in zip(sequences, ends, strict=True)
    ]
    assert found.query_start_loc == [*range(len(rows) + 1)]
    assert (found.table_rows, found.rows) == (rows, [*range(len(rows))])
    assert found.num_table_pages == max(len(sequence.pages) for sequence in sequences)
    assert found.new_pages == [
        (s.row, s.num_listed_pages, s.pages[s.num_listed_pages :])
        for s in sequences if s.num_listed_pages < len(s.pages)
    ]  # fmt: skip


@pytest.mark.parametrize("lengths", [(1,), (2, 3), (4, 0, 1), (3, 5, 2, 16), (1, 1, 1, 1, 1)])
@pytest.mark.parametrize("codes", ["qi", "iq"])
def test_arrays_are_unpacked_as_they_were(codes: str, lengths: tuple[int, ...]) -> None:
    """Each begins at a multiple of the alignment, and has the ends of its type's range."""
    parts = []
    for at, length in enumerate(lengths):
        code = codes[at % 2]
        most = 2 ** (8 * array(code).itemsize - 1)
        parts.append(array(code, [most - 1, -most, -1, 0][:length] + [7] * (length - 4)))
    packed = pack(parts, torch.device("cpu"))
    for view, part in zip(unpack(packed, parts), parts, strict=True):
        assert view.dtype == {"q": torch.int64, "i": torch.int32}[part.typecode]
        assert view.tolist() == part.tolist()
        assert (view.data_ptr() - packed.data_ptr()) % ALIGNMENT == 0


def test_arrays_keep_their_numbers() -> None:
    """Floats are no integers of the same bits, and an empty array is one of its dtype."""
    arrays = [array("q", [1, -(2**63)]), array("d", [0.1, -1e300]), array("q"), array("d", [2.0])]
    found = upload(arrays, torch.device("cpu"))
    assert [each.tolist() for each in found] == [each.tolist() for each in arrays]
    kinds = [torch.int64, torch.float64, torch.int64, torch.float64]
    assert [each.dtype for each in found] == kinds
