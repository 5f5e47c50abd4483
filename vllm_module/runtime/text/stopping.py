"""Ending sequences at stop tokens and strings, and decoding their text."""

from __future__ import annotations

from collections.abc import Collection

from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.sequence import FinishReason, Sequence
from vllm_module.runtime.text.tokenizer import TextStream, Tokenizer


def check_stop(
    sequence: Sequence,
    stop_token_ids: Collection[int],
    tokenizer: Tokenizer | None,
    eos_token_id: int | None = None,
) -> FinishReason | None:
    """Return why the last token ends ``sequence``, or None if it does not.

    Sets ``stop_reason`` to the token or string at which the request asked to stop, or to an end
    token of the model other than ``eos_token_id``, and updates the text of a streamed request.
    Raises ``CheckpointFormatError`` if the tokenizer fails.
    """
    request, token = sequence.request, sequence.tokens[-1]
    params = request.params
    length = len(sequence.tokens) - request.prompt_len
    if length >= params.min_tokens:
        if token in stop_token_ids and not params.ignore_eos:
            if eos_token_id is not None and token != eos_token_id:
                sequence.stop_reason = token
            return "stop"
        if token in params.stop_token_ids:
            sequence.stop_reason = token
            return "stop"
    if request.streamed:
        start = len(sequence.text)
        sequence.text += _next_text(sequence, token, tokenizer)
        if length >= params.min_tokens and _cut_at_stop_string(sequence, start):
            return "stop"
    if sequence.grammar is not None and sequence.grammar.ended(sequence.output):
        return "stop"
    if len(sequence.tokens) >= request.max_len:
        return "length"
    return None


def _next_text(sequence: Sequence, token: int, tokenizer: Tokenizer | None) -> str:
    """Return the text that ``token`` adds; empty if its last character is incomplete."""
    if sequence.stream is None:
        assert tokenizer is not None, "Engine.add streams nothing without a tokenizer"
        request = sequence.request
        sequence.stream = TextStream(
            tokenizer, request.prompt_token_ids, request.params.skip_special_tokens
        )
    return sequence.stream.push(token)


def _cut_at_stop_string(sequence: Sequence, start: int) -> bool:
    """Cut the text at a stop string that ends after ``start``; return whether one was found.

    Of several, the one that ends first counts, and of those the longest.
    """
    params, text = sequence.request.params, sequence.text
    found = [
        (index + len(stop), index, stop)
        for stop in params.stop
        if (index := text.find(stop, max(0, start - len(stop) + 1))) >= 0
    ]
    if found:
        end, begin, sequence.stop_reason = min(found)
        sequence.text = text[: end if params.include_stop_str_in_output else begin]
    return bool(found)


def complete_text(sequence: Sequence, tokenizer: Tokenizer | None) -> None:
    """Decode the whole text of an ended sequence, unless a stop string has cut it.

    Without ``detokenize`` it has no text. A token that ended it is in its tokens, but in its text
    only if the request wants that. If the tokenizer fails, the request gets its error.
    """
    request, output = sequence.request, sequence.output
    wanted = request.params.detokenize
    if tokenizer is not None and wanted and not isinstance(sequence.stop_reason, str):
        at_token = sequence.grammar is None or not sequence.grammar.complete
        keeps = request.params.include_stop_str_in_output
        if sequence.finish_reason == "stop" and at_token and not keeps:
            output = output[:-1]
        try:
            sequence.text = tokenizer.continuation(
                request.prompt_token_ids, output, request.params.skip_special_tokens
            )
        except CheckpointFormatError as error:
            sequence.finish_reason = "error"
            request.error = request.error or str(error)
