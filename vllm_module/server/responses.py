"""``/v1/responses``: conversations as items, in the words of Open Responses.

Names and events are those of https://www.openresponses.org. Nothing is stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from typing import Any, Literal

from pydantic import Field

from vllm_module.base.messages import shorten
from vllm_module.server.blocks import Block
from vllm_module.server.conversation import Conversation, as_function, checked_message
from vllm_module.server.endpoint import Answer, Events
from vllm_module.server.errors import ApiError
from vllm_module.server.protocol import ONE_ANSWER, ChatBody, ConversationBody, Entries, refused
from vllm_module.server.state import State

_NEVER = (
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
        **refused("max_tool_calls", "previous_response_id", "conversation", "prompt"),
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
    answer = _Answer(body, await Conversation.begin(state, _chat_body(body), "resp"))
    return answer.events() if body.stream else await answer.whole()


def _chat_body(body: ResponsesBody) -> ChatBody:
    """Return the request in the words of chat completions."""
    listed = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        listed.append({"role": "user", "content": body.input})
    elif isinstance(body.input, list):
        for number, item in enumerate(body.input):
            where = f"input[{number}]"
            listed += [checked_message(each, where) for each in _messages(item, where)]
    else:
        message = f"input should be text or a list of items, got {shorten(body.input)}"
        raise ApiError(400, message, "input")
    choice = body.tool_choice
    if isinstance(choice, Mapping) and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    return body.as_chat(
        body.text.format,
        messages=listed,
        max_tokens=body.max_output_tokens,
        tools=[as_function(tool, ("function",), "parameters") for tool in body.tools],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort,
    )


def _messages(item: object, where: str) -> Iterator[dict[str, Any]]:
    """Yield the message that an item stands for; reasoning stands for none."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if isinstance(item, Mapping) and kind == "message":
        yield {"role": item.get("role"), "content": item.get("content")}
    elif isinstance(item, Mapping) and kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        yield {"role": "assistant", "content": None, "tool_calls": [call]}
    elif isinstance(item, Mapping) and kind == "function_call_output":
        yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    elif kind != "reasoning":
        what = "is not supported: only messages, function calls and their outputs are, got"
        raise ApiError(400, f"{where} {what} {shorten(item if kind is None else kind)}", "input")


class _Answer:
    """The response to one request, whole or as events."""

    def __init__(self, body: ResponsesBody, conversation: Conversation) -> None:
        self._body, self._conversation = body, conversation
        self._created = int(time.time())
        self._number = 0

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self.events()) as events:
            *_, last = [event async for event in events]
        return dict(last["response"])

    async def events(self) -> Events:
        begin = [
            self._event(f"response.{kind}", response=self._response())
            for kind in ("created", "in_progress")
        ]
        async with aclosing(self._conversation.changes()) as changes:
            async for change in changes:
                for event in begin if change is None else self._changes(*change):
                    yield event
        response = self._response()
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **entries: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **entries}

    def _changes(self, what: str, block: Block, text: str) -> Iterator[dict[str, Any]]:
        """Yield the events that tell of a change of an item."""
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
            item = _item(block, "completed")
            yield self._event("response.output_item.done", item=item, **at)

    def _response(self) -> dict[str, Any]:
        """Return the response so far; it is in progress until its last piece has come."""
        body, conversation = self._body, self._conversation
        piece, params, usage = conversation.last, conversation.params, conversation.usage()
        whole = piece is not None and piece.finish_reason == "stop"
        return {
            "id": conversation.name,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if piece is not None else None,
            "status": "in_progress" if piece is None else "completed" if whole else "incomplete",
            "incomplete_details": None
            if piece is None or whole
            else {"reason": _INCOMPLETE.get(str(piece.finish_reason), piece.finish_reason)},
            "model": body.model,
            "instructions": body.instructions,
            "output": [_item(block, "completed") for block in conversation.blocks.ended],
            "tools": [
                {"description": None, "parameters": None, "strict": None, **tool}
                for tool in body.tools
            ],
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "truncation": "disabled",
            "parallel_tool_calls": body.parallel_tool_calls,
            "text": {"format": {"type": "text"}, **body.text.model_dump(exclude_none=True)},
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "top_logprobs": 0,
            "temperature": params.temperature,
            "reasoning": body.reasoning.model_dump(),
            "usage": None
            if piece is None
            else {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens_details": usage["completion_tokens_details"],
            },
            "max_output_tokens": body.max_output_tokens,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": body.metadata,
            **dict.fromkeys(_NEVER),
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
