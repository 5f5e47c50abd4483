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


def test_of_responses_behind_a_front() -> None:
    """The front counts what it has passed on."""
    sent: list[Any] = []
    begun = [b'event: a\ndata: {"sequence_number": %d}\n\n' % number for number in range(5)]
    stub = STUBS["Stub"](200, b"".join(begun[:3]), *begun[3:], kind="text/event-stream", ends=True)
    front = Front()
    front.backends = STUBS["engines"]()
    front.backends.all = [stub]  # type: ignore[union-attr]
    app = front_application(front, Keys([], []), Limits())
    waiting = [{"type": "http.request", "body": b"{}"}]

    async def receive() -> Any:
        return waiting.pop() if waiting else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/responses", "root_path": "",
        "query_string": b"", "headers": [],
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    *_, name, data = b"".join(each.get("body", b"") for each in sent).decode().split("\n")[:-2]
    event = json.loads(data.removeprefix("data: "))
    assert (name, event["sequence_number"]) == ("event: error", 5)
    ERROR.validate(event)
