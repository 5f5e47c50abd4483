"""``/v1/chat/completions``: conversations as OpenAI's clients have them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.server.conversation import Conversation
from vllm_module.server.endpoint import Answer, Events
from vllm_module.server.errors import ApiError
from vllm_module.server.generation import ChoiceDelta, bounded, ranked, token_text
from vllm_module.server.growing_text import Delta
from vllm_module.server.protocol import ChatBody
from vllm_module.server.state import State
from vllm_module.server.tools import call_entry


async def chat_completions(state: State, body: ChatBody) -> Answer:
    """Answer a conversation."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    answer = _Answer(state, body, await Conversation.begin(state, body, "chatcmpl"))
    return answer.events() if body.stream else await answer.whole()


class _Answer:
    """The choices of one request, whole or as events."""

    def __init__(self, state: State, body: ChatBody, conversation: Conversation) -> None:
        self._body, self._conversation = body, conversation
        self._shown: dict[int, int] = {}  # number of calls of each choice that were told
        self._head = {
            "id": conversation.generation.name,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model or state.names[0],
        }

    async def whole(self) -> dict[str, Any]:
        choices, prompt = [], dict[str, Any]()
        async with aclosing(self._conversation.turns()) as turns:
            async for piece, deltas in turns:
                message: dict[str, Any] = {
                    "role": "assistant", "content": None, "refusal": None, "annotations": [],
                }  # fmt: skip
                message |= self._message(piece.index, deltas)
                for call in message.get("tool_calls", ()):
                    del call["index"]
                if message["content"] is None and "tool_calls" not in message:
                    message["content"] = ""
                choices.append(self._choice(piece, "message", message))
                prompt = self._prompt(piece)
        choices.sort(key=lambda choice: choice["index"])
        usage = self._conversation.generation.usage()
        return {**self._head, **prompt, "choices": choices, "usage": usage}

    async def events(self) -> Events:
        options = self._body.stream_options
        generation = self._conversation.generation
        counted = options is not None and options.in_each
        async with aclosing(self._conversation.turns()) as turns:
            async for piece, deltas in turns:
                if piece.first:
                    delta = {"role": "assistant", "content": ""}
                    choice = {"index": piece.index, "delta": delta, "logprobs": None}
                    usage = {"usage": generation.usage(generated=False)} if counted else {}
                    begin = {**self._head, **self._prompt(piece)}
                    yield {**begin, "choices": [{**choice, "finish_reason": None}], **usage}
                choice = self._choice(piece, "delta", self._message(piece.index, deltas))
                shown = ("delta", "logprobs", "finish_reason", "token_ids")
                if any(choice[key] for key in shown):
                    usage = {"usage": generation.usage()} if counted else {}
                    yield {**self._head, "choices": [choice], **usage}
        if options is not None and options.include_usage:
            yield {**self._head, "choices": [], "usage": generation.usage()}

    def _message(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return what is new of a message: content, reasoning and complete calls."""
        found: dict[str, Any] = {}
        if content := "".join(delta.content for delta in deltas):
            found["content"] = content
        if reasoning := "".join(delta.reasoning for delta in deltas):
            found["reasoning_content"] = reasoning
        for call in (delta.tool_call for delta in deltas):
            if call is not None:
                number = self._shown.get(index, 0)
                self._shown[index] = number + 1
                found.setdefault("tool_calls", []).append({"index": number, **call_entry(call)})
        return found

    def _choice(self, piece: ChoiceDelta, key: str, message: dict[str, Any]) -> dict[str, Any]:
        body = self._body
        calls = piece.finish_reason == "stop" and self._shown.get(piece.index)
        return {
            "index": piece.index,
            key: message,
            "logprobs": self._logprobs(piece) if body.logprobs and piece.token_ids else None,
            "finish_reason": "tool_calls" if calls else piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "token_ids": piece.token_ids if body.return_token_ids else None,
        }

    def _prompt(self, piece: ChoiceDelta) -> dict[str, Any]:
        """Return the prompt's tokens, if asked for, which vLLM has beside the choices."""
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": piece.output.prompt_token_ids}

    def _logprobs(self, piece: ChoiceDelta) -> dict[str, Any]:
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
