"""``/v1/completions`` and ``/v1/chat/completions``: answers of choices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from itertools import zip_longest
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import Field

from vllm_module.runtime.outputs import RequestOutput
from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.server.conversation import begin, checked_messages
from vllm_module.server.endpoint import Answer, Events
from vllm_module.server.errors import ApiError
from vllm_module.server.generation import ChoiceDelta, Continuation
from vllm_module.server.protocol import COMMON, ChatBody, GenerationBody, StreamOptions
from vllm_module.server.state import State
from vllm_module.server.tools import call_entry

_Body = TypeVar("_Body", bound=GenerationBody)
_FEW = 100  # tokens whose logprobs are written at once
_LEAST = -9999.0  # JSON has no infinity
# What makes a chunk worth sending.
_SHOWN = ("text", "delta", "logprobs", "finish_reason", "token_ids")


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    unsupported = {**COMMON, "suffix": ("",), "best_of": (1,)}
    prompt: Any
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool = False
    add_special_tokens: bool | None = None
    logprobs: int | None = Field(default=None, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0)


async def completions(state: State, body: CompletionBody) -> Answer:
    """Continue prompts; with ``echo``, answer with the prompt's text and logprobs, too."""
    most = state.engine(body.model).llm.model_config.max_model_len
    if isinstance(body.prompt, list) and len(body.prompt) > max(most, state.max_prompts):
        # Without a look at each entry, for which the other requests would wait.
        message = f"prompt has {len(body.prompt)} entries: expected at most {state.max_prompts} "
        raise ApiError(400, f"{message}prompts, or {most} tokens of one", "prompt")
    prompts = await state.prompts("prompt", body.prompt, body.add_special_tokens)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens should be 1 or more, or 0 with echo", "max_tokens")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "an answer with prompt_logprobs is not streamed", "prompt_logprobs")
    counts = [body.prompt_logprobs, body.logprobs if body.echo else None]
    generation = Continuation(
        state,
        body,
        "cmpl",
        prompts,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max((each for each in counts if each is not None), default=None),
    )
    answer = _Completions(body, generation)
    return answer.events() if body.stream else await answer.whole()


async def chat_completions(state: State, body: ChatBody) -> Answer:
    """Answer a conversation."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    body.messages = checked_messages("messages", body.messages)
    answer = _Messages(body, await begin(state, body, "chatcmpl"))
    return answer.events() if body.stream else await answer.whole()


class _Choices(Generic[_Body]):
    """The answer to a request in which OpenAI's clients find choices, whole or as chunks.

    Args:
        body: the request.
        generation: what is answered.

    Attributes:
        kinds: the protocol's names of a whole answer and of a chunk.
        uncounted: what a chunk has in place of ``usage`` if the request does not ask for it.

    """

    kinds: ClassVar[tuple[str, str]]
    uncounted: ClassVar[dict[str, Any]] = {}

    def __init__(self, body: _Body, generation: Continuation) -> None:
        self.body, self._generation = body, generation
        self._head = {
            "id": generation.name,
            "object": self.kinds[body.stream],
            "created": int(time.time()),
            "model": body.model or generation.state.names[0],
        }

    async def whole(self) -> dict[str, Any]:
        """Return all choices."""
        choices, beside = [], dict[str, Any]()
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                choices.append(await self._choice(delta))
                beside = self.beside(delta)
        choices.sort(key=lambda choice: choice["index"])
        usage = self._generation.usage()
        return {**self._head, **beside, "choices": choices, "usage": usage}

    async def events(self) -> Events:
        """Yield chunks, and the counts of tokens if the request asks for them."""
        usage, options = self._generation.usage, self.body.stream_options or StreamOptions()
        counted = options.include_usage and options.continuous_usage_stats
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if delta.first and (begin := self.begin(delta)) is not None:
                    counts = {"usage": usage(generated=False)} if counted else self.uncounted
                    yield {**self._head, **self.beside(delta), "choices": [begin], **counts}
                for choice in self.chunks(await self._choice(delta)):
                    if any(map(choice.get, _SHOWN)):
                        counts = {"usage": usage()} if counted else self.uncounted
                        yield {**self._head, "choices": [choice], **counts}
        if options.include_usage:
            yield {**self._head, "choices": [], "usage": usage()}

    async def _choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the choice of a whole answer or of a chunk."""
        choice = {
            "index": delta.index,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if self.body.return_token_ids else None,
            **({"weight_versions": delta.weight_versions} if delta.finish_reason else {}),
        }
        entries = len(delta.logprobs) + delta.first * len(delta.output.prompt_logprobs or ())
        if entries > _FEW:  # other requests are answered meanwhile
            await asyncio.to_thread(self.fill, choice, delta)
        else:
            self.fill(choice, delta)
        return choice

    def fill(self, choice: dict[str, Any], delta: ChoiceDelta) -> None:
        """Add what a choice of the protocol has beside what every choice has, or instead."""
        raise NotImplementedError

    def chunks(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the choices of the chunks that a choice is told in."""
        return [choice]

    def begin(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """Return a choice that is told before the first one has anything."""
        return None

    def beside(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return what a whole answer, or the chunk that begins, has beside its choices."""
        return {}


class _Completions(_Choices[CompletionBody]):
    """Texts, with the prompt's if it is echoed."""

    kinds = ("text_completion", "text_completion")
    uncounted: ClassVar = {"usage": None}

    def __init__(self, body: CompletionBody, generation: Continuation) -> None:
        super().__init__(body, generation)
        self._offsets: dict[int, int] = {}  # where the next token of a choice begins
        self._shown: dict[int, dict[str, Any]] = {}  # of each prompt

    def fill(self, choice: dict[str, Any], delta: ChoiceDelta) -> None:
        body, number = self.body, delta.index // self._generation.params.n
        if delta.first and number not in self._shown:  # once for all of its choices
            self._shown[number] = self._of_prompt(delta.output)
        shown = self._shown[number] if delta.first else {}
        choice["text"] = shown.get("text", "") + delta.text
        if body.logprobs is not None:
            rows, offset = shown.get("rows", ([], self._offsets.get(delta.index, 0)))
            own = zip(delta.token_ids, delta.logprobs, strict=True)
            more, self._offsets[delta.index] = self._rows(own, offset)
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            lists = zip(*rows, *more, strict=True) if rows or more else ([] for _ in names)
            choice["logprobs"] = dict(zip(names, map(list, lists), strict=True))
        if body.max_tokens == 0:  # the engine has generated one all the same
            choice.update(finish_reason="length", stop_reason=None)
        if body.return_token_ids and delta.first:
            choice["prompt_token_ids"] = delta.output.prompt_token_ids
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = shown["prompt_logprobs"]

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Return what choices show of their prompt: text and logprobs, if they are wanted."""
        body, ids, known = self.body, output.prompt_token_ids, output.prompt_logprobs or ()
        shown: dict[str, Any] = {}
        # An output that has ended early has none of some tokens.
        if body.prompt_logprobs is not None:
            listed = zip(ids, known, strict=False)
            shown["prompt_logprobs"] = [_entries(*each, body.prompt_logprobs) for each in listed]
        if body.echo:
            shown["text"] = self._decode(ids) if output.prompt is None else output.prompt
            if body.logprobs is not None:
                shown["rows"] = self._rows(zip_longest(ids, known), 0)
        return shown

    def _decode(self, ids: list[int]) -> str:
        return self._generation.state.tokenizer().decode(ids)

    def _rows(
        self, entries: Iterable[tuple[int, Mapping[int, Logprob] | None]], offset: int
    ) -> tuple[list[tuple[Any, ...]], int]:
        """Return what the lists have of each token, and where the text after them begins."""
        as_id, count = self.body.return_tokens_as_token_ids, self.body.logprobs or 0
        rows: list[tuple[Any, ...]] = []
        for token, entry in entries:
            if entry is None:  # the first token of a prompt, or not computed
                text = f"token_id:{token}" if as_id else self._decode([token])
                rows.append((text, None, None, offset))
            else:
                text = _token_text(token, entry[token], as_id=as_id)
                top: dict[str, float] = {}
                for other, logprob in _most(entry, token, count):
                    # Of two tokens of one text, the first counts.
                    top.setdefault(_token_text(other, logprob, as_id=as_id), _bounded(logprob))
                rows.append((text, _bounded(entry[token]), top, offset))
            offset += len(text)
        return rows, offset


class _Messages(_Choices[ChatBody]):
    """Messages, each a choice."""

    kinds = ("chat.completion", "chat.completion.chunk")

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

    def fill(self, choice: dict[str, Any], delta: ChoiceDelta) -> None:
        choice["delta" if self.body.stream else "message"] = self._message(delta)
        if self.body.logprobs and delta.token_ids:
            choice["logprobs"] = self._logprobs(delta)
        if delta.finish_reason == "stop" and self._generation.calls[delta.index]:
            choice["finish_reason"] = "tool_calls"

    def chunks(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        if choice["finish_reason"] is None or "tool_calls" not in choice["delta"]:
            return [choice]
        # OpenAI's client misses the end of a call that comes with the end of the message.
        end: dict[str, Any] = {"delta": {}, "logprobs": None, "token_ids": None}
        return [{**choice, "finish_reason": None, "stop_reason": None}, {**choice, **end}]

    def _message(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the message, or what is new of it: content, reasoning and complete calls."""
        new: dict[str, Any] = {}
        if content := "".join(part.content for part in delta.parts):
            new["content"] = content
        if reasoning := "".join(part.reasoning for part in delta.parts):
            new["reasoning_content"] = reasoning
        calls = [call_entry(part.tool_call) for part in delta.parts if part.tool_call is not None]
        if calls and self.body.stream:
            before = self._generation.calls[delta.index] - len(calls)
            calls = [{"index": number, **call} for number, call in enumerate(calls, before)]
        if calls:
            new["tool_calls"] = calls
        if self.body.stream:
            return new
        whole = {"role": "assistant", "content": None if calls else "", "refusal": None}
        return {**whole, "annotations": [], **new}

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any]:
        as_id, count = self.body.return_tokens_as_token_ids, self.body.top_logprobs or 0
        bytes_of = self._generation.state.tokenizer().token_bytes

        def entry(token: int, logprob: Logprob) -> dict[str, Any]:
            text = _token_text(token, logprob, as_id=as_id)
            return {"token": text, "logprob": _bounded(logprob), "bytes": [*bytes_of(token)]}

        content = [
            {
                **entry(token, found[token]),
                "top_logprobs": [entry(*each) for each in _ranked(found)[:count]],
            }
            for token, found in zip(delta.token_ids, delta.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def _token_text(token_id: int, logprob: Logprob, *, as_id: bool) -> str:
    """Return the text of a token, or ``token_id:`` and its number."""
    if as_id or logprob.decoded_token is None:
        return f"token_id:{token_id}"
    return logprob.decoded_token


def _ranked(entry: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    """Return the tokens of an entry, the most probable first."""
    return sorted(entry.items(), key=lambda each: each[1].rank)


def _bounded(logprob: Logprob) -> float:
    """Return the number as JSON can have it."""
    return max(logprob.logprob, _LEAST)


def _most(entry: Mapping[int, Logprob], own: int, count: int) -> list[tuple[int, Logprob]]:
    """Return the ``count`` most probable tokens of an entry and its own one, in this order."""
    return [each for each in _ranked(entry) if each[1].rank <= count or each[0] == own]


def _entries(token: int, entry: Mapping[int, Logprob] | None, count: int) -> Any:
    """Return the logprobs of a token of the prompt as vLLM writes them."""
    if entry is None:
        return None
    listed = _most(entry, token, count)
    return {
        str(other): {
            "logprob": _bounded(each),
            "rank": each.rank,
            "decoded_token": each.decoded_token,
        }
        for other, each in listed
    }
