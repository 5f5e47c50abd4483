from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from vllm_module.runtime.page_pool import ROOT
from vllm_module.runtime.sampler import Logprob
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.tokenizer import TextStream

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(eq=False)
class Sequence:
    """One sample of a request: its tokens, and the pages that hold their keys and values.

    Attributes:
        tokens: of the prompt and those generated after it.
        computed: how many of them, from the first, have keys and values in the cache.
        pages: in the cache, the ones that a sliding window has left given back and -1.
        host_pages: in host memory, while the sequence is swapped out.
        uniform: draws this sequence's random numbers, one a token.

    """

    request: Request
    index: int
    tokens: list[int]
    uniform: random.Random
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    remembered: int = 0  # pages whose content the pool knows
    prefix: int = ROOT  # the prefix that they are
    left_behind: int = 0  # pages that the sliding window has left
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    text: str = ""
    stream: TextStream | None = None  # where the text is needed before the end
    stop_reason: int | str | None = None
    finish_reason: FinishReason | None = None

    @property
    def output(self) -> list[int]:
        """Tokens that were generated."""
        return self.tokens[self.request.prompt_len :]

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are not in the cache yet."""
        return len(self.tokens) - self.computed

    def prompt_positions(self, count: int) -> range:
        """Which of the next ``count`` tokens' logits say how likely the prompt's next token was.

        Only where that is wanted, and not known from before the sequence had to start over.
        """
        known = self.request.prompt_logprobs
        if known is None or self.index:
            return range(0)
        end = min(self.computed + count, self.request.prompt_len - 1)
        return range(max(self.computed, len(known) - 1), end)


@dataclass(eq=False)
class Request:
    """A prompt, and the samples that continue it; they start as one and part after the prompt.

    Attributes:
        arrival: its place in the order of requests; the earlier goes first.

    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: int
    prompt: str | None = None
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    streamed: bool = False  # whether the text is kept up to date

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt_token_ids)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing comes before the first
        seed = self.params.seed
        self._seeds = random.Random(seed) if seed is not None else random.Random()
        self.sequences = [self.new_sequence()]

    def new_sequence(self) -> Sequence:
        """Return the next sample, as far as the prompt."""
        uniform = random.Random(self._seeds.getrandbits(64))
        return Sequence(self, len(self.sequences), list(self.prompt_token_ids), uniform)

    @property
    def finished(self) -> bool:
        """Whether nothing more will be generated."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)
