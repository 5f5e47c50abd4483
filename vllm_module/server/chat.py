"""``/v1/chat/completions``: conversations."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from vllm_module.base.messages import shorten
from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.server.endpoint import Answer, Events
from vllm_module.server.errors import ApiError
from vllm_module.server.generation import (
    ChoiceDelta,
    Continuation,
    bounded,
    ranked,
    sampling_params,
    token_text,
)
from vllm_module.server.protocol import ChatBody
from vllm_module.server.state import State, new_id

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXTS = ("text", "input_text", "output_text", "refusal")  # types of parts that are text


@dataclass
class TextPart:
    """Text of one kind in a message; parts of one kind that follow each other are one text."""

    kind: Literal["content"]
    text: str


class Parser(Protocol):
    """Divides the text of a choice into parts.

    For every split of a text, the parts of all pieces together are those of the whole.
    """

    def feed(self, text: str) -> list[TextPart]:
        """Return the parts that are certain after more text."""

    def end(self) -> list[TextPart]:
        """Return the parts that the end of the text makes certain."""


class ContentParser:
    """The parser of models without tools: all text is content."""

    def feed(self, text: str) -> list[TextPart]:
        """Return the text as content."""
        return [TextPart("content", text)] if text else []

    def end(self) -> list[TextPart]:
        """Return nothing: no text is held back."""
        return []


async def chat_completions(state: State, body: ChatBody) -> Answer:
    """Answer a conversation."""
    llm = state.engine(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    prompt = await state.chat_prompt(checked_messages(body.messages), body)
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    most = body.max_completion_tokens or body.max_tokens
    params = sampling_params(
        llm, body, max_tokens=most, logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )
    generation = Continuation(
        llm, state.histograms, new_id("chatcmpl"), [prompt], params, body.stream
    )
    answer = _Answer(state, body, generation)
    return answer.events() if body.stream else await answer.whole()


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates know them; refuse roles and parts that are not supported.

    A developer's message is a system message: most templates know no other.
    """
    found = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        where = f"messages[{number}]"
        if role not in _ROLES:
            names = ", ".join(_ROLES)
            raise _refusal(f"{where}.role should be one of {names}, got {shorten(role)}")
        if isinstance(content, list):
            for at, part in enumerate(content):
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind not in _TEXTS:
                    what = shorten(part) if kind is None else f"type {shorten(kind)}"
                    raise _refusal(
                        f"{where}.content[{at}] is not supported: only parts of text are, got "
                        f"{what}"
                    )
        elif not isinstance(content, (str, type(None))):
            raise _refusal(
                f"{where}.content should be text or a list of parts, got {shorten(content)}"
            )
        found.append({**message, "role": "system" if role == "developer" else role})
    return found


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, "messages")


class _Answer:
    """The choices of one request, whole or as events."""

    def __init__(self, state: State, body: ChatBody, generation: Continuation) -> None:
        self._body, self._generation = body, generation
        self._parsers: dict[int, Parser] = {}
        self._new_parser = state.new_parser
        self._head = {
            "id": generation.name,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model or state.names[0],
        }

    async def whole(self) -> dict[str, Any]:
        choices = []
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                text = "".join(part.text for part in self._parts(delta))
                message = {"role": "assistant", "content": text, "refusal": None}
                choices.append(self._choice(delta, "message", message))
        choices.sort(key=lambda choice: choice["index"])
        return {**self._head, "choices": choices, "usage": self._generation.usage()}

    async def events(self) -> Events:
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if delta.first:
                    message = {"role": "assistant", "content": ""}
                    choice = {"index": delta.index, "delta": message, "logprobs": None}
                    yield {**self._head, "choices": [{**choice, "finish_reason": None}]}
                text = "".join(part.text for part in self._parts(delta))
                choice = self._choice(delta, "delta", {"content": text} if text else {})
                if text or any(choice[key] for key in ("logprobs", "finish_reason", "token_ids")):
                    yield {**self._head, "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield {**self._head, "choices": [], "usage": self._generation.usage()}

    def _parts(self, delta: ChoiceDelta) -> list[TextPart]:
        parser = self._parsers.setdefault(delta.index, self._new_parser())
        parts = parser.feed(delta.text)
        return parts + parser.end() if delta.finish_reason is not None else parts

    def _choice(self, delta: ChoiceDelta, key: str, message: dict[str, Any]) -> dict[str, Any]:
        body = self._body
        choice = {
            "index": delta.index,
            key: message,
            "logprobs": self._logprobs(delta) if body.logprobs and delta.token_ids else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if body.return_token_ids else None,
        }
        if body.return_token_ids and delta.first:
            choice["prompt_token_ids"] = delta.output.prompt_token_ids
        return choice

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any]:
        as_id, count = self._body.return_tokens_as_token_ids, self._body.top_logprobs or 0

        def entry(token: int, logprob: Logprob) -> dict[str, Any]:
            text = token_text(token, logprob, as_id=as_id)
            return {"token": text, "logprob": bounded(logprob), "bytes": [*text.encode()]}

        content = [
            {
                **entry(token, found[token]),
                "top_logprobs": [entry(*each) for each in ranked(found)[:count]],
            }
            for token, found in zip(delta.token_ids, delta.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}
