"""A step between its launch and the reading of its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vllm_module.runtime.sampling.row import Row, completing_tokens
from vllm_module.runtime.sampling.sampler import LogitsError, Sampled, prompt_logprobs
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import Request, Sequence
from vllm_module.runtime.step_inputs import Step, StepInputs
from vllm_module.runtime.transfers import Wait, upload


class Execute(Protocol):
    """The function by which an engine runs its model."""

    def __call__(
        self, inputs: StepInputs, sampled: torch.Tensor | None = None, /
    ) -> torch.Tensor | Callable[[], torch.Tensor]:
        """Launch a step on every rank and return the logits of its rows, ``[rows, vocab]``.

        ``sampled`` has the tokens that ``inputs.input_ids`` index, if they are indices. A pipeline
        returns a function, which computes the rest of the step and returns the logits.
        """


@dataclass
class Launched:
    """A step that is launched and not finished; the device may still compute it.

    Attributes:
        step: the scheduled sequences and copies.
        prompts: requests, each with the positions of the prompt logprobs that the step gives.
        complete: sequences that get a token, because all their tokens are computed.
        logits: logits of all these positions, and then of each complete sequence; None once tokens
            are being chosen.
        sampled: the tokens of the complete sequences, once they are being chosen.
        rest: computes the logits, if a pipeline has more steps in flight.

    """

    step: Step
    prompts: list[tuple[Request, range]]
    complete: list[Sequence]
    logits: torch.Tensor | None
    sampled: Sampled | None = None
    rest: Callable[[], torch.Tensor] | None = None

    @property
    def ended(self) -> bool:
        """True if no sequence gets a token, because each has ended since the launch."""
        return all(sequence.finish_reason is not None for sequence in self.complete)

    def rows_of_next(self, running: int) -> list[int]:
        """Return the rows of sequences that run on in the next step, with their new token.

        The others have ended, or end with that token by their length. The list is empty if the next
        step depends on more than these tokens: one of the ``running`` sequences gets no token here,
        the samples of a prompt begin, or a prompt's logprobs must be read.
        """
        if any(positions for _, positions in self.prompts):
            return []
        rows, alive = [], 0
        for row, sequence in enumerate(self.complete):
            if sequence.finish_reason is None:
                alive += 1
                request = sequence.request
                if len(request.sequences) < request.params.n:
                    return []
                if len(sequence.tokens) + 1 < request.max_len:
                    rows.append(row)
        return rows if alive == running else []

    def read_prompt_logprobs(self, wait: Wait) -> list[Request]:
        """Add the step's prompt logprobs to their requests, and drop their rows of the logits.

        Returns the requests whose logits are broken. ``wait`` waits for the device.
        """
        assert self.logits is not None
        broken, row = [], 0
        for request, positions in self.prompts:
            if positions:
                rows = self.logits[row : row + len(positions)]
                row += len(positions)
                assert request.prompt_logprobs is not None
                tokens = request.prompt_token_ids[positions.start + 1 : positions.stop + 1]
                count = request.params.prompt_logprobs or 0
                try:
                    request.prompt_logprobs += prompt_logprobs(rows, tokens, count, wait)
                except LogitsError:
                    broken.append(request)
        self.logits = self.logits[row:]
        return broken

    def fork(self, scheduler: Scheduler) -> None:
        """Add the other samples of complete prompts, each with a row of the logits."""
        assert self.logits is not None
        rows, sequences = [], []
        for row, sequence in enumerate(self.complete):
            request = sequence.request
            if len(request.sequences) < request.params.n and sequence.finish_reason is None:
                scheduler.fork(request)
                sequences += request.sequences
                rows += [row] * len(request.sequences)
            else:
                sequences.append(sequence)
                rows.append(row)
        if len(rows) > len(self.complete):
            (index,) = upload([array("q", rows)], self.logits.device)
            self.complete, self.logits = sequences, self.logits[index]


def row_of(sequence: Sequence, stop_token_ids: Set[int]) -> Row:
    """Return what the sampler needs for the next token; draws the sequence's random number.

    ``stop_token_ids``, the model's own end tokens, are banned before ``min_tokens``.
    """
    request, row = sequence.request, sequence.sampling_row
    params = request.params
    if row is None:
        key = (request.arrival, sequence.index)
        row = Row(params, sequence.tokens, request.prompt_len, key=key, named=request.named)
        sequence.sampling_row = row
    banned: Collection[int] = ()
    if params.min_tokens and len(sequence.output) < params.min_tokens:
        banned = stop_token_ids | set(params.stop_token_ids)
    if request.bad_words:
        banned = completing_tokens(request.bad_words, sequence.output).union(banned)
    mask = None if sequence.grammar is None else sequence.grammar.mask(sequence.output)
    if banned or row.banned or mask is not None:
        row.ban(banned, mask)
    if not params.greedy:
        row.uniform = sequence.uniform.random()
    return row


def leaves_nothing(sequence: Sequence, vocab_size: int) -> bool:
    """Tell whether what the request excludes leaves no token, whatever the logits are."""
    row = sequence.sampling_row
    if row is None or (row.mask is None and not row.banned):
        return False
    left = {*(row.params.allowed_token_ids or range(vocab_size))}.difference(row.banned)
    if row.mask is not None:
        bits = np.unpackbits(row.mask.numpy().view(np.uint8), bitorder="little")
        left.intersection_update(bits.nonzero()[0].tolist())
    return not left
