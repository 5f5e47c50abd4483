"""Parsing what a model writes: content, reasoning and calls of tools, from text that grows.

One law holds for every format and every text: however the text is split, the deltas put together
are those of the whole text. Text that may begin a mark is kept back, and a call is told when it
is complete.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm_module.server.growing_text import Delta, GrowingText, begins, skip_space, until
from vllm_module.server.tool_formats import CHOSEN, FORMATS, Parse, Schemas, chosen

# What a chat template writes around calls, and the format that this tells; the first counts.
_TOLD_BY = {
    "<|channel|>": "harmony",
    "<|tool_calls_section_begin|>": "kimi",
    "<｜tool▁calls▁begin｜>": "deepseek",
    "[TOOL_CALLS]": "mistral",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3",
    '{"name": function name, "parameters":': "llama3",
}
_SWITCH = re.compile(r"\b(?:enable_|if |not )thinking\b")
_PIECE = 4096  # characters
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class Parser:
    """Turns the text of one message, given in parts, into deltas.

    Args:
        name: of the format of calls, one of :data:`FORMATS`; ``None`` if there are no tools.
        reasoning: the marks around reasoning, such as ``("<think>", "</think>")``; ``None`` if the
            model writes none.
        reasons: whether the prompt has already begun the reasoning.
        tools: the descriptions of tools that the request has.

    Raises ``ValueError`` for an unknown format.

    """

    def __init__(
        self,
        name: str | None = None,
        reasoning: tuple[str, str] | None = None,
        *,
        reasons: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if name not in (None, CHOSEN, *FORMATS):
            raise ValueError(f"no format of tool calls is named {name!r}: {', '.join(FORMATS)}")
        self._text = GrowingText()
        self._parse = _message(self._text, name, reasoning, reasons, schemas_of(tools))

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that ``text``, which follows what was given before, decides."""
        found = []
        # Each step copies or searches the rest: that of a long text at once, for each of its marks.
        for at in range(0, len(text), _PIECE):
            self._text.grow(text[at : at + _PIECE])
            found += self._deltas()
        return found

    def finish(self) -> list[Delta]:
        """Return the deltas of what was kept back. Nothing may be fed afterwards."""
        self._text.ended = True
        return self._deltas()

    @property
    def reasoned(self) -> bool:
        """Whether there was reasoning so far."""
        return bool(self._text.reasoning)

    def reasoning_tokens(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
        """Return how many of the tokens begin in reasoning; ``ids`` are those of the whole text."""

        def length(count: int) -> int:
            return len(decode(ids[:count]).rstrip("\ufffd"))  # without half of a character

        def before(at: int) -> int:
            return bisect_left(range(len(ids)), at, key=length)

        return sum(before(end) - before(begin) for begin, end in self._text.reasoning)

    def _deltas(self) -> list[Delta]:
        found = []
        for delta in self._parse:
            if delta is None:
                break
            if any(delta):
                found.append(delta)
        return found


def schemas_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schema of each tool's parameters; that of a tool without one is empty."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters") if isinstance(function, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            found[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return found


def _message(
    text: GrowingText,
    name: str | None,
    reasoning: tuple[str, str] | None,
    reasons: bool,
    schemas: Schemas,
) -> Parse:
    if reasoning is not None and name != "harmony":  # whose channels are reasoning, too
        begin, end = reasoning
        if reasons or (yield from begins(text, begin)):
            yield from skip_space(text)
            yield from until(text, (end,), "reasoning")
            yield from skip_space(text)
    if name is None:
        yield from until(text, (), "content")
    else:
        read = chosen if name == CHOSEN else FORMATS[name]
        yield from read(text, schemas)


def format_of(template: str) -> str | None:
    """Return the name of the format of calls that a chat template writes; ``None`` if unknown."""
    return next((name for mark, name in _TOLD_BY.items() if mark in template), None)


def reasoning_of(template: str) -> tuple[str, str] | None:
    """Return the marks around reasoning that a chat template writes; ``None`` without any."""
    return next((marks for marks in _REASONING if marks[1] in template), None)


def switch_of(template: str) -> str | None:
    """Return the variable by which a template lets a model reason or not; ``None`` without one."""
    found = _SWITCH.search(template)
    return found and found[0].split()[-1]
