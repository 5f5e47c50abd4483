"""Text that grows while it is parsed, and the steps of which parsers of it consist.

A step is a generator. It yields ``None`` when it needs more text, so that it decides nothing that
more text could change.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Literal, NamedTuple, TypeAlias

SPACE = " \t\r\n"
_MOST_UNCLOSED = 8
Kind: TypeAlias = Literal["content", "reasoning"]


class ToolCall(NamedTuple):
    """A call of a tool: its name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class Delta(NamedTuple):
    """What more text has brought: some content, some reasoning, or one complete call."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


class GrowingText:
    """Text that grows at its end and is taken from its beginning.

    Attributes:
        rest: what was not taken yet.
        length: characters of all text so far.
        ended: whether no more text comes.
        unclosed: number of times that JSON began, and did not end with the text.
        reasoning: where parts that are reasoning begin and end, in characters of all text.

    """

    def __init__(self) -> None:
        self.rest = ""
        self.length = 0
        self.ended = False
        self.unclosed = 0
        self.reasoning: list[tuple[int, int]] = []

    def grow(self, text: str) -> None:
        """Add text at the end."""
        self.rest += text
        self.length += len(text)

    def take(self, length: int) -> str:
        """Take ``length`` characters from the beginning."""
        taken, self.rest = self.rest[:length], self.rest[length:]
        return taken


def until(
    text: GrowingText, marks: Sequence[str], kind: Kind
) -> Generator[Delta | None, None, str]:
    """Yield text as ``kind`` up to the first mark; take the mark and return it, or "" at the end.

    Spaces before a mark are dropped, so spaces wait for what follows them.
    """
    any_mark = re.compile("|".join(map(re.escape, marks)))
    while True:
        if marks and (found := any_mark.search(text.rest)):
            length = len(text.rest[: found.start()].rstrip(SPACE))
            yield _delta(text, length, kind)
            text.take(found.end() - length)
            return found[0]
        if text.ended:
            yield _delta(text, len(text.rest), kind)
            return ""
        certain = text.rest[: len(text.rest) - _begun(text.rest, marks)]
        yield _delta(text, len(certain.rstrip(SPACE) if marks else certain), kind)
        yield None


def _delta(text: GrowingText, length: int, kind: Kind) -> Delta:
    """Take ``length`` characters as ``kind``."""
    begin = text.length - len(text.rest)
    taken = text.take(length)
    if kind == "content" or not taken:
        return Delta(content=taken)
    if text.reasoning and text.reasoning[-1][1] == begin:
        begin, _ = text.reasoning.pop()
    text.reasoning.append((begin, text.length - len(text.rest)))
    return Delta(reasoning=taken)


def _begun(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of ``text`` that begins a mark."""
    most, firsts = max(map(len, marks), default=1) - 1, {mark[0] for mark in marks}
    for length in range(min(most, len(text)), 0, -1):
        if text[-length] in firsts and any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def begins(text: GrowingText, *marks: str) -> Generator[None, None, str]:
    """Return the mark that the text begins with after spaces, or ""; take it, not other text."""
    while True:
        begin = text.rest.lstrip(SPACE)
        for mark in marks:
            if begin.startswith(mark):
                text.take(len(text.rest) - len(begin) + len(mark))
                return mark
        if text.ended or not any(mark.startswith(begin) for mark in marks):
            return ""
        yield None


def skip_space(text: GrowingText) -> Generator[None, None, None]:
    """Take spaces up to another character or the end."""
    yield from skip_blank(text)
    text.rest = text.rest.lstrip(SPACE)


def skip_blank(text: GrowingText) -> Generator[None, None, None]:
    """Take the rest of the text if it is nothing but spaces; else take nothing."""
    while not text.rest.strip(SPACE):
        if text.ended:
            text.rest = ""
            return
        yield None


def take_to(text: GrowingText, mark: str) -> Generator[None, None, str | None]:
    """Take text up to ``mark``, and the mark; ``None``, with nothing taken, if it never comes."""
    searched = 0
    while (at := text.rest.find(mark, searched)) < 0:
        if text.ended:
            return None
        searched = max(0, len(text.rest) - len(mark) + 1)
        yield None
    return text.take(at + len(mark))[:at]


def take_json(text: GrowingText) -> Generator[None, None, str | None]:
    """Take spaces and a JSON object or array; ``None``, with nothing taken, if there is none.

    Each that does not end is searched up to the end of the text, so after a few there is none.
    """
    at, opened, string, escaped = 0, 0, False, False
    if text.unclosed == _MOST_UNCLOSED:
        return None
    while True:
        while at < len(text.rest):
            char = text.rest[at]
            at += 1
            if string:
                escaped, string = char == "\\" and not escaped, char != '"' or escaped
            elif char in "{[":
                opened += 1
            elif char in "}]" and opened:
                opened -= 1
                if not opened:
                    return text.take(at)
            elif char == '"' and opened:
                string = True
            elif not opened and char not in SPACE:
                return None
        if text.ended:
            text.unclosed += 1
            return None
        yield None


def take_section(
    text: GrowingText, begin: str, end: str
) -> Generator[None, None, tuple[str | None, str]]:
    """Take text up to ``end``, after ``begin`` was taken; return it, and all of it with the marks.

    If the end never comes, the section is ``None``, and all is taken: there is no other section.
    """
    body = yield from take_to(text, end)
    if body is None:
        return None, begin + text.take(len(text.rest))
    return body, begin + body + end
