"""``/v1/messages``: conversations as Anthropic's clients have them.

Names and events are those of https://docs.claude.com/en/api/messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from vllm_module.base.messages import shorten
from vllm_module.server.blocks import Block
from vllm_module.server.conversation import (
    BlocksAnswer,
    as_function,
    begin,
    checked_messages,
    formatted,
)
from vllm_module.server.endpoint import Answer
from vllm_module.server.errors import ApiError
from vllm_module.server.protocol import (
    ANY,
    ONE_ANSWER,
    ChatBody,
    ConversationBody,
    Entries,
    Listed,
    refused,
)
from vllm_module.server.state import State
from vllm_module.server.tools import Formats

_STOP_REASONS = {"length": "max_tokens"}  # else the end of the model's turn
# Edits that keep all thinking, the default of some clients.
_KEEP_ALL = [
    [{"type": "clear_thinking_20251015", "keep": each}] for each in ("all", {"type": "all"})
]
_CHANGES = {"begin": "start", "more": "delta", "end": "stop"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class Thinking(Entries):
    """Whether the model should reason. All reasoning is shown; its budget is no limit."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: Literal["summarized"] | None = None


class OutputConfig(Entries):
    """How the model should answer."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesBody(ConversationBody):
    """The body of /v1/messages."""

    unsupported = {
        **ONE_ANSWER,
        **refused("compaction", "container", "fallbacks", "inference_geo"),
        "cache_control": ANY,  # pages of equal prefixes are kept without it, too
        "context_management": ({}, {"edits": []}, *({"edits": edits} for edits in _KEEP_ALL)),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
    }
    messages: Listed[dict[str, Any]] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: Any = None
    stop_sequences: Listed[str] = []
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    tool_choice: dict[str, Any] | None = None

    @classmethod
    def told(cls, error: ApiError) -> dict[str, Any]:
        """Return an error in the shape that the Messages API has."""
        kinds = {
            401: "authentication_error", 403: "permission_error", 404: "not_found_error",
            413: "request_too_large", 503: "overloaded_error",
        }  # fmt: skip
        other = "api_error" if error.status >= 500 else "invalid_request_error"
        kind = kinds.get(error.status, other)
        return {"type": "error", "error": {"type": kind, "message": error.message}}


class CountBody(MessagesBody):
    """The body of /v1/messages/count_tokens."""

    max_tokens: int = Field(default=1, ge=1)


async def count_tokens(state: State, body: CountBody) -> dict[str, int]:
    """Return how many tokens a conversation has as a prompt; nothing is computed."""
    prompt, _ = await formatted(state, _chat_body(body, _switch(body.thinking, state.formats)))
    return {"input_tokens": len(prompt["prompt_token_ids"])}


async def messages(state: State, body: MessagesBody) -> Answer:
    """Answer a conversation."""
    chat = _chat_body(body, _switch(body.thinking, state.formats))
    answer = _Answer(await begin(state, chat, "msg"))
    return answer.events() if body.stream else await answer.whole()


def _switch(thinking: Thinking | None, formats: Formats) -> dict[str, bool]:
    """Return the variable of the template that lets the model reason, or not, as is wanted.

    A model whose template has none does what it always does: what is allowed to reason need not.
    Raises ``ApiError`` if it always reasons, and should not.
    """
    if thinking is None:
        return {}
    if formats.switch is not None:
        return {formats.switch: thinking.type != "disabled"}
    if thinking.type == "disabled" and formats.reasons:
        message = "thinking cannot be disabled: by its chat template, this model always reasons"
        raise ApiError(400, message, "thinking", "unsupported")
    return {}


def _chat_body(body: MessagesBody, variables: Mapping[str, Any] | None = None) -> ChatBody:
    """Return the request in OpenAI's words, with these variables of the template."""
    choice = body.tool_choice or {"type": "auto"}
    kind = choice.get("type")
    chosen: Any = {"any": "required", "auto": "auto", "none": "none"}.get(str(kind))
    if kind == "tool":
        chosen = {"type": "function", "function": {"name": choice.get("name")}}
    if chosen is None:
        refusal = f"tool_choice.type should be auto, any, tool or none, got {shorten(kind)}"
        raise ApiError(400, refusal, "tool_choice")
    listed = checked_messages("messages", body.messages, _messages, body.system)
    last = listed[-1] if listed else {}
    return body.as_chat(
        body.output_config.format,
        reasoning_effort=body.output_config.effort,
        chat_template_kwargs=dict(variables or {}),
        messages=listed,
        # The Messages API continues a text; calls wait for their results.
        continue_final_message=last.get("role") == "assistant" and "tool_calls" not in last,
        max_tokens=body.max_tokens,
        tools=[as_function(tool, (None, "custom"), "input_schema") for tool in body.tools],
        tool_choice=chosen,
        parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
        **({"stop": body.stop_sequences} if body.stop_sequences else {}),
    )


def _messages(message: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield the messages that one of this API stands for: results of tools are their own.

    Templates decide which reasoning they write: most do that of the turn that goes on.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for at, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append({"type": "text", "text": block.get("text")})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = block.get("content", "")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind not in ("thinking", "redacted_thinking"):
            what = "is not supported: only text, calls and their results are, got type"
            raise ApiError(400, f"{where}.content[{at}] {what} {shorten(kind)}", "messages")
    if texts or calls or not content:
        own: dict[str, Any] = {"role": role, "content": texts}
        if thoughts:
            own["reasoning_content"] = "\n".join(thoughts)
        yield {**own, "tool_calls": calls} if calls else own


class _Answer(BlocksAnswer):
    """The message that answers one request."""

    def so_far(self) -> dict[str, Any]:
        content = [_block(block, block.text) for block in self.blocks.ended]
        if self.conversation.last is not None and not content:
            content.append({"type": "text", "text": "", "citations": None})
        return {
            "id": self.conversation.name,
            "type": "message",
            "role": "assistant",
            "model": self.conversation.body.model,
            "content": content,
            **self._stop(),
            **dict.fromkeys(("stop_details", "container")),
            "usage": self._usage(),
        }

    def around(self) -> list[dict[str, Any]]:
        if self.conversation.last is None:
            return [{"type": "message_start", "message": self.so_far()}]
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return [delta, {"type": "message_stop"}]

    def changed(self, what: str, block: Block, text: str) -> list[dict[str, Any]]:
        event: dict[str, Any] = {"type": f"content_block_{_CHANGES[what]}", "index": block.number}
        if what == "begin":
            event["content_block"] = _block(block, "")
        elif what == "more":
            kind, key = _DELTAS[block.kind]
            event["delta"] = {"type": kind, key: text}
        return [event]

    def _usage(self) -> dict[str, Any]:
        counts = self.conversation.usage()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        thinking = counts["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": len(self.conversation.prompts[0]["prompt_token_ids"]) - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": thinking},
            **dict.fromkeys(("cache_creation", "server_tool_use", "inference_geo")),
            "service_tier": "standard",
        }

    def _stop(self) -> dict[str, Any]:
        """Return the reason and the sequence at which the message stopped, and its weights."""
        last, reason, sequence = self.conversation.last, None, None
        weights: dict[str, Any] = {}
        if last is not None:
            weights["weight_versions"] = last.weight_versions
            reason = _STOP_REASONS.get(str(last.finish_reason), "end_turn")
            if isinstance(last.stop_reason, str):
                reason, sequence = "stop_sequence", last.stop_reason
            elif self.conversation.calls and last.finish_reason == "stop":
                reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence, **weights}


def _block(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": text, "citations": None}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    assert block.call is not None
    return {
        "type": "tool_use", "id": f"toolu_{block.key[:9]}", "name": block.call.name,
        "input": json.loads(text) if text else {}, "caller": {"type": "direct"},
    }  # fmt: skip
