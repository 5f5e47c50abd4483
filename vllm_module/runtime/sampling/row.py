"""A row of logits to sample: the request's parameters, its sequence, and the tokens it bans."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.text.tokenizer import Tokenizer


class NamedTokens:
    """The tokens that parameters give a bias or allow, as arrays that every step reuses.

    Attributes:
        biased: tokens with a bias.
        biases: of these tokens.
        allowed: the only tokens that may be chosen, each once; None for all.

    """

    def __init__(self, params: SamplingParams) -> None:
        bias, allowed = params.logit_bias or {}, params.allowed_token_ids
        self.biased, self.biases = array("q", bias), array("d", bias.values())
        self.allowed = None if allowed is None else array("q", sorted(set(allowed)))
        self._ends = [
            token
            for each in (self.biased, self.allowed)
            if each
            for token in (min(each), max(each))
        ]

    def check(self, vocab_size: int) -> None:
        """Raise ``ValueError`` if a model of ``vocab_size`` tokens lacks one of them."""
        check_tokens(self._ends, vocab_size)


@dataclass(slots=True)
class Row:
    """Sampling inputs for the next token of a sequence, which may keep its row from step to step.

    Attributes:
        params: parameters of the request.
        token_ids: the prompt and the output so far; read only for penalties.
        prompt_len: number of prompt tokens in ``token_ids``.
        uniform: a random number in [0, 1), from the sequence's own generator.
        banned: token ids that may not be chosen; :meth:`ban` sets them.
        key: identifies the sequence, whose parameters stay and whose tokens are only appended. With
            a key, tokens counted for penalties are not counted again in the next step.
        mask: which tokens a grammar allows, a bit each, int32 ``[ceil(vocab / 32)]``; None for all.
            :meth:`ban` sets it too.
        named: those of ``params``, which samples of one request share; else they are made anew.
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
    key: Hashable = None
    mask: Tensor | None = None
    named: NamedTokens | None = None
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
        self.ban(self.banned, self.mask)

    def ban(self, banned: Collection[int], mask: Tensor | None = None) -> None:
        """Replace the tokens that may not be chosen, and the mask of those that may."""
        params, self.banned, self.mask = self.params, banned, mask
        self.adjusted = self.penalized or bool(
            params.logit_bias or params.allowed_token_ids or banned
        )
        changed = self.adjusted or mask is not None
        self.plain = params.greedy and params.logprobs is None and not changed


def check_tokens(token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise ``ValueError`` for the first token that a model of ``vocab_size`` tokens lacks."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside of the vocabulary of {vocab_size}")


def encode_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of each banned word, at the start of a text and after a space.

    As in vLLM, the tokens after a space are used only if they are as many and the first one
    differs. Raises ``ValueError`` for a word without tokens.
    """
    found: list[list[int]] = []
    for word in words:
        alone, spaced = (tokenizer.encode(space + word.lstrip(), False) for space in ("", " "))
        if not alone:
            raise ValueError(f"the bad word {word!r} has no tokens")
        found.append(alone)
        if spaced and spaced[0] != alone[0] and len(spaced) == len(alone):
            found.append(spaced)
    return found


def completing_tokens(bad_words: Sequence[Sequence[int]], output: Sequence[int]) -> set[int]:
    """Return the tokens that would complete a word at the end of ``output``."""
    banned = set()
    for *before, last in bad_words:
        if not before or list(output[-len(before) :]) == before:
            banned.add(last)
    return banned
