"""Requests and their samples, with the state that the engine and the scheduler keep."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_module.runtime.cache.page_pool import ROOT
from vllm_module.runtime.metrics import RequestStateStats
from vllm_module.runtime.sampling.grammar import Grammar
from vllm_module.runtime.sampling.row import NamedTokens, Row
from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.served_adapter import ServedAdapter
from vllm_module.runtime.text.tokenizer import TextStream

FinishReason = Literal["stop", "length", "abort", "error"]
Routed: TypeAlias = npt.NDArray[np.int16]  # [tokens, layers, experts of a token]


@dataclass(eq=False)
class Sequence:
    """One sample of a request: its tokens, and the pages that hold their keys and values.

    Attributes:
        tokens: tokens of the prompt and the generated ones.
        num_computed: number of first tokens whose keys and values are in the cache.
        pages: pages of the cache, in the order of the tokens; -1 for a page that was freed because
            the sliding window has passed it.
        host_pages: pages in host memory, while the sequence is swapped out.
        num_cached_pages: number of first pages that the pool has in its index under ``prefix``.
        salt: cached pages are shared only among equal salts: that of the prompt, with the adapter
            and the number of its updates, if it has one, when the first page was allocated.
        num_passed_pages: number of first pages that the sliding window has passed.
        num_writable: while it runs, number of first tokens that can be stored without allocating or
            copying a page.
        row: row of the block tables on every rank, and slot of its state; -1 for none.
        host_state: slot of its state in host memory, while it is swapped out; else -1.
        num_listed_pages: number of first pages that the row has on every rank.
        saved_at: while it runs, numbers of tokens after which its state is saved, ascending.
        uniform: generator of this sequence's random numbers, one for each generated token.
        sampling_row: sampling inputs for its next token, once it has needed them.
        grammar: where it is in the grammar of its request, if that has one.
        stream: decoder from tokens to text, if the text is needed at every step.
        weight_versions: versions of the weights that computed the generated tokens, in their order,
            each with its number of tokens.
        routed: the experts that its first tokens went to, as arrays ``[tokens, layers, experts]``
            of int16 one after another, if they are kept.
        num_routed: number of these tokens.

    """

    request: Request
    index: int
    tokens: list[int]
    uniform: random.Random
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    num_cached_pages: int = 0
    prefix: int = ROOT
    salt: Hashable = None
    num_passed_pages: int = 0
    num_writable: int = 0
    row: int = -1
    host_state: int = -1
    num_listed_pages: int = 0
    saved_at: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    text: str = ""
    sampling_row: Row | None = None
    grammar: Grammar | None = None
    stream: TextStream | None = None
    stop_reason: int | str | None = None
    finish_reason: FinishReason | None = None
    weight_versions: list[tuple[str, int]] = field(default_factory=list)
    routed: list[Routed] = field(default_factory=list)
    num_routed: int = 0

    def add_routed(self, experts: Routed) -> None:
        """Add the experts of the next tokens; they are copied."""
        self.routed.append(experts.copy())
        self.num_routed += len(experts)

    def routed_experts(self) -> Routed:
        """Return the experts of these tokens, ``[tokens, layers, experts]``; there are some."""
        if len(self.routed) > 1:
            self.routed = [np.concatenate(self.routed)]
        return self.routed[0]

    def routed_since(self, start: int) -> Routed:
        """Return the experts of the tokens from ``start`` on, without a copy of those before."""
        parts: list[Routed] = []
        begin = self.num_routed
        while begin > start:
            parts.insert(0, self.routed[-1 - len(parts)])
            begin -= len(parts[0])
        return np.concatenate(parts)[start - begin :]

    @property
    def output(self) -> list[int]:
        """Generated tokens."""
        return self.tokens[self.request.prompt_len :]

    def prompt_logprob_positions(self, count: int) -> range:
        """Return the positions, of the next ``count``, whose prompt logprobs are still missing.

        The logits at a position give the logprob of the prompt's next token. The range is empty
        unless the request asked for logprobs; a sequence that starts over already has some.
        """
        logprobs = self.request.prompt_logprobs
        if logprobs is None or self.index:
            return range(0)
        end = min(self.num_computed + count, self.request.prompt_len - 1)
        return range(max(self.num_computed, len(logprobs) - 1), end)


@dataclass(eq=False)
class Request:
    """A prompt and its samples. There is one sequence until the prompt is computed, then ``n``.

    Attributes:
        arrival: number in the order of requests; earlier requests are served first.
        max_len: largest number of tokens of a sequence, with the prompt.
        streamed: True if the text is needed at every step, and not only at the end.
        num_cached_tokens: number of tokens at the prompt's start that were not computed, because
            cached pages held them; ``None`` before the prompt is begun.
        bad_words: tokens of each text that may not be generated.
        grammar: what the output must follow, at its beginning.
        cache_salt: the salt of the prompt.
        adapter: the adapter that it is computed with; ``None`` for the model itself.
        named: tokens that its parameters give a bias or allow; ``None`` without any.

    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: int
    max_len: int
    prompt: str | None = None
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    streamed: bool = False
    num_cached_tokens: int | None = None
    bad_words: list[list[int]] = field(default_factory=list)
    grammar: Grammar | None = None
    cache_salt: str | None = None
    adapter: ServedAdapter | None = None
    metrics: RequestStateStats = field(default_factory=RequestStateStats)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt_token_ids)
        names_some = self.params.logit_bias or self.params.allowed_token_ids is not None
        self.named = NamedTokens(self.params) if names_some else None
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token has no logprob
        seed = self.params.seed
        self._seeds = random.Random(seed) if seed is not None else random.Random()
        self.sequences = [self.new_sequence()]

    def new_sequence(self) -> Sequence:
        """Return the next sample, with the prompt's tokens and a seed of its own."""
        uniform = random.Random(self._seeds.getrandbits(64))
        grammar = None if self.grammar is None else self.grammar.copy()
        tokens = list(self.prompt_token_ids)
        return Sequence(self, len(self.sequences), tokens, uniform, grammar=grammar)

    @property
    def finished(self) -> bool:
        """True if every sample has ended."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)
