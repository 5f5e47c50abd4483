"""Engines behind a front that are no processes: they answer as a test says.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from vllm_module.server.backends import DEAD, BackendAnswer, BackendError, Backends


def engines(*running: int) -> Any:
    """Return the choice among engines that have so many requests."""
    chosen: Any = object.__new__(Backends)
    chosen.all = [
        SimpleNamespace(number=number, running=count, code=None, dropped=False)
        for number, count in enumerate(running)
    ]
    chosen._prefix_backends, chosen._turn = OrderedDict(), 0
    return chosen


class Stub:
    """A backend that gives the same answer each time, in pieces, and may end in the middle."""

    code: int | None = None
    hangs = False
    waits = False  # behind the pieces

    def __init__(
        self, status: int, *pieces: bytes, kind: str = "application/json", ends: bool = False
    ) -> None:
        self.status, self.pieces, self.kind, self.ends = status, pieces, kind.encode(), ends
        self.number, self.running, self.asked, self.dropped = 0, 0, 0, False

    @asynccontextmanager
    async def ask(self, _: str, target: str, *__: object) -> AsyncIterator[BackendAnswer]:
        self.asked += 1
        self.target = target
        if self.hangs:
            await asyncio.Event().wait()

        async def body() -> AsyncIterator[bytes]:
            for piece in self.pieces:
                yield piece
            if self.waits:
                await asyncio.Event().wait()
            if self.ends:
                raise BackendError("ended")

        yield BackendAnswer(self.status, [(b"content-type", self.kind)], body())

    async def health(self) -> str:
        return "ok" if self.status == 200 else DEAD

    def end(self) -> None:
        self.dropped = True
