"""A conversation: its messages as a prompt, and the parts of the answers that continue it.

The three protocols of conversations differ in names. Each turns its body into a :class:`ChatBody`,
and the turns of a :class:`Conversation` into its own answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from vllm_module.base.messages import shorten
from vllm_module.server.blocks import Block, Blocks, Change
from vllm_module.server.errors import ApiError
from vllm_module.server.generation import ChoiceDelta, Continuation, sampling_params
from vllm_module.server.growing_text import Delta
from vllm_module.server.parsers import Parser
from vllm_module.server.protocol import ChatBody
from vllm_module.server.state import State, new_id
from vllm_module.server.tools import AnswerForm

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXTS = ("text", "input_text", "output_text", "refusal")  # types of parts that are text


class Conversation:
    """One request for the next message of a conversation.

    Attributes:
        generation: the continuation of the prompt.
        prompt_tokens: number of tokens of the prompt.
        calls: number of calls in each choice so far.
        last: the last piece of a choice that has ended.

    """

    def __init__(
        self, form: AnswerForm, prompt: Mapping[str, Any], generation: Continuation
    ) -> None:
        self._form, self._prompt = form, prompt
        self._parsers: dict[int, Parser] = {}
        self.generation = generation
        self.prompt_tokens = len(prompt["prompt_token_ids"])
        self.calls: dict[int, int] = {}
        self.last: ChoiceDelta | None = None

    @staticmethod
    async def begin(state: State, body: ChatBody, kind: str) -> Conversation:
        """Check a request and format its messages. ``kind`` begins the id of the answer."""
        llm = state.engine(body.model)
        form = AnswerForm.of(body, state.formats)
        prompt = await state.chat_prompt(checked_messages(body.messages), body, form.tools)
        prompt |= state.adapter(body.model)
        if body.cache_salt is not None:
            prompt["cache_salt"] = body.cache_salt
        shows_special = form.reads_marks and "skip_special_tokens" not in body.sampling
        params = sampling_params(
            llm,
            body,
            # Without a limit, a message may be as long as the context allows.
            max_tokens=body.max_completion_tokens
            or body.max_tokens
            or llm.llm.model_config.max_model_len,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=form.structured_outputs,
            skip_special_tokens=False if shows_special else None,
        )
        generation = Continuation(
            llm, state.histograms, new_id(kind), [prompt], params, body.stream
        )
        return Conversation(form, prompt, generation)

    async def turns(self) -> AsyncGenerator[tuple[ChoiceDelta, list[Delta]], None]:
        """Yield what is new of each choice, and the parts that its text has become."""
        async with aclosing(self.generation.deltas()) as pieces:
            async for piece in pieces:
                yield piece, self._deltas(piece)

    async def changes(self) -> AsyncGenerator[list[Change], None]:
        """Yield how the blocks of the only choice begin, grow and end.

        The first list comes once the engine has begun, before which it may refuse the request.
        """
        blocks = Blocks()
        async with aclosing(self.turns()) as turns:
            async for _, deltas in turns:
                yield [*blocks.feed(deltas)]
        yield [*blocks.finish()]

    async def blocks(self) -> list[Block]:
        """Return the blocks of the only choice when all have ended."""
        async with aclosing(self.changes()) as found:
            return [block async for changes in found for what, block, _ in changes if what == "end"]

    def _deltas(self, piece: ChoiceDelta) -> list[Delta]:
        parser = self._parsers.get(piece.index)
        if parser is None:
            parser = self._parsers[piece.index] = self._form.parser(self._prompt["prompt"])
        deltas = parser.feed(piece.text)
        if piece.finish_reason is not None:
            self.last = piece
            deltas += parser.finish()
        found = []
        for delta in deltas:
            if delta.tool_call is not None:
                calls = self.calls.get(piece.index, 0)
                if calls == self._form.most_calls:
                    continue
                self.calls[piece.index] = calls + 1
            found.append(delta)
        return found


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
