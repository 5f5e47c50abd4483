"""Errors in streams that have begun, in the shape of each protocol, judged by its specification."""

from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llm_comply import cli

from vllm_module.runtime.outputs import RequestOutput
from vllm_module.server.connection import Limits
from vllm_module.server.endpoint import Keys
from vllm_module.server.errors import ApiError
from vllm_module.server.front import Front, front_application
from vllm_module.server.generation import ChoiceDelta, Continuation

STUBS: Any = runpy.run_path(str(Path(__file__).with_name("stubs.py")))
SPEC = json.loads((Path(cli.__file__).parent / "specs" / "openresponses.json").read_text())
ERROR = Draft202012Validator({**SPEC, "$ref": "#/components/schemas/ErrorStreamingEvent"})


def test_of_responses(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an event with the next number."""

    async def deltas(_: Continuation) -> AsyncIterator[ChoiceDelta]:
        output = RequestOutput("r", None, [1], [], False)
        yield ChoiceDelta(0, output, "some text", [1], [], True, None, None)
        raise ApiError(500, "a step failed")

    monkeypatch.setattr(Continuation, "deltas", deltas)
    body = {"model": "tiny", "input": "Hi", "stream": True}
    text = server.ask("POST", "/v1/responses", body)[1].decode()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    ERROR.validate(events[-1])
    assert "event: error\n" in text
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    text = server.ask("POST", "/v1/chat/completions", body)[1].decode()
    assert 'data: {"error":{"message":"a step failed"' in text  # OpenAI's chunks have no type


def behind_a_front(stub: Any, stopped: bool = False) -> list[bytes]:
    """Return what a client of /v1/responses has of a stub's stream, in pieces."""
    sent: list[Any] = []
    front = Front()
    front.backends = STUBS["engines"]()
    front.backends.all = [stub]  # type: ignore[union-attr]
    app = front_application(front, Keys([], []), Limits())
    waiting = [{"type": "http.request", "body": b"{}"}]
    begun = asyncio.Event()

    async def receive() -> Any:
        return waiting.pop() if waiting else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body", b"") == stub.pieces[-1]:
            begun.set()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/responses", "root_path": "",
        "query_string": b"", "headers": [],
    }  # fmt: skip

    async def ask() -> None:
        task = asyncio.ensure_future(app(scope, receive, send))
        if stopped:
            await begun.wait()
            task.cancel()  # as uvicorn does
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.wait([task])

    asyncio.run(ask())
    return [each["body"] for each in sent if "body" in each]


BEGUN = [b'event: a\ndata: {"sequence_number": %d}\n\n' % number for number in range(5)]


@pytest.mark.parametrize("stopped", [False, True], ids=["ended", "stopped"])
def test_of_responses_behind_a_front(stopped: bool) -> None:
    """The front counts what it has passed on, where the engine ends and where the front stops."""
    kind = "text/event-stream"
    stub = STUBS["Stub"](200, b"".join(BEGUN[:3]), *BEGUN[3:], kind=kind, ends=not stopped)
    stub.waits = stopped
    sent = b"".join(behind_a_front(stub, stopped))
    assert sent.startswith(b"".join(BEGUN))
    *_, name, data = sent.decode().split("\n")[:-2]
    event = json.loads(data.removeprefix("data: "))
    assert (name, event["sequence_number"]) == ("event: error", 5)
    assert ("the server has stopped" in event["error"]["message"]) == stopped
    ERROR.validate(event)
