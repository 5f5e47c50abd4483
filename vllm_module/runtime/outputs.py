from __future__ import annotations

from dataclasses import dataclass

from vllm_module.runtime.sampler import Logprob
from vllm_module.runtime.sequence import Request, Sequence


@dataclass
class CompletionOutput:
    """One sample of a request.

    Attributes:
        index: which of the request's samples.
        text: what the tokens read; empty without a tokenizer.
        token_ids: generated so far.
        cumulative_logprob: of the tokens, where logprobs were asked for.
        logprobs: of each token, the chosen one and the likeliest, by token id.
        finish_reason: ``"stop"``, ``"length"``, ``"abort"`` or ``"error"``; ``None`` while it
            goes on.
        stop_reason: the token id or string that ended it, if not the model's own end.

    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A request and what came of it so far.

    Attributes:
        prompt: as text, where it was given so.
        prompt_logprobs: of each token of the prompt but the first, where asked for.
        error: why it was refused; its outputs then have no tokens.

    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None


def completion_output(sequence: Sequence) -> CompletionOutput:
    """Return what there is of a sample."""
    params = sequence.request.params
    wanted = params.logprobs is not None
    text = sequence.text
    if params.stops and sequence.finish_reason is None and not params.include_stop_str_in_output:
        # What could be the beginning of a stop string, and would be taken back, is not there yet.
        text = text[: max(0, len(text) + 1 - max(map(len, params.stops)))]
    return CompletionOutput(
        sequence.index,
        text,
        sequence.output,
        sequence.cumulative_logprob if wanted else None,
        list(sequence.logprobs) if wanted else None,
        sequence.finish_reason,
        sequence.stop_reason,
    )


def request_output(request: Request) -> RequestOutput:
    """Return what there is of a request."""
    return RequestOutput(
        request.request_id,
        request.prompt,
        request.prompt_token_ids,
        [completion_output(sequence) for sequence in request.sequences],
        request.finished,
        request.prompt_logprobs,
        request.error,
    )
