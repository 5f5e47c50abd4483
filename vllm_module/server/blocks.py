"""The parts of a message as blocks that begin, grow and end, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from vllm_module.server.growing_text import Delta, ToolCall


@dataclass
class Block:
    """A part of a message: text, reasoning, or one call.

    Attributes:
        number: its place among the blocks, from 0.
        kind: what it is.
        text: the whole text, once the block has ended.
        call: of a call.

    """

    number: int
    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    call: ToolCall | None = None


Change = tuple[Literal["begin", "more", "end"], Block, str]


class Blocks:
    """Turns deltas into the blocks that protocols with typed events stream."""

    def __init__(self) -> None:
        self._ended = 0
        self._open: Block | None = None

    def feed(self, deltas: Iterable[Delta]) -> Iterator[Change]:
        """Yield what happens to blocks: each begins, gets more text, and ends."""
        for delta in deltas:
            if delta.reasoning:
                yield from self._more("reasoning", delta.reasoning)
            if delta.content:
                yield from self._more("text", delta.content)
            if delta.tool_call is not None:
                yield from self.finish()
                block = self._open = Block(self._ended, "call", call=delta.tool_call)
                yield "begin", block, ""
                block.text = delta.tool_call.arguments
                yield "more", block, block.text
                yield from self.finish()

    def finish(self) -> Iterator[Change]:
        """End the block that is open, if one is."""
        if self._open is not None:
            self._ended += 1
            yield "end", self._open, ""
            self._open = None

    def _more(self, kind: Literal["text", "reasoning"], text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self.finish()
            self._open = Block(self._ended, kind)
            yield "begin", self._open, ""
        self._open.text += text
        yield "more", self._open, text
