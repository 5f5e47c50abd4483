"""A step: what the model computes at once, and its numbers, which one message carries to ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_module.runtime.sequence import Sequence
from vllm_module.runtime.served_adapter import ServedAdapter

if TYPE_CHECKING:
    import torch


@dataclass
class Moves:
    """Pages or states that are copied before a step, as (from, to) pairs, in this order.

    Attributes:
        swapped_out, copied, swapped_in: from the device to the host, on the device, from the host
            to the device.

    """

    swapped_out: list[tuple[int, int]] = field(default_factory=list)
    copied: list[tuple[int, int]] = field(default_factory=list)
    swapped_in: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swapped_out or self.copied or self.swapped_in)


@dataclass
class Step:
    """What the model computes at once, and which pages and states are copied before that.

    Attributes:
        scheduled: sequences, each with the number of its next tokens to compute.
        pages: pages that are copied.
        states: states that are copied; on the device, they are named by the rows of sequences.
        saved: (from, to) pairs of a row and the slot of a saved state, in either direction. All
            that is copied on the device is read before any of it is written.
        routed: the copy of the experts that its tokens go to, and the event of its end, once the
            step is launched and if they are kept.
        versions: of its adapters, when it was launched.

    """

    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    pages: Moves = field(default_factory=Moves)
    states: Moves = field(default_factory=Moves)
    saved: list[tuple[int, int]] = field(default_factory=list)
    routed: tuple[torch.Tensor, Any] | None = None
    versions: dict[ServedAdapter, str] = field(default_factory=dict)

    @property
    def moves(self) -> bool:
        """Whether anything is copied before the step that cannot be copied again.

        Saved states are given up if it fails, and sequences that used them start over.
        """
        return bool(self.pages or self.states)

    def of_requests(self) -> str:
        """Return " of requests" with their ids, for a message; nothing for an empty step."""
        ids = list(dict.fromkeys(sequence.request.request_id for sequence, _ in self.scheduled))
        if not ids:
            return ""
        more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
        noun = "request" if len(ids) == 1 else "requests"
        return f" of {noun} {', '.join(ids[:8])}{more}"


@dataclass
class StepInputs:
    """The plain numbers by which a rank computes a step; one message carries them to all ranks.

    Attributes:
        input_ids, positions: tokens of the step and their positions, sequence by sequence.
        slot_mapping: the cache slot of each token: its page * page size + its place on the page.
        context_lens: number of each sequence's tokens up to the end of this step.
        query_start_loc: start of each sequence's tokens, and the end of the last one's.
        table_rows: the row of the block tables that has each sequence's pages.
        new_pages: the changes of these rows: a row, the first entry that changes, and the pages
            from there on. Every rank keeps the tables, and writes the changes before the step.
        num_table_pages: largest number of pages of a sequence.
        rows: the indices of the tokens whose logits are returned.
        max_query_len: largest number of tokens of a sequence in this step.
        num_sampled: 0 if ``input_ids`` are tokens. Otherwise they are indices of the
            ``num_sampled`` tokens that the step before has chosen, which are on the device.
        adapters: by index of a sequence, the number of its adapter, if it has one.
        engines_step: the most tokens that an engine has in this step, of those that share their
            experts, and whether all of them only decode; ``None`` for one engine.
        pages, states: what is copied before that, as in :class:`Step`, with the copies of saved
            states; ``None`` for nothing. The slot of a sequence's state is the row of its block
            table.

    """

    input_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    context_lens: list[int]
    query_start_loc: list[int]
    table_rows: list[int]
    new_pages: list[tuple[int, int, list[int]]]
    num_table_pages: int
    rows: list[int]
    max_query_len: int
    num_sampled: int = 0
    engines_step: tuple[int, bool] | None = None
    pages: Moves | None = None
    states: Moves | None = None
    adapters: dict[int, int] = field(default_factory=dict)

    @classmethod
    def nothing(cls) -> StepInputs:
        """Return a step without tokens, of padding alone."""
        return cls([], [], [], [], [0], [], [], 0, [], 1)


def step_inputs(step: Step, page_size: int) -> StepInputs:
    """Return the numbers of the tokens that ``step`` computes.

    In ``rows``, the prompt tokens that give missing prompt logprobs come first, and then the last
    token of each sequence that has no tokens left after this step.
    """
    ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    context_lens: list[int] = []
    query_start_loc, table_rows = [0], []
    new_pages: list[tuple[int, int, list[int]]] = []
    prompt_rows: list[int] = []
    last_rows: list[int] = []
    adapters: dict[int, int] = {}
    longest = most_pages = 0
    for sequence, count in step.scheduled:
        pages, tokens, start = sequence.pages, sequence.tokens, sequence.num_computed
        end = start + count
        if count == 1:  # decoding: most sequences in most steps
            ids.append(tokens[start])
            positions.append(start)
            slot_mapping.append(pages[start // page_size] * page_size + start % page_size)
        else:
            ids += tokens[start:end]
            positions += range(start, end)
            slot_mapping += [
                pages[position // page_size] * page_size + position % page_size
                for position in range(start, end)
            ]
        if sequence.request.adapter is not None:
            adapters[len(context_lens)] = sequence.request.adapter.number
        context_lens.append(end)
        query_start_loc.append(len(ids))
        table_rows.append(sequence.row)
        listed = sequence.num_listed_pages
        if listed < len(pages):
            new_pages.append((sequence.row, listed, pages[listed:]))
        if len(pages) > most_pages:
            most_pages = len(pages)
        if count > longest:
            longest = count
        if sequence.request.prompt_logprobs is not None:
            wanted = sequence.prompt_logprob_positions(count)
            prompt_rows += [len(ids) - end + position for position in wanted]
        if end == len(tokens):
            last_rows.append(len(ids) - 1)
    moves = step.states
    states = Moves(moves.swapped_out, moves.copied + step.saved, moves.swapped_in)
    return StepInputs(
        ids,
        positions,
        slot_mapping,
        context_lens,
        query_start_loc,
        table_rows,
        new_pages,
        most_pages,
        prompt_rows + last_rows,
        longest,
        pages=step.pages or None,
        states=states or None,
        adapters=adapters,
    )


def next_inputs(step: Step, sampled: list[int], num_sampled: int, page_size: int) -> StepInputs:
    """Return the numbers of a step with each sequence's next token, which the host does not know.

    Args:
        step: the result of :meth:`~vllm_module.runtime.scheduler.Scheduler.schedule_next`.
        sampled: index of each sequence's token among those on the device.
        num_sampled: number of tokens on the device.
        page_size: tokens per page.

    """
    sequences = [sequence for sequence, _ in step.scheduled]
    positions = [len(sequence.tokens) for sequence in sequences]
    return StepInputs(
        sampled,
        positions,
        [
            sequence.pages[position // page_size] * page_size + position % page_size
            for sequence, position in zip(sequences, positions, strict=True)
        ],
        [position + 1 for position in positions],
        list(range(len(sequences) + 1)),
        [sequence.row for sequence in sequences],
        [
            (sequence.row, sequence.num_listed_pages, sequence.pages[sequence.num_listed_pages :])
            for sequence in sequences
            if sequence.num_listed_pages < len(sequence.pages)
        ],
        max([len(sequence.pages) for sequence in sequences]),
        list(range(len(sequences))),
        1,
        num_sampled,
        adapters={
            index: sequence.request.adapter.number
            for index, sequence in enumerate(sequences)
            if sequence.request.adapter is not None
        },
    )
