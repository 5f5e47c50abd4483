"""A conversation: its messages as a prompt, and the parts of the answers that continue it.

The three protocols of conversations differ in names. Each turns its body into a :class:`ChatBody`,
and the turns of a :class:`Conversation` into its own answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from vllm_module.base.messages import shorten
from vllm_module.server.blocks import Blocks, Change
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
        blocks: those of the only choice, while :meth:`changes` runs.

    """

    def __init__(
        self, state: State, body: ChatBody, kind: str, prompt: dict[str, Any], form: AnswerForm
    ) -> None:
        shows_special = form.reads_marks and "skip_special_tokens" not in body.sampling
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
            skip_special_tokens=False if shows_special else None,
        )
        self._form = form
        self._parsers: dict[int, Parser] = {}
        self.calls: dict[int, int] = {}
        self.reasoning_tokens: dict[int, int] = {}
        self.last: ChoiceDelta | None = None
        self.blocks = Blocks()

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
        count = sum(self.reasoning_tokens.values()) if generated else 0
        return {
            **super().usage(generated), "completion_tokens_details": {"reasoning_tokens": count},
        }  # fmt: skip

    async def changes(self) -> AsyncGenerator[Change | None, None]:
        """Yield how the blocks of the only choice begin, grow and end.

        ``None`` comes first, once the engine has begun, before which it may refuse the request.
        """
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                if delta.first:
                    yield None
                for change in self.blocks.feed(delta.parts):
                    yield change
        for change in self.blocks.finish():
            yield change

    def _count_reasoning(self, delta: ChoiceDelta) -> int:
        tokenizer, skips = self.state.tokenizer(), self.params.skip_special_tokens
        before = delta.output.prompt_token_ids[-_BEFORE:]
        begin = len(tokenizer.decode(before, skips))
        (ids,) = [each.token_ids for each in delta.output.outputs if each.index == delta.index]
        return self._parsers[delta.index].reasoning_tokens(
            ids, lambda some: tokenizer.decode([*before, *some], skips)[begin:]
        )

    def _parts(self, delta: ChoiceDelta) -> list[Delta]:
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self._form.parser(self.prompts[0]["prompt"])
        parts = parser.feed(delta.text)
        if delta.finish_reason is not None:
            self.last = delta
            parts += parser.finish()
        found = []
        for part in parts:
            if part.tool_call is not None:
                calls = self.calls.get(delta.index, 0)
                if calls == self._form.most_calls:
                    continue
                self.calls[delta.index] = calls + 1
            found.append(part)
        return found


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates know them; see :func:`checked_message`."""
    return [checked_message(each, f"messages[{number}]") for number, each in enumerate(messages)]


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
