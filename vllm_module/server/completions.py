"""``/v1/completions``: texts or token ids that are continued."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.server.endpoint import Answer, Events
from vllm_module.server.errors import ApiError
from vllm_module.server.generation import (
    ChoiceDelta,
    Continuation,
    bounded,
    completion_logprobs,
    ranked,
    sampling_params,
    token_text,
)
from vllm_module.server.protocol import CompletionBody
from vllm_module.server.state import State, new_id


async def completions(state: State, body: CompletionBody) -> Answer:
    """Continue prompts; with ``echo``, answer with the prompt's text and logprobs, too."""
    llm = state.engine(body.model)
    prompts = await state.prompts("prompt", body.prompt, body.add_special_tokens, body.cache_salt)
    prompts = [{**prompt, **state.adapter(body.model)} for prompt in prompts]
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens should be 1 or more, or 0 with echo", "max_tokens")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "an answer with prompt_logprobs is not streamed", "prompt_logprobs")
    counts = [body.prompt_logprobs, body.logprobs if body.echo else None]
    asked = [each for each in counts if each is not None]
    params = sampling_params(
        llm,
        body,
        max_tokens=None if body.max_tokens is None else max(1, body.max_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=max(asked, default=None),
    )
    generation = Continuation(llm, state.histograms, new_id("cmpl"), prompts, params, body.stream)
    answer = _Answer(state, body, generation)
    return answer.events() if body.stream else await answer.whole()


class _Answer:
    """The choices of one request, whole or as events."""

    def __init__(self, state: State, body: CompletionBody, generation: Continuation) -> None:
        self._state, self._body, self._generation = state, body, generation
        self._generates = body.max_tokens != 0
        self._offsets: dict[int, int] = {}  # where the next token of a choice begins
        self._head = {
            "id": generation.name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or state.names[0],
        }

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._generation.deltas()) as deltas:
            choices = [self._choice(delta) async for delta in deltas]
        choices.sort(key=lambda choice: choice["index"])
        usage = self._generation.usage(self._generates)
        return {**self._head, "choices": choices, "usage": usage}

    async def events(self) -> Events:
        options = self._body.stream_options
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                choice = self._choice(delta)
                if any(choice[key] for key in ("text", "logprobs", "finish_reason", "token_ids")):
                    counted = options is not None and options.in_each
                    usage = self._generation.usage(self._generates) if counted else None
                    yield {**self._head, "choices": [choice], "usage": usage}
        if options is not None and options.include_usage:
            usage = self._generation.usage(self._generates)
            yield {**self._head, "choices": [], "usage": usage}

    def _choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        body = self._body
        echoed = body.echo and delta.first
        before = self._prompt_text(delta) if echoed else ""
        ids = delta.token_ids if self._generates else []
        choice = {
            "index": delta.index,
            "text": before + (delta.text if self._generates else ""),
            "logprobs": self._logprobs(delta, echoed) if body.logprobs is not None else None,
            "finish_reason": delta.finish_reason if self._generates or not delta.finish_reason
            else "length",
            "stop_reason": delta.stop_reason if self._generates else None,
            "token_ids": ids if body.return_token_ids else None,
        }  # fmt: skip
        if body.return_token_ids and delta.first:
            choice["prompt_token_ids"] = delta.output.prompt_token_ids
        if body.prompt_logprobs is not None:  # as vLLM writes them
            choice["prompt_logprobs"] = [
                None
                if entry is None
                else {str(t): _entry(each) for t, each in _most(entry, token, body.prompt_logprobs)}
                for token, entry in zip(
                    delta.output.prompt_token_ids, delta.output.prompt_logprobs or (), strict=False
                )
            ]
        return choice

    def _prompt_text(self, delta: ChoiceDelta) -> str:
        if delta.output.prompt is not None:
            return delta.output.prompt
        return self._state.tokenizer().decode(delta.output.prompt_token_ids, False)

    def _logprobs(self, delta: ChoiceDelta, echoed: bool) -> dict[str, Any]:
        entries: list[tuple[int, Mapping[int, Logprob] | None]] = []
        if echoed:
            ids = delta.output.prompt_token_ids
            entries += zip(ids, delta.output.prompt_logprobs or [None] * len(ids), strict=True)
        if self._generates:
            entries += zip(delta.token_ids, delta.logprobs, strict=True)
        start = self._offsets.get(delta.index, 0)
        found = completion_logprobs(self._tokens(entries), start)
        self._offsets[delta.index] = start + sum(map(len, found["tokens"]))
        return found

    def _tokens(
        self, entries: Sequence[tuple[int, Mapping[int, Logprob] | None]]
    ) -> Iterator[tuple[str, float | None, dict[str, float] | None]]:
        as_id = self._body.return_tokens_as_token_ids
        for token, entry in entries:
            if entry is None:  # the first token of a prompt
                text = f"token_id:{token}" if as_id else self._state.tokenizer().decode([token])
                yield text, None, None
                continue
            top: dict[str, float] = {}
            for other, logprob in _most(
                entry, token, self._body.logprobs or 0
            ):  # of two tokens of one text, the first counts
                top.setdefault(token_text(other, logprob, as_id=as_id), bounded(logprob))
            own = entry[token]
            yield token_text(token, own, as_id=as_id), bounded(own), top


def _most(entry: Mapping[int, Logprob], own: int, count: int) -> list[tuple[int, Logprob]]:
    """Return the ``count`` most probable tokens of an entry and its own one, in this order."""
    return [each for each in ranked(entry) if each[1].rank <= count or each[0] == own]


def _entry(logprob: Logprob) -> dict[str, Any]:
    return {
        "logprob": bounded(logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token,
    }  # fmt: skip
