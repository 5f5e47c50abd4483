"""Adapters behind a front of several engines: all of them have one, or none."""

from __future__ import annotations

import asyncio
import importlib
import json
import runpy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_module.server.backends import BackendAnswer
from vllm_module.server.connection import Limits
from vllm_module.server.endpoint import Keys
from vllm_module.server.front import Front, front_application

front_module: Any = importlib.import_module("vllm_module.server.front")
STUBS = runpy.run_path(str(Path(__file__).with_name("stubs.py")))
Stub: Any = STUBS["Stub"]
engines = STUBS["engines"]


class Holder(Stub):
    """A backend that loads and unloads adapters; it may refuse to, or give no answer."""

    def __init__(self, *adapters: str) -> None:
        super().__init__(200, b"{}")
        self.adapters, self.broken, self.silent, self.used = {*adapters}, False, False, 0
        self.answering = asyncio.Event()
        self.answering.set()

    @asynccontextmanager
    async def ask(self, *asked: Any) -> AsyncIterator[BackendAnswer]:
        self.asked += 1
        _, path, _, body = asked
        name = json.loads(body).get("lora_name")
        self.status = 200
        if path == "/v1/load_lora_adapter":
            await self.answering.wait()
            self.status = 400 if self.broken or name in self.adapters else 200
            self.adapters |= {name} if self.status == 200 else set()
        elif path == "/v1/unload_lora_adapter":
            self.used -= bool(self.used)
            self.status = 409 if self.used else 200 if name in self.adapters else 400
            self.adapters -= {name} if self.status == 200 else set()
        elif json.loads(body)["model"] not in self.adapters:
            self.status = 404
        else:
            await self.answering.wait()
            self.status = 200
        self.ends, self.silent = self.silent, False
        async with super().ask(*asked) as answer:
            yield answer


class Adapters:
    """A front of such backends, which is asked as clients and operators do."""

    def __init__(self, *holders: Holder) -> None:
        front = Front()
        front.backends = engines()
        front.backends.all = list(holders)
        self.app = front_application(front, Keys([], ["key"]), Limits())

    async def ask(self, path: str, **body: Any) -> int:
        bodies, statuses = [json.dumps(body).encode()], []

        async def receive() -> Any:
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        scope = {
            "type": "http", "method": "POST", "path": path, "root_path": "", "query_string": b"",
            "headers": [(b"authorization", b"Bearer key")],
        }  # fmt: skip
        await asyncio.wait_for(self.app(scope, receive, send), 60)  # type: ignore[arg-type]
        return int(statuses[0])

    async def load(self, name: str = "x", **more: Any) -> int:
        return await self.ask("/v1/load_lora_adapter", lora_name=name, lora_path="y", **more)

    async def unload(self, name: str = "x") -> int:
        return await self.ask("/v1/unload_lora_adapter", lora_name=name)

    async def complete(self, name: str = "x") -> int:
        return await self.ask("/v1/completions", model=name)


def test_all_engines_load_an_adapter_or_none() -> None:
    """What one refuses, the others unload, so that requests have one answer and a retry works."""

    async def loading() -> None:
        holders = [Holder(), Holder("other"), Holder()]
        front = Adapters(*holders)
        for fault in ("broken", "silent"):
            setattr(holders[1], fault, True)
            assert await front.load() == (500 if fault == "silent" else 400)
            assert [each.adapters for each in holders] == [set(), {"other"}, set()]
            assert {await front.complete() for _ in range(6)} == {404}
            holders[1].broken = False
            assert await front.load() == 200
            assert {await front.complete() for _ in range(6)} == {200}
            assert await front.load() == 400, "it is called so already"
            assert all("x" in each.adapters for each in holders)
            assert await front.unload() == 200
        # One that has not loaded it, and gave no answer, has nothing to undo.
        holders[1].broken = holders[1].silent = True
        assert await front.load() == 500
        assert [each.adapters for each in holders] == [set(), {"other"}, set()]
        holders[1].broken = False
        holders[0].adapters.add("x")  # left by an engine that gave no answer to its undoing
        assert await front.load() == 400
        assert await front.unload() == await front.load() == 200
        holders[2].broken = True
        assert await front.load(load_inplace=True) == 400
        assert all("x" in each.adapters for each in holders), "an update in place can be sent again"

    asyncio.run(loading())


def test_all_engines_unload_an_adapter_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """None does while a client waits for an answer of it; a retry ends what one could not."""

    async def unloading() -> None:
        holders = [Holder("x"), Holder("x")]
        front = Adapters(*holders)
        holders[0].answering.clear()
        holders[1].answering.clear()
        request = asyncio.create_task(front.complete())
        await asyncio.sleep(0.01)
        before = [each.asked for each in holders]
        assert await front.unload() == 409
        assert [each.asked for each in holders] == before
        assert await front.unload("other") == 400
        holders[0].answering.set()
        holders[1].answering.set()
        assert await request == 200
        holders[1].used = 3  # requests of clients that have gone
        assert await front.unload() == 200
        assert [each.adapters for each in holders] == [set(), set()]
        assert await front.unload() == 400
        assert await front.load() == 200
        holders[1].used = 100
        monkeypatch.setattr(front_module, "_GONE", 0.1)
        assert await front.unload() == 409
        holders[1].used = 0
        assert await front.unload() == 200
        assert [each.adapters for each in holders] == [set(), set()]

    asyncio.run(unloading())


def test_requests_wait_for_engines_that_load_their_adapter() -> None:
    """They are not refused by one that has not loaded it yet; other requests do not wait."""

    async def waiting() -> None:
        holders = [Holder("other"), Holder("other")]
        front = Adapters(*holders)
        holders[1].answering.clear()
        load = asyncio.create_task(front.load())
        await asyncio.sleep(0.01)
        request = asyncio.create_task(front.complete())
        await asyncio.sleep(0.01)
        assert holders[0].adapters == {"x", "other"}
        assert not request.done()
        assert await front.complete("nothing") == 404
        holders[1].answering.set()
        assert await load == await request == 200

    asyncio.run(waiting())
