"""A step between its launch and the reading of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_module.runtime.sampling.sampler import Sampled
from vllm_module.runtime.sequence import Request, Sequence
from vllm_module.runtime.step_inputs import Step, StepInputs


class Execute(Protocol):
    """What runs the model for an engine."""

    def __call__(self, inputs: StepInputs, sampled: torch.Tensor | None = None, /) -> torch.Tensor:
        """Launch a step on every rank and return the logits of its rows, ``[rows, vocab]``.

        ``sampled`` are the tokens that ``inputs.input_ids`` index, if they do.
        """


@dataclass
class Launched:
    """A step that is launched and not finished: the device may still compute it.

    Attributes:
        step: what it computes.
        prompts: requests, each with the positions of the prompt logprobs that the step gives.
        complete: sequences that get a token, because all tokens that they have are computed.
        logits: of all these positions, and then of each complete sequence; None once the tokens
            are being chosen.
        sampled: the tokens of the complete sequences, if they are being chosen.

    """

    step: Step
    prompts: list[tuple[Request, range]]
    complete: list[Sequence]
    logits: torch.Tensor | None
    sampled: Sampled | None = None

    @property
    def ended(self) -> bool:
        """Whether no sequence gets a token, because each has ended since the launch."""
        return all(sequence.finish_reason is not None for sequence in self.complete)

    def rows_of_next(self, running: int) -> list[int]:
        """Return which of ``complete`` will compute the token that they get, in the next step.

        Others have ended, or end with that token by their length. The list is empty if that step
        depends on more than these tokens: if one of the ``running`` sequences gets no token here,
        the samples of a prompt begin, or a prompt's logprobs have to be read.
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
