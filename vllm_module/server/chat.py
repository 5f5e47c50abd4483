"""``/v1/chat/completions``: conversations as OpenAI's clients have them."""

from __future__ import annotations

from typing import Any

from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.server.conversation import Conversation, checked_messages
from vllm_module.server.endpoint import Answer
from vllm_module.server.errors import ApiError
from vllm_module.server.generation import ChoiceDelta, ChoicesAnswer, bounded, ranked, token_text
from vllm_module.server.protocol import ChatBody
from vllm_module.server.state import State
from vllm_module.server.tools import call_entry


async def chat_completions(state: State, body: ChatBody) -> Answer:
    """Answer a conversation."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    body.messages = checked_messages(body.messages)
    answer = _Messages(body, await Conversation.begin(state, body, "chatcmpl"))
    return answer.events() if body.stream else await answer.whole()


class _Messages(ChoicesAnswer):
    """Messages, each a choice."""

    def __init__(self, body: ChatBody, conversation: Conversation) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(conversation, kind)
        self._body, self._calls = body, conversation.calls

    def beside(self, delta: ChoiceDelta) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": delta.output.prompt_token_ids}

    def begin(self, delta: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        body = self._body
        stopped_to_call = delta.finish_reason == "stop" and self._calls.get(delta.index)
        return {
            "index": delta.index,
            **({"delta": self._new(delta)} if body.stream else {"message": self._message(delta)}),
            "logprobs": self._logprobs(delta) if body.logprobs and delta.token_ids else None,
            "finish_reason": "tool_calls" if stopped_to_call else delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if body.return_token_ids else None,
        }

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        choice = self.choice(delta)
        if delta.finish_reason is None or "tool_calls" not in choice["delta"]:
            return [choice]
        # OpenAI's client misses the end of a call that comes with the end of the message.
        end: dict[str, Any] = {"delta": {}, "logprobs": None, "token_ids": None}
        return [{**choice, "finish_reason": None, "stop_reason": None}, {**choice, **end}]

    def _message(self, delta: ChoiceDelta) -> dict[str, Any]:
        new = self._new(delta)
        for call in new.get("tool_calls", ()):
            del call["index"]
        content = None if "tool_calls" in new else ""
        return {
            "role": "assistant", "content": content, "refusal": None, "annotations": [], **new,
        }  # fmt: skip

    def _new(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return what is new of a message: content, reasoning and complete calls."""
        found: dict[str, Any] = {}
        if content := "".join(part.content for part in delta.parts):
            found["content"] = content
        if reasoning := "".join(part.reasoning for part in delta.parts):
            found["reasoning_content"] = reasoning
        calls = [part.tool_call for part in delta.parts if part.tool_call is not None]
        if calls:
            before = self._calls[delta.index] - len(calls)
            found["tool_calls"] = [
                {"index": number, **call_entry(call)} for number, call in enumerate(calls, before)
            ]
        return found

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
