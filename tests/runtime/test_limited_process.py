"""A process with limits answers each request by itself, whatever ended the one before."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_module.runtime.limited_process import LimitedProcess

SCRIPT = """
def prepare(first):
    global greeting
    greeting = first

def answer(request):
    return {"is": greeting + str(request)}
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[LimitedProcess]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = LimitedProcess(script, 20.0, 64 << 20, lambda: b"hello ")
    yield process
    process.close()


class Interrupted:
    """A pipe of whose user something else is wanted, once, before it reads or after it writes."""

    def __init__(self, pipe: Any, method: str, error: BaseException) -> None:
        self._pipe, self._method, self._error = pipe, method, error

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._method = ""
            return self._raise
        return getattr(self._pipe, name)

    def _raise(self, *_: object) -> None:
        if isinstance(self._error, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise self._error


@pytest.mark.parametrize("where", ["stdin.flush", "stdout.readline"])
@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError(), MemoryError(), OSError("gone")],
    ids=repr,
)
def test_no_request_is_given_the_answer_of_another(
    process: LimitedProcess, error: BaseException, where: str
) -> None:
    """One that was interrupted has been written, and its answer may be on its way."""
    assert process.ask("1") == {"is": "hello 1"}
    pipe, method = where.split(".")
    running: Any = process._process
    setattr(running, pipe, Interrupted(getattr(running, pipe), method, error))
    with pytest.raises(type(error)):
        process.ask("2")
    assert process.ask("3") == {"is": "hello 3"}
    assert process.ask("4") == {"is": "hello 4"}
