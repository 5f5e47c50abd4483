"""Outputs of ``LLM``: requests, samples, vectors and scores, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Reversible
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from vllm_module.errors import CheckpointFormatError
from vllm_module.hf_config import HFConfig
from vllm_module.runtime.metrics import RequestStateStats
from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.runtime.sequence import Request, Routed, Sequence
from vllm_module.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModelConfig:
    """Properties of a served model, under vLLM's names.

    Attributes:
        model, revision, trust_remote_code, seed: the arguments, as given.
        tokenizer: the place of the tokenizer.
        dtype, device: dtype and device of the parameters that are not quantized.
        max_model_len: largest number of tokens of a sequence.
        tensor_parallel_size: the number of ranks.
        num_gpu_blocks, block_size: pages of the KV cache, on any device, and the tokens of each.
        hf_config: config.json, with its entries as attributes.

    """

    model: str
    tokenizer: str
    dtype: torch.dtype
    max_model_len: int
    hf_config: HFConfig
    revision: str | None
    trust_remote_code: bool
    seed: int | None
    device: torch.device
    tensor_parallel_size: int
    num_gpu_blocks: int
    block_size: int

    def get_vocab_size(self) -> int:
        """Return the number of tokens that the model knows."""
        return self.hf_config.vocab_size

    def get_hidden_size(self) -> int:
        """Return the length of a hidden state."""
        return self.hf_config.hidden_size


@dataclass
class CompletionOutput:
    """One sample of a request.

    Attributes:
        index: number of the sample, from 0.
        text: text of the tokens; empty without a tokenizer.
        token_ids: tokens generated so far.
        cumulative_logprob: sum of the tokens' logprobs; ``None`` unless logprobs were requested.
        logprobs: for each token, the logprobs of it and of the most probable ones, by token id;
            ``None`` unless they were requested.
        finish_reason: ``"stop"``, ``"length"``, ``"abort"`` or ``"error"``; ``None`` before the
            end.
        stop_reason: the token id or string of the request's parameters that ended it; ``None`` for
            the model's own end token.
        lora_request: always ``None``.
        weight_versions: versions of the weights that computed the tokens, in their order, each with
            its number of tokens: ``[("0", 5), ("step-1", 3)]`` if an update came after 5 tokens.
        routed_experts: int16 ``[tokens - 1, layers, experts of a token]``, with
            ``enable_return_routed_experts`` once the sample has ended: the experts of each token of
            prompt and output but the last, which is not computed, in each layer that has experts.

    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None
    weight_versions: list[tuple[str, int]] = field(default_factory=list)
    routed_experts: Routed | None = None

    def finished(self) -> bool:
        """Return whether the sample has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request and its samples so far.

    Attributes:
        prompt: text of the prompt; ``None`` if it was given as token ids.
        outputs: one for each sample.
        finished: True if all samples have ended.
        prompt_logprobs: for each token of the prompt, as ``CompletionOutput.logprobs``; ``None``
            for the first token, and altogether unless they were requested.
        error: reason why the request was refused or failed; a refused one has no tokens.
        num_cached_tokens: number of tokens at the prompt's start that were not computed, because
            the cache had them; ``None`` before the prompt is begun.
        metrics: times and counts of the request.
        lora_request: always ``None``.

    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    num_cached_tokens: int | None = None
    metrics: RequestStateStats = field(default_factory=RequestStateStats)
    lora_request: None = None


@dataclass
class PoolingOutput:
    """Pooled result of a prompt: ``[numbers]``, or ``[tokens, hidden_size]`` for each token."""

    data: Tensor


@dataclass
class EmbeddingOutput:
    """The embedding of a prompt, ``hidden_size`` numbers; empty if the prompt has an error."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the embedding."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The probabilities of a prompt's classes; empty if the prompt has an error."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """Similarity or relevance of a pair of texts; NaN if the pair has an error."""

    score: float


_Output = TypeVar("_Output")
_Made = TypeVar("_Made")


@dataclass
class PoolingRequestOutput(Generic[_Output]):
    """A prompt and its pooled result.

    Attributes:
        request_id: number of the prompt in its call.
        prompt_token_ids: tokens that were computed.
        num_cached_tokens: always 0, because an encoder has no cache.
        finished: always True.
        error: reason why the prompt was refused or failed.

    """

    request_id: str
    outputs: _Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None

    def with_outputs(self, cls: Callable[..., _Made], outputs: object) -> _Made:
        """Return the prompt with another result, as a ``cls``."""
        return cls(self.request_id, outputs, self.prompt_token_ids, error=self.error)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A prompt and its embedding."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A prompt and its classes' probabilities."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """A pair of texts and their score."""


@dataclass
class RerankResult:
    """A document with its index in the list of documents and its score for the query."""

    index: int
    document: str
    relevance_score: float


def request_output(request: Request) -> RequestOutput:
    """Return the current state of a request as an output."""
    return RequestOutput(
        request.request_id,
        request.prompt,
        request.prompt_token_ids,
        [_completion_output(sequence) for sequence in request.sequences],
        request.finished,
        request.prompt_logprobs,
        request.error,
        request.num_cached_tokens,
        replace(request.metrics),
    )


def decode_logprobs(
    entries: Reversible[Mapping[int, Logprob] | None] | None, tokenizer: Tokenizer
) -> None:
    """Set the text of each logprob's token; ``None`` where the tokenizer fails.

    A stream calls this at every token, so entries that have texts, and those before, are left.
    """
    for entry in reversed(entries or ()):
        if entry and next(iter(entry.values())).decoded_token is not None:
            break
        for token, logprob in (entry or {}).items():
            if logprob.decoded_token is None:
                with suppress(CheckpointFormatError):
                    logprob.decoded_token = tokenizer.decode([token], False)


def _completion_output(sequence: Sequence) -> CompletionOutput:
    params = sequence.request.params
    has_logprobs = params.logprobs is not None
    text = sequence.text
    if params.stop and sequence.finish_reason is None and not params.include_stop_str_in_output:
        # The end of the text may be the beginning of a stop string, which would be cut off.
        text = text[: max(0, len(text) + 1 - max(map(len, params.stop)))]
    return CompletionOutput(
        sequence.index,
        text,
        sequence.output,
        sequence.cumulative_logprob if has_logprobs else None,
        list(sequence.logprobs) if has_logprobs else None,
        sequence.finish_reason,
        sequence.stop_reason,
        weight_versions=list(sequence.weight_versions),
        routed_experts=(
            sequence.routed_experts() if sequence.routed and sequence.finish_reason else None
        ),
    )
