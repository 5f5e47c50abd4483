"""A step between its launch and the reading of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_module.runtime.sampling.sampler import Sampled
from vllm_module.runtime.sequence import Request, Sequence
from vllm_module.runtime.step_inputs import Step, StepInputs


class Execute(Protocol):
    """The function by which an engine runs its model."""

    def __call__(self, inputs: StepInputs, sampled: torch.Tensor | None = None, /) -> torch.Tensor:
        """Launch a step on every rank and return the logits of its rows, ``[rows, vocab]``.

        ``sampled`` has the tokens that ``inputs.input_ids`` index, if they are indices.
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

    """

    step: Step
    prompts: list[tuple[Request, range]]
    complete: list[Sequence]
    logits: torch.Tensor | None
    sampled: Sampled | None = None

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
