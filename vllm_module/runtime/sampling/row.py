"""A row of logits to sample: the request's parameters and the state of its sequence."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from vllm_module.runtime.sampling_params import SamplingParams


@dataclass(slots=True)
class Row:
    """Sampling inputs for the next token of a sequence.

    Attributes:
        params: parameters of the request.
        token_ids: the prompt and the output so far; read only for penalties.
        prompt_len: number of prompt tokens in ``token_ids``.
        uniform: a random number in [0, 1), from the sequence's own generator.
        banned: token ids that may not be chosen.
        mask: which tokens a grammar allows, a bit each, int32 ``[ceil(vocab / 32)]``; None for all.
        key: identifies the sequence, whose parameters stay and whose tokens are only appended. With
            a key, tokens counted for penalties are not counted again in the next step.
        penalized: True if the tokens of the sequence change the logits.
        adjusted: True if a bias, a penalty, a ban or an allowance changes the logits.
        plain: True if the row is greedy without logprobs, bias, penalty, ban or mask.

    Raises:
        ValueError: ``uniform`` is not in [0, 1).

    """

    params: SamplingParams
    token_ids: Sequence[int] = ()
    prompt_len: int = 0
    uniform: float = 0.0
    banned: Collection[int] = ()
    mask: Tensor | None = None
    key: Hashable = None
    penalized: bool = field(init=False)
    adjusted: bool = field(init=False)
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.uniform < 1:
            raise ValueError(f"uniform should be in [0, 1), and is {self.uniform}")
        params = self.params
        self.penalized = bool(
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )
        self.adjusted = self.penalized or bool(
            params.logit_bias or params.allowed_token_ids or self.banned
        )
        self.plain = (
            params.greedy and params.logprobs is None and not self.adjusted and self.mask is None
        )
