"""A conversation: its messages as a prompt, and the parts of the answers that continue it.

The three protocols of conversations differ in names. Each turns its body into a :class:`ChatBody`,
and what continues it into its own answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from vllm_module.base.messages import shorten
from vllm_module.server.blocks import Block, Blocks
from vllm_module.server.endpoint import Events
from vllm_module.server.errors import ApiError
from vllm_module.server.generation import Continuation
from vllm_module.server.protocol import ChatBody
from vllm_module.server.state import State
from vllm_module.server.tools import AnswerForm

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OF_TOOLS = {name: name for name in ("name", "description", "strict")}
_TEXTS = ("text", "input_text", "output_text", "refusal")  # types of parts that are text


async def formatted(state: State, body: ChatBody) -> tuple[dict[str, Any], AnswerForm]:
    """Return a conversation, whose messages are checked, as a prompt, and the answer's form."""
    state.engine(body.model)  # another model is refused first
    form = AnswerForm.of(body, state.formats)
    return await state.chat_prompt(body.messages, body, form.tools), form


async def begin(state: State, body: ChatBody, kind: str) -> Continuation:
    """Return the continuation of a conversation; ``kind`` begins the id of the answer."""
    prompt, form = await formatted(state, body)
    return Continuation(
        state,
        body,
        kind,
        [prompt],
        form,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_outputs=form.structured_outputs,
        skip_special_tokens=False if form.reads_marks else None,
    )


class BlocksAnswer:
    """The answer to a conversation in blocks, whole or as typed events.

    The methods that raise here are a protocol's own.

    Attributes:
        blocks: those of the only choice.

    """

    def __init__(self, conversation: Continuation) -> None:
        self.conversation, self.blocks = conversation, Blocks()

    async def whole(self) -> dict[str, Any]:
        """Return the answer once it is complete."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self.so_far()

    async def events(self) -> Events:
        """Yield events; none before the engine has begun, which may refuse the request."""
        first = self.around()
        async with aclosing(self.conversation.deltas()) as deltas:
            async for delta in deltas:
                for event in first if delta.first else ():
                    yield event
                for change in self.blocks.feed(delta.parts, delta.finish_reason is not None):
                    for event in self.changed(*change):
                        yield event
        for event in self.around():
            yield event

    def so_far(self) -> dict[str, Any]:
        """Return the answer so far."""
        raise NotImplementedError

    def around(self) -> list[dict[str, Any]]:
        """Return the events before all blocks; once the conversation has ended, those after."""
        raise NotImplementedError

    def changed(self, what: str, block: Block, text: str) -> Iterable[dict[str, Any]]:
        """Return the events that tell of a change of a block."""
        raise NotImplementedError


def checked_messages(
    name: str,
    entries: Iterable[Any],
    split: Callable[[Any, str], Iterable[Any]] = lambda entry, _: [entry],
    system: Any = None,
) -> list[dict[str, Any]]:
    """Return messages as templates know them; see :func:`_checked`.

    Args:
        name: of the field.
        entries: of the field.
        split: returns the messages that an entry stands for, of which it is told where it is.
        system: content of a system message before them.

    """
    found = []
    if system is not None:
        found.append(_checked({"role": "system", "content": system}, "system"))
    for number, entry in enumerate(entries):
        where = f"{name}[{number}]"
        found += [_checked(each, where) for each in split(entry, where)]
    return found


def _checked(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message, which a body has at ``where``, as templates know it.

    A developer's message is a system message: most templates know no other. Entries that are null
    are left out, and so are calls of which there are none: templates ask whether there are any by
    the name. Of the content they ask whether it is null, as DeepSeek's. Raises ``ApiError`` for
    roles and parts that are not supported.
    """
    role, content = message.get("role"), message.get("content")

    def refusal(what: str) -> ApiError:
        return ApiError(400, f"{where}.{what}", where.partition("[")[0])

    if role not in _ROLES:
        raise refusal(f"role should be one of {', '.join(_ROLES)}, got {shorten(role)}")
    if not isinstance(content, (str, list, type(None))):
        raise refusal(f"content should be text or a list of parts, got {shorten(content)}")
    for at, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXTS:
            what = shorten(part) if kind is None else f"type {shorten(kind)}"
            raise refusal(f"content[{at}] is not supported: only parts of text are, got {what}")
    entries = {key: each for key, each in message.items() if each is not None or key == "content"}
    if entries.get("tool_calls") == []:
        del entries["tool_calls"]
    return {**entries, "role": "system" if role == "developer" else role}


def as_function(tool: Mapping[str, Any], kinds: Collection[Any], schema: str) -> dict[str, Any]:
    """Return a tool of one of these types as chat completions have it.

    ``schema`` is the name under which it has the schema of its arguments.
    """
    if (kind := tool.get("type")) not in kinds:
        message = f"a tool of type {shorten(kind)} is not supported: give functions"
        raise ApiError(400, message, "tools")
    names = {**_OF_TOOLS, schema: "parameters"}
    function = {names[key]: tool[key] for key in names if key in tool}
    return {"type": "function", "function": function}
