"""The parts of a message as blocks that begin, grow and end, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from vllm_module.server.growing_text import Delta, ToolCall

_random = Random()  # not the system's: to ask for it releases the GIL, which a step may have then


def new_key() -> str:
    """Return 32 hexadecimal digits for ids, which nobody else has; they are no secret."""
    return f"{_random.getrandbits(128):032x}"


@dataclass
class Block:
    """A part of a message: text, reasoning, or one call.

    Attributes:
        number: its place among the blocks, from 0.
        kind: what it is.
        key: what ids of it have in common.
        text: the text so far; that of a call is complete from the beginning.
        call: of a call.
        is_last: whether the message ended before the block did: no more tokens came.

    """

    number: int
    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    call: ToolCall | None = None
    key: str = field(default_factory=new_key)
    is_last: bool = False


Change = tuple[Literal["begin", "more", "end"], Block, str]


class Blocks:
    """Turns deltas into the blocks that protocols with typed events stream.

    Attributes:
        ended: blocks that have ended.

    """

    def __init__(self) -> None:
        self.ended: list[Block] = []
        self._open: Block | None = None

    def feed(self, deltas: Iterable[Delta], ends: bool = False) -> Iterator[Change]:
        """Yield what happens to blocks: each begins, gets more text, and ends.

        ``ends`` tells that these deltas are the last ones.
        """
        for delta in deltas:
            if delta.reasoning:
                yield from self._more("reasoning", delta.reasoning)
            if delta.content:
                yield from self._more("text", delta.content)
            if delta.tool_call is not None:
                yield from self._end()
                text = delta.tool_call.arguments
                self._open = Block(len(self.ended), "call", text, delta.tool_call)
                yield "begin", self._open, ""
                yield "more", self._open, text
                yield from self._end()
        if ends:
            if self._open is not None:
                self._open.is_last = True
            yield from self._end()

    def _end(self) -> Iterator[Change]:
        """End the block that is open, if one is."""
        if self._open is not None:
            self.ended.append(self._open)
            yield "end", self._open, ""
            self._open = None

    def _more(self, kind: Literal["text", "reasoning"], text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._end()
            self._open = Block(len(self.ended), kind)
            yield "begin", self._open, ""
        self._open.text += text
        yield "more", self._open, text
