"""The search of beams: the most probable continuations of a prompt, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from vllm_module.base.messages import shorten
from vllm_module.runtime.metrics import progress
from vllm_module.runtime.sampling.sampler import Logprob

# Returns, for each sequence of tokens, the logprobs of so many of the most probable next ones.
NextLogprobs = Callable[[list[list[int]], int], list[dict[int, Logprob]]]


@dataclass
class BeamSearchParams:
    """How to search; names and defaults are vLLM's.

    Attributes:
        beam_width: how many sequences are kept after each token, and returned.
        max_tokens: most tokens of a continuation.
        ignore_eos: do not end a sequence at an end token.
        length_penalty: a sequence's score is the sum of its logprobs divided by its length, the
            prompt's included, to this power.
        skip_special_tokens: leave special tokens out of the text.

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
    """A sequence that was found.

    Attributes:
        tokens: the prompt's and the continuation's.
        logprobs: of the continuation's tokens and the candidates beside them.
        cum_logprob: the sum over the continuation's tokens.
        text: of all tokens; ``None`` without a tokenizer.
        finish_reason: ``"stop"`` after an end token, else ``"length"``.
        stop_reason: that end token.

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
    """Search all prompts together, until ``max_tokens`` or ``max_model_len`` with the prompt.

    As in vLLM and transformers, each beam has twice as many candidates as beams are kept.
    """
    ends = () if params.ignore_eos else end_tokens
    beams = [[BeamSearchSequence(list(prompt))] for prompt in prompts]
    complete: list[list[BeamSearchSequence]] = [[] for _ in prompts]

    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.finish_reason == "stop")
        return float(beam.cum_logprob / length**params.length_penalty)

    with progress(use_tqdm, params.max_tokens, "tokens") as count:
        for _ in range(params.max_tokens):
            every = [beam.tokens for of_prompt in beams for beam in of_prompt]
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
