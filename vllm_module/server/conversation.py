"""A conversation: its messages as a prompt, and the parts of the answers that continue it.

The three protocols of conversations differ in names. Each turns its body into a :class:`ChatBody`,
and the turns of a :class:`Conversation` into its own answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from vllm_module.base.messages import shorten
from vllm_module.server.blocks import Block, Blocks
from vllm_module.server.endpoint import Events
from vllm_module.server.errors import ApiError
from vllm_module.server.generation import ChoiceDelta, Continuation
from vllm_module.server.growing_text import Delta
from vllm_module.server.parsers import Parser
from vllm_module.server.protocol import ChatBody
from vllm_module.server.state import State
from vllm_module.server.tools import AnswerForm

_BEFORE = 4  # tokens of the prompt, on which the text of the first ones after it may depend
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OF_TOOLS = {name: name for name in ("name", "description", "strict")}
_TEXTS = ("text", "input_text", "output_text", "refusal")  # types of parts that are text


class Conversation(Continuation):
    """One request for the next message of a conversation.

    Attributes:
        calls: number of calls in each choice so far.
        reasoning_tokens: number of tokens of reasoning in each choice that has ended.
        last: the last piece of a choice that has ended.

    """

    def __init__(
        self, state: State, body: ChatBody, kind: str, prompt: dict[str, Any], form: AnswerForm
    ) -> None:
        # Without a limit, a message may be as long as the context allows.
        most = state.engine().llm.model_config.max_model_len
        super().__init__(
            state,
            body,
            kind,
            [prompt],
            max_tokens=body.max_completion_tokens or body.max_tokens or most,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=form.structured_outputs,
            skip_special_tokens=False if form.reads_marks else None,
        )
        self._most_calls = form.most_calls
        self._parsers: dict[int, Parser] = defaultdict(lambda: form.parser(prompt["prompt"]))
        self.calls, self.reasoning_tokens = Counter[int](), Counter[int]()
        self.last: ChoiceDelta | None = None

    @staticmethod
    async def begin(state: State, body: ChatBody, kind: str) -> Conversation:
        """Format the messages, which are checked. ``kind`` begins the id of the answer."""
        state.engine(body.model)
        form = AnswerForm.of(body, state.formats)
        prompt = await state.chat_prompt(body.messages, body, form.tools)
        return Conversation(state, body, kind, prompt, form)

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield what is new of each choice, with the parts that its text has become."""
        async with aclosing(super().deltas()) as deltas:
            async for delta in deltas:
                delta.parts = self._parts(delta)
                if delta.finish_reason is not None and self._parsers[delta.index].reasoned:
                    # In a thread, because it decodes the text several times.
                    count = await asyncio.to_thread(self._count_reasoning, delta)
                    self.reasoning_tokens[delta.index] = count
                yield delta

    def usage(self, generated: bool = True) -> dict[str, Any]:
        """Return the counts of tokens, so far; those of reasoning once a choice has ended."""
        details = {"reasoning_tokens": self.reasoning_tokens.total() if generated else 0}
        return {**super().usage(generated), "completion_tokens_details": details}

    def _count_reasoning(self, delta: ChoiceDelta) -> int:
        tokenizer, skips = self.state.tokenizer(), self.params.skip_special_tokens
        before = delta.output.prompt_token_ids[-_BEFORE:]
        begin = len(tokenizer.decode(before, skips))
        (ids,) = [each.token_ids for each in delta.output.outputs if each.index == delta.index]
        return self._parsers[delta.index].reasoning_tokens(
            ids, lambda some: tokenizer.decode([*before, *some], skips)[begin:]
        )

    def _parts(self, delta: ChoiceDelta) -> list[Delta]:
        parser = self._parsers[delta.index]
        parts = parser.feed(delta.text)
        if delta.finish_reason is not None:
            self.last = delta
            parts += parser.finish()
        found = []
        for part in parts:
            if part.tool_call is not None:
                if self.calls[delta.index] == self._most_calls:
                    continue
                self.calls[delta.index] += 1
            found.append(part)
        return found


class BlocksAnswer:
    """The answer to a conversation in blocks, whole or as typed events.

    The methods that raise here are a protocol's own.

    Attributes:
        blocks: those of the only choice.

    """

    def __init__(self, conversation: Conversation) -> None:
        self.conversation, self.blocks = conversation, Blocks()

    async def whole(self) -> dict[str, Any]:
        """Return the answer once it is complete."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self.so_far()

    async def events(self) -> Events:
        """Yield events; none before the engine has begun, which may refuse the request."""
        begin = self.around()
        async with aclosing(self.conversation.deltas()) as deltas:
            async for delta in deltas:
                for event in begin if delta.first else ():
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
    name: str, entries: Iterable[Any], split: Callable[[Any, str], Iterable[Any]] | None = None
) -> list[dict[str, Any]]:
    """Return messages as templates know them; see :func:`checked_message`.

    Args:
        name: of the field.
        entries: of the field.
        split: returns the messages that an entry stands for, of which it is told where it is.

    """
    found = []
    for number, entry in enumerate(entries):
        where = f"{name}[{number}]"
        listed = [entry] if split is None else split(entry, where)
        found += [checked_message(each, where) for each in listed]
    return found


def checked_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message, which a body has at ``where``, as templates know it.

    A developer's message is a system message: most templates know no other. Raises ``ApiError`` for
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
    return {**message, "role": "system" if role == "developer" else role}


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
