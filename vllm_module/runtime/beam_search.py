"""Beam search: keeping several of the most probable continuations of a prompt at each token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from vllm_module.base.messages import shorten
from vllm_module.runtime.metrics import progress
from vllm_module.runtime.sampling.sampler import Logprob

# Function from token sequences, each after the index of its prompt, and a count to the logprobs of
# that many most probable next tokens.
NextLogprobs = Callable[[list[tuple[int, list[int]]], int], list[dict[int, Logprob]]]


@dataclass
class BeamSearchParams:
    """Settings of a beam search; names and defaults are vLLM's.

    Attributes:
        beam_width: number of sequences kept after each token, and returned.
        max_tokens: largest number of tokens of a continuation.
        ignore_eos: True if an end token does not end a sequence.
        length_penalty: exponent of the length (with the prompt) by which the sum of a sequence's
            logprobs is divided to give its score.
        skip_special_tokens: True if special tokens are left out of the text.

    Raises ``ValueError`` for a width or length below 1.

    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} should be an integer from 1, got {value!r}")
        power = self.length_penalty
        if isinstance(power, bool) or not isinstance(power, (int, float)) or not isfinite(power):
            raise ValueError(f"length_penalty should be a finite number, got {shorten(power)}")
        if self.temperature or self.include_stop_str_in_output:
            raise ValueError(
                "a search of beams has a temperature of 0 and no stop strings: leave out "
                "temperature and include_stop_str_in_output"
            )


@dataclass
class BeamSearchSequence:
    """A sequence found by beam search.

    Attributes:
        tokens: tokens of the prompt and the continuation.
        logprobs: for each token of the continuation, the logprobs of it and of other candidates.
        cum_logprob: sum of the logprobs of the continuation's tokens.
        text: text of all tokens; ``None`` without a tokenizer.
        finish_reason: ``"stop"`` after an end token, else ``"length"``.
        stop_reason: the end token, if there is one.

    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The sequences found for a prompt, the best first; at most ``beam_width``."""

    sequences: list[BeamSearchSequence]


def search(
    next_logprobs: NextLogprobs,
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    end_tokens: Collection[int],
    max_model_len: int,
    use_tqdm: bool | Callable[..., Any] = False,
) -> list[BeamSearchOutput]:
    """Search all prompts together, up to ``max_tokens``, or ``max_model_len`` with the prompt.

    As in vLLM and transformers, each beam has twice as many candidates as there are beams.
    """
    ends = () if params.ignore_eos else end_tokens
    beams = [[BeamSearchSequence(list(prompt))] for prompt in prompts]
    complete: list[list[BeamSearchSequence]] = [[] for _ in prompts]

    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.finish_reason == "stop")
        return float(beam.cum_logprob / length**params.length_penalty)

    with progress(use_tqdm, params.max_tokens, "tokens") as count:
        for _ in range(params.max_tokens):
            every = [(at, beam.tokens) for at, of_prompt in enumerate(beams) for beam in of_prompt]
            if not every:
                break
            logprobs = iter(next_logprobs(every, 2 * params.beam_width))
            for place, of_prompt in enumerate(beams):
                grown = []
                for beam in of_prompt:
                    candidates = next(logprobs)
                    for token, each in candidates.items():
                        longer = BeamSearchSequence(
                            [*beam.tokens, token],
                            [*beam.logprobs, candidates],
                            beam.cum_logprob + each.logprob,
                        )
                        if token in ends:
                            longer.finish_reason, longer.stop_reason = "stop", token
                            complete[place].append(longer)
                        elif len(longer.tokens) == max_model_len:
                            complete[place].append(longer)
                        else:
                            grown.append(longer)
                beams[place] = sorted(grown, key=score, reverse=True)[: params.beam_width]
            count(1)
    found = []
    for done, left in zip(complete, beams, strict=True):
        best = sorted([*done, *left], key=score, reverse=True)[: params.beam_width]
        for beam in best:
            beam.finish_reason = beam.finish_reason or "length"
        found.append(BeamSearchOutput(best))
    return found
