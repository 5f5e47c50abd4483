"""``/v1/responses``: conversations as items, in the words of Open Responses.

Names and events are those of https://www.openresponses.org. Nothing is stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from vllm_module.base.messages import shorten
from vllm_module.server.blocks import Block
from vllm_module.server.conversation import BlocksAnswer, as_function, begin, checked_messages
from vllm_module.server.endpoint import Answer
from vllm_module.server.errors import ApiError
from vllm_module.server.generation import Continuation
from vllm_module.server.protocol import ONE_ANSWER, ChatBody, ConversationBody, Entries, refused
from vllm_module.server.state import State

# Entries of a response: those of the request, of its parameters, and others that are null.
_ECHOED = {
    "model", "instructions", "parallel_tool_calls", "reasoning", "metadata", "max_output_tokens",
}  # fmt: skip
_SAMPLED = {"temperature", "top_p", "presence_penalty", "frequency_penalty"}
_UNSET = (
    "completed_at", "incomplete_details", "usage",  # until the end
    "previous_response_id", "error", "max_tool_calls", "safety_identifier", "prompt_cache_key",
)  # fmt: skip
_INCOMPLETE = {"length": "max_output_tokens"}
_EVENTS = {"text": "output_text", "reasoning": "reasoning", "call": "function_call_arguments"}


class TextOptions(Entries):
    """What the text should be like; ``medium`` asks for nothing."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Entries):
    """How the model should reason; ``auto`` leaves it to the server how that is shown."""

    effort: str | None = None
    summary: Literal["auto"] | None = None


class ResponsesBody(ConversationBody):
    """The body of /v1/responses."""

    unsupported = {
        **{name: values for name, values in ONE_ANSWER.items() if name != "metadata"},
        "store": (True, False),  # nothing is stored, and the answer says so
        "background": (False,),
        "include": ([],),
        **refused(
            "max_tool_calls",
            "previous_response_id",
            "conversation",
            "prompt",
            "access_programs",
            "background_options",
            "context_management",
            "image",
        ),
        "top_logprobs": (0,),
        "truncation": ("disabled", "auto"),
    }
    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    metadata: dict[str, Any] = {}

    @classmethod
    def told_within(cls, error: ApiError, number: int) -> dict[str, Any]:
        """Return an error as Open Responses has it in a stream."""
        return {"type": "error", "sequence_number": number, **cls.told(error)}


async def responses(state: State, body: ResponsesBody) -> Answer:
    """Answer a conversation."""
    answer = _Answer(body, await begin(state, _chat_body(body), "resp"))
    return answer.events() if body.stream else await answer.whole()


def _chat_body(body: ResponsesBody) -> ChatBody:
    """Return the request in the words of chat completions."""
    items = body.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    elif not isinstance(items, list):
        message = f"input should be text or a list of items, got {shorten(items)}"
        raise ApiError(400, message, "input")
    choice = body.tool_choice
    if isinstance(choice, Mapping) and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    messages = _joined(checked_messages("input", items, _messages, body.instructions))
    if not messages:
        raise ApiError(400, "input has no message: give text or items", "input")
    return body.as_chat(
        body.text.format,
        messages=messages,
        max_tokens=body.max_output_tokens,
        tools=[as_function(tool, ("function",), "parameters") for tool in body.tools],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort,
    )


def _messages(item: object, where: str) -> Iterator[dict[str, Any]]:
    """Yield the message that an item stands for; reasoning is of the message after it."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if isinstance(item, Mapping) and kind == "message":
        yield {"role": item.get("role"), "content": item.get("content")}
    elif isinstance(item, Mapping) and kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        yield {"role": "assistant", "content": None, "tool_calls": [call]}
    elif isinstance(item, Mapping) and kind == "function_call_output":
        yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    elif isinstance(item, Mapping) and kind == "reasoning":
        content = item.get("content")
        parts = [p for p in content if isinstance(p, Mapping)] if isinstance(content, list) else []
        if texts := [part["text"] for part in parts if isinstance(part.get("text"), str)]:
            yield {"role": "assistant", "content": None, "reasoning_content": "\n".join(texts)}
    else:
        what = "is not supported: only messages, function calls and their outputs are, got"
        raise ApiError(400, f"{where} {what} {shorten(item if kind is None else kind)}", "input")


def _joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of which those of one turn, a text with its calls, are one.

    Reasoning is in the message that follows it, unless that is not the assistant's.
    """
    found: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for each in messages:
        if each.keys() == {"role", "content", "reasoning_content"} and each["content"] is None:
            thoughts.append(each["reasoning_content"])
            continue
        before = found[-1] if found else {}
        calls = [*before.get("tool_calls", ()), *each.get("tool_calls", ())]
        same = before.get("role") == each["role"] == "assistant"
        texts = [own["content"] for own in (before, each) if own.get("content") is not None]
        joins = same and calls and len(texts) < 2
        if joins and "reasoning_content" in before:
            thoughts.insert(0, before["reasoning_content"])
        if thoughts and each["role"] == "assistant":
            each = {**each, "reasoning_content": "\n".join(thoughts)}
        thoughts = []
        if joins:
            content = texts[0] if texts else None
            found[-1] = {**before, **each, "content": content, "tool_calls": calls}
        else:
            found.append(each)
    return found


class _Answer(BlocksAnswer):
    """The response to one request."""

    def __init__(self, body: ResponsesBody, conversation: Continuation) -> None:
        super().__init__(conversation)
        self._body, self._created, self._number = body, int(time.time()), 0

    def around(self) -> list[dict[str, Any]]:
        response = self.so_far()
        status = response["status"]
        kinds = ["created", status] if status == "in_progress" else [status]
        return [self._event(f"response.{kind}", response=response) for kind in kinds]

    def _event(self, kind: str, **entries: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **entries}

    def changed(self, what: str, block: Block, text: str) -> Iterator[dict[str, Any]]:
        is_call, name = block.kind == "call", _EVENTS[block.kind]
        at = {"output_index": block.number}
        where = {**at, "item_id": _id(block), **({} if is_call else {"content_index": 0})}
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if what == "begin":
            item = _item(block, "in_progress")
            yield self._event("response.output_item.added", item=item, **at)
            if not is_call:
                yield self._event("response.content_part.added", part=_part(block, ""), **where)
        elif what == "more":
            yield self._event(f"response.{name}.delta", delta=text, **where, **logprobs)
        else:
            whole = {"arguments" if is_call else "text": block.text}
            yield self._event(f"response.{name}.done", **whole, **where, **logprobs)
            if not is_call:
                part = _part(block, block.text)
                yield self._event("response.content_part.done", part=part, **where)
            item = _item(block, self._status(block))
            yield self._event("response.output_item.done", item=item, **at)

    def _status(self, block: Block) -> str:
        """Return the status of an item that has ended: complete, or cut off by the end."""
        last = self.conversation.last
        is_cut = block.is_last and last is not None and last.finish_reason != "stop"
        return "incomplete" if is_cut else "completed"

    def so_far(self) -> dict[str, Any]:
        """Return the response; it is in progress until its last piece has come."""
        body, conversation, ended = self._body, self.conversation, dict[str, Any]()
        if (last := conversation.last) is not None:
            ended = {"usage": _usage(conversation.usage()), "weight_versions": last.weight_versions}
            if last.finish_reason == "stop":
                ended.update(status="completed", completed_at=int(time.time()))
            else:
                reason = _INCOMPLETE.get(str(last.finish_reason), last.finish_reason)
                ended.update(status="incomplete", incomplete_details={"reason": reason})
        return {
            "id": conversation.name,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress",
            "output": [_item(block, self._status(block)) for block in self.blocks.ended],
            **body.model_dump(include=_ECHOED),
            "text": {"format": {"type": "text"}, **body.text.model_dump(exclude_none=True)},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [
                {"description": None, "parameters": None, "strict": None, **tool}
                for tool in body.tools
            ],
            **conversation.params.model_dump(include=_SAMPLED),
            "truncation": "disabled",
            "top_logprobs": 0,
            "store": False,
            "background": False,
            "service_tier": "default",
            **dict.fromkeys(_UNSET),
            **ended,
        }


def _usage(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return counts of tokens under the names of the protocol."""
    return {
        name.replace("prompt", "input").replace("completion", "output"): count
        for name, count in counts.items()
    }


def _id(block: Block) -> str:
    prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
    return f"{prefix}-{block.key}"


def _item(block: Block, status: str) -> dict[str, Any]:
    """Return an item of the output; without its text while it is in progress."""
    head = {"id": _id(block), "status": status}
    if block.call is not None:
        return {
            **head, "type": "function_call", "call_id": f"call_{block.key[:9]}",
            "name": block.call.name, "arguments": block.text,
        }  # fmt: skip
    content = [] if status == "in_progress" else [_part(block, block.text)]
    if block.kind == "reasoning":
        return {**head, "type": "reasoning", "summary": [], "content": content}
    return {**head, "type": "message", "role": "assistant", "content": content}


def _part(block: Block, text: str) -> dict[str, Any]:
    """Return the content of an item of text or reasoning."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
