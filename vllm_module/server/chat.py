"""``/v1/chat/completions``: conversations."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from vllm_module.base.messages import shorten
from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.server.endpoint import Answer, Events
from vllm_module.server.errors import ApiError
from vllm_module.server.generation import (
    Generation,
    Piece,
    bounded,
    ranked,
    sampling_params,
    token_text,
)
from vllm_module.server.parsers import Parser
from vllm_module.server.protocol import ChatBody
from vllm_module.server.state import State, new_id
from vllm_module.server.tools import AnswerForm, call_entry

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXTS = ("text", "input_text", "output_text", "refusal")  # types of parts that are text


async def chat_completions(state: State, body: ChatBody) -> Answer:
    """Answer a conversation."""
    llm = state.engine(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    form = AnswerForm.of(body, state.formats)
    prompt = await state.chat_prompt(checked_messages(body.messages), body, form.tools)
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    most = body.max_completion_tokens or body.max_tokens
    shows_special = form.reads_marks and "skip_special_tokens" not in body.sampling
    params = sampling_params(
        llm,
        body,
        max_tokens=most,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_outputs=form.structured_outputs,
        skip_special_tokens=False if shows_special else None,
    )
    generation = Generation(
        llm, state.histograms, new_id("chatcmpl"), [prompt], params, body.stream
    )
    answer = _Answer(state, body, form, generation)
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

    def __init__(
        self, state: State, body: ChatBody, form: AnswerForm, generation: Generation
    ) -> None:
        self._body, self._form, self._generation = body, form, generation
        self._parsers: dict[int, Parser] = {}
        self._calls: dict[int, int] = {}  # number of calls of each choice so far
        self._head = {
            "id": generation.name,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model or state.names[0],
        }

    async def whole(self) -> dict[str, Any]:
        choices = []
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
                message |= self._delta(piece)
                for call in message.get("tool_calls", ()):
                    del call["index"]
                if message["content"] is None and "tool_calls" not in message:
                    message["content"] = ""
                choices.append(self._choice(piece, "message", message))
        choices.sort(key=lambda choice: choice["index"])
        return {**self._head, "choices": choices, "usage": self._generation.usage()}

    async def events(self) -> Events:
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                if piece.first:
                    delta = {"role": "assistant", "content": ""}
                    choice = {"index": piece.index, "delta": delta, "logprobs": None}
                    yield {**self._head, "choices": [{**choice, "finish_reason": None}]}
                choice = self._choice(piece, "delta", self._delta(piece))
                shown = ("delta", "logprobs", "finish_reason", "token_ids")
                if any(choice[key] for key in shown):
                    yield {**self._head, "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield {**self._head, "choices": [], "usage": self._generation.usage()}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        """Return what is new of a message: content, reasoning and complete calls."""
        parser = self._parsers.get(piece.index)
        if parser is None:
            parser = self._form.parser(piece.output.prompt or "")
            self._parsers[piece.index] = parser
        deltas = parser.feed(piece.text)
        if piece.finish_reason is not None:
            deltas += parser.finish()
        found: dict[str, Any] = {}
        if content := "".join(delta.content for delta in deltas):
            found["content"] = content
        if reasoning := "".join(delta.reasoning for delta in deltas):
            found["reasoning_content"] = reasoning
        for call in (delta.tool_call for delta in deltas):
            index = self._calls.get(piece.index, 0)
            if call is None or index == self._form.most_calls:
                continue
            self._calls[piece.index] = index + 1
            found.setdefault("tool_calls", []).append({"index": index, **call_entry(call)})
        return found

    def _choice(self, piece: Piece, key: str, message: dict[str, Any]) -> dict[str, Any]:
        body = self._body
        calls = piece.finish_reason == "stop" and self._calls.get(piece.index)
        choice = {
            "index": piece.index,
            key: message,
            "logprobs": self._logprobs(piece) if body.logprobs and piece.token_ids else None,
            "finish_reason": "tool_calls" if calls else piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "token_ids": piece.token_ids if body.return_token_ids else None,
        }
        if body.return_token_ids and piece.first:
            choice["prompt_token_ids"] = piece.output.prompt_token_ids
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        as_id, count = self._body.return_tokens_as_token_ids, self._body.top_logprobs or 0

        def entry(token: int, logprob: Logprob) -> dict[str, Any]:
            text = token_text(token, logprob, as_id=as_id)
            return {"token": text, "logprob": bounded(logprob), "bytes": [*text.encode()]}

        content = [
            {
                **entry(token, found[token]),
                "top_logprobs": [entry(*each) for each in ranked(found)[:count]],
            }
            for token, found in zip(piece.token_ids, piece.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}
