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
    body.messages = checked_messages("messages", body.messages)
    answer = _Messages(body, await Conversation.begin(state, body, "chatcmpl"))
    return answer.events() if body.stream else await answer.whole()


class _Messages(ChoicesAnswer[ChatBody]):
    """Messages, each a choice."""

    kinds = ("chat.completion", "chat.completion.chunk")
    _generation: Conversation

    def beside(self, delta: ChoiceDelta) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": delta.output.prompt_token_ids}

    def begin(self, delta: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def told(self, delta: ChoiceDelta) -> dict[str, Any]:
        message, calls = self._message(delta), self._generation.calls[delta.index]
        told: dict[str, Any] = {
            "delta" if self.body.stream else "message": message,
            "logprobs": None,
        }
        if self.body.logprobs and delta.token_ids:
            told["logprobs"] = self._logprobs(delta)
        if calls and delta.finish_reason == "stop":
            told["finish_reason"] = "tool_calls"
        return told

    def chunks(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        if choice["finish_reason"] is None or "tool_calls" not in choice["delta"]:
            return [choice]
        # OpenAI's client misses the end of a call that comes with the end of the message.
        end: dict[str, Any] = {"delta": {}, "logprobs": None, "token_ids": None}
        return [{**choice, "finish_reason": None, "stop_reason": None}, {**choice, **end}]

    def _message(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the message, or what is new of it: content, reasoning and complete calls."""
        calls = [call_entry(part.tool_call) for part in delta.parts if part.tool_call is not None]
        if self.body.stream:
            before = self._generation.calls[delta.index] - len(calls)
            calls = [{"index": number, **call} for number, call in enumerate(calls, before)]
        parts = {
            "content": "".join(part.content for part in delta.parts),
            "reasoning_content": "".join(part.reasoning for part in delta.parts),
            "tool_calls": calls,
        }
        new = {name: part for name, part in parts.items() if part}
        if self.body.stream:
            return new
        content = None if calls else ""
        return {
            "role": "assistant", "content": content, "refusal": None, "annotations": [], **new,
        }  # fmt: skip

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any]:
        as_id, count = self.body.return_tokens_as_token_ids, self.body.top_logprobs or 0

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
