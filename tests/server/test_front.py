"""Which of several engines answers a request, and what a front says for all of them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import runpy
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vllm_module.server.backends import DEAD, Backend, BackendAnswer, Backends, prefixes_of
from vllm_module.server.connection import Limits
from vllm_module.server.endpoint import Keys
from vllm_module.server.errors import ApiError
from vllm_module.server.front import Front, front_application

# Pytest's importlib mode has no imports between test files.
STUBS: Any = runpy.run_path(str(Path(__file__).with_name("stubs.py")))
engines, Stub = (STUBS[name] for name in ("engines", "Stub"))
SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
wait_until = SUPPORT["wait_until"]


def test_the_choice() -> None:
    """The least busy one in turn; a known prefix, unless its engine has far more to do."""
    several = engines(0, 0, 0)
    assert {id(several.choose([])) for _ in range(3)} == {*map(id, several.all)}
    several = engines(3, 1, 2)
    assert several.choose([7]) is several.all[1]
    several.all[1].running = 6
    assert several.choose([7, 8]) is several.all[1], "6 is not more than 4 and twice 2"
    several.all[1].running = 9
    assert several.choose([7, 8]) is several.all[2]
    assert several.choose([7, 8]) is several.all[2], "its pages are there now"
    assert several.choose([7], [several.all[2]]) is several.all[0], "one has failed"
    several.all[0].code = 1
    assert several.choose([], [several.all[1], several.all[2]]) is None
    front = Front()
    with pytest.raises(ApiError, match="is loading"):
        front.loaded()
    front.backends = several
    assert front.loaded() is several
    for each in several.all:
        each.code = -9
    with pytest.raises(ApiError, match="all engines of this server have ended"):
        front.loaded()


def test_the_engine_that_had_the_longest_prefix_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that begin alike and differ later, beside a list of all that each engine was given.

    What was asked for longest ago is forgotten, the shortest prefix of a prompt before the others.
    """
    monkeypatch.setattr("vllm_module.server.backends._MOST_PREFIXES", 15)
    draw, several = random.Random(0), engines(0, 0, 0)
    given: list[tuple[int, Any]] = []  # prefixes with their engines, the latest one last
    known_to_two = 0
    for _ in range(2000):
        path = [draw.randrange(3) for _ in range(3)]
        prefixes = [hash(tuple(path[:length])) for length in range(1, draw.randint(1, 4))]
        tried = draw.sample(several.all, draw.choice([0, 0, 0, 1, 2]))
        held = dict(given)
        holders = [held[each] for each in prefixes if each in held and held[each] not in tried]
        found = several.choose(prefixes, tried)
        assert found not in tried
        assert found is (holders or [found])[-1]
        known_to_two += len({*map(id, holders)}) > 1
        given = [each for each in given if each[0] not in prefixes]
        given = [*given, *((each, found) for each in prefixes)][-15:]
    assert known_to_two > 100


def answered(path: str, *stubs: Stub, method: str = "POST") -> tuple[int, bytes]:
    """Return the status and the body with which a front of these backends answers."""
    front = Front()
    front.backends = engines()
    front.backends.all = list(stubs)  # type: ignore[arg-type]
    app = front_application(front, Keys([], ["key"]), Limits())
    return asyncio.run(asked(app, path, b"{}", method))


async def asked(app: Any, path: str, body: bytes, method: str = "POST") -> tuple[int, bytes]:
    sent = list[Any]()

    async def receive() -> Any:
        if not sent.count(None):
            sent.append(None)
            return {"type": "http.request", "body": body}
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path.partition("?")[0], "root_path": "",
        "query_string": path.partition("?")[2].encode(),
        "headers": [(b"authorization", b"Bearer key")],
    }  # fmt: skip
    await app(scope, receive, send)
    _, begin, *rest = sent
    return begin["status"], b"".join(each.get("body", b"") for each in rest)


def test_an_engine_whose_rank_has_ended_gets_no_more_requests() -> None:
    """Its process answers at once, and would be the least busy one."""
    dead, lives = Stub(500, b"a step failed"), Stub(200, b"{}")
    for _ in range(3):
        assert answered("/v1/completions", lives, dead) == (200, b"{}")
    assert (dead.asked, dead.dropped, lives.asked) == (1, True, 3)
    failed = Stub(500, b"of one request")
    for health in ("ok", "", "engine_overloaded"):  # without an answer, nothing is known
        failed.health = partial(asyncio.sleep, 0, health)  # type: ignore[method-assign]
        assert answered("/v1/completions", failed) == (500, b"of one request")
        assert not failed.dropped


def test_requests_that_meet_at_an_engine_that_ends() -> None:
    """One of them drops it. The others ask another engine, although it tells no health any more."""
    dead, lives = Stub(500, b"Internal Server Error", kind="text/plain"), Stub(200, b"{}")

    async def health() -> str:
        await asyncio.sleep(0)
        return "" if dead.dropped else DEAD

    dead.health = health  # type: ignore[method-assign]
    front = Front()
    front.backends = engines()
    front.backends.all = [dead, lives]  # type: ignore[list-item]
    app = front_application(front, Keys([], ["key"]), Limits())

    async def at_once() -> list[tuple[int, bytes]]:
        return await asyncio.gather(*(asked(app, "/v1/completions", b"{}") for _ in range(6)))

    assert asyncio.run(at_once()) == [(200, b"{}")] * 6
    assert dead.asked > 1


def test_an_engine_is_told_to_end_once(tmp_path: Path) -> None:
    """A second signal would break off the answers that it still gives."""
    ready, told, last = (tmp_path / name for name in ("ready", "told", "last"))
    script = (
        "import signal, time\n"
        "from pathlib import Path\n"
        "signals = []\n"
        "def count(*_):\n"
        "    signals.append(1)\n"
        f"    Path({str(told)!r}).touch()\n"
        "signal.signal(signal.SIGTERM, count)\n"
        f"Path({str(ready)!r}).touch()\n"
        f"while not Path({str(last)!r}).exists(): time.sleep(0.01)\n"
        "raise SystemExit(len(signals))\n"
    )
    backend = Backend(0, tmp_path / "socket", [sys.executable, "-c", script], {}, set())
    try:
        wait_until(ready.exists, "it counts signals")
        backend.end()
        wait_until(told.exists, "it was told")
        backend.end()
        backend.end()
        last.touch()
        wait_until(lambda: backend.code is not None, "it has ended")
        assert backend.code == 1
    finally:
        backend.wait(0.0)


def test_engines_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """It has started them, and can tell them nothing."""

    def start(_: int) -> None:
        sleeping = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]
        backends = Backends(sleeping, "SOCKET", [{}, {}])
        (tmp_path / "new").write_text(" ".join(str(each.pid) for each in backends.all))
        (tmp_path / "new").rename(tmp_path / "pids")
        signal.pause()

    (server,) = SUPPORT["fork_ranks"](1, start, port=0)
    wait_until((tmp_path / "pids").exists, "it has started two")
    engines = [Path("/proc", pid) for pid in (tmp_path / "pids").read_text().split()]
    assert [each.exists() for each in engines] == [True, True]
    os.kill(server, signal.SIGKILL)
    assert SUPPORT["exit_codes"]([server]) == [-signal.SIGKILL]
    try:
        wait_until(lambda: not any(each.exists() for each in engines), "both have ended")
    finally:
        for each in filter(Path.exists, engines):
            os.kill(int(each.name), signal.SIGKILL)


def test_a_request_goes_where_there_is_room() -> None:
    """Only if no engine has room, the refusal of one is the answer."""
    full = [Stub(503, b"full") for _ in range(3)]
    for each in full:
        each.health = lambda: asyncio.sleep(0, "ok")  # type: ignore[method-assign]
    room = Stub(200, b"{}")
    for _ in range(3):
        assert answered("/v1/completions", *full, room) == (200, b"{}")
    assert answered("/v1/completions", *full) == (503, b"full")
    for place in range(4):  # the first engine that is asked, or any after it
        stubs = [*full[:place], room, *full[place:]]
        assert answered("/v1/completions", *stubs) == (200, b"{}")
    assert not any(each.dropped for each in full)


def test_a_request_ends_two_engines_at_most() -> None:
    stubs = [Stub(200, b"{", ends=True) for _ in range(4)]
    status, body = answered("/v1/completions", *stubs)
    assert status == 503
    assert b"has ended, or could not be reached" in body
    assert sum(each.asked for each in stubs) == 2


def test_a_stream_that_ends_in_the_middle_of_an_event() -> None:
    """Half of an event is nothing that a client could read; before the first, another is asked."""
    stream = "text/event-stream; charset=utf-8"
    cut = Stub(200, b"data: 1\n", b"\ndata: 2\n\ndata: {", kind=stream, ends=True)
    status, body = answered("/v1/completions", cut)
    *events, error = body.removesuffix(b"\n\n").split(b"\n\n")
    assert (status, events) == (200, [b"data: 1", b"data: 2"])
    assert "has ended" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
    nothing = Stub(200, b"data: {", kind=stream, ends=True)
    whole = Stub(200, b"data: 1\n\n", b"data: [DONE]", b"\n\n", kind=stream)
    for stubs in ((nothing, whole), (whole, nothing)):
        assert answered("/v1/completions", *stubs) == (200, b"data: 1\n\ndata: [DONE]\n\n")


def test_who_gives_no_answer_is_named_to_operators() -> None:
    """Others may have changed, so that is no success; one that has ended does not count."""
    silent, lives = Stub(200, ends=True), Stub(200, b"{}")
    silent.number = 7
    status, body = answered("/pause", lives, silent)
    assert status == 500
    assert b"engine 7 gave no answer" in body
    assert b"of the engines, 0 did this and 7 did not" in body
    silent.code = -9
    assert answered("/pause", lives, silent) == (200, b"{}")


def test_each_engine_has_the_fields_in_the_query() -> None:
    """A pause without its mode would end the requests that run."""
    stubs = [Stub(200, b"{}") for _ in range(2)]
    for target in ("/pause?mode=keep&clear_cache=false", "/sleep?level=2", "/wake_up?tags=weights"):
        assert answered(target, *stubs) == (200, b"{}")
        assert [each.target for each in stubs] == [target] * 2


def test_metrics_are_of_the_engines_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs, or whose own engine has ended, hides those of no other."""
    monkeypatch.setattr("vllm_module.server.front._SCRAPE", 0.2)
    lives, hangs, dead = Stub(200, b"# TYPE a\na{} 1\n"), Stub(200, b"{}"), Stub(500, b"ended")
    hangs.hangs = True
    status, body = answered("/metrics", hangs, dead, lives, method="GET")
    assert (status, body) == (200, b'# TYPE a\na{engine="0",} 1\n')
    assert dead.dropped
    assert not hangs.dropped


class Bodiless(Stub):
    """A backend that answers HEAD as HTTP has it: without a body."""

    @asynccontextmanager
    async def ask(self, method: str, *target: Any) -> AsyncIterator[BackendAnswer]:
        async with super().ask(method, *target) as answer:
            if method == "HEAD":
                answer = answer._replace(body=empty())
            yield answer


async def empty() -> AsyncIterator[bytes]:
    for each in ():
        yield each


def test_the_length_of_metrics_is_that_of_all() -> None:
    """HEAD is told as many bytes as GET; the server leaves them out."""
    stub = Bodiless(200, b"# TYPE a\na{} 1\n")
    assert answered("/metrics", stub, method="HEAD") == answered("/metrics", stub, method="GET")


def test_changes_have_one_order_in_all_engines() -> None:
    """Two updates at once would leave the engines with different weights."""
    stubs = [Ordered(), Ordered()]
    stubs[1].number = 1
    front = Front()
    front.backends = engines()
    front.backends.all = list(stubs)  # type: ignore[arg-type]
    app = front_application(front, Keys([], ["key"]), Limits())

    async def both() -> None:
        await asyncio.gather(*(asked(app, "/update_weights", body) for body in (b"1", b"2")))

    asyncio.run(both())
    assert stubs[0].order == stubs[1].order
    assert sorted(stubs[0].order) == [b"1", b"2"]


class Ordered(Stub):
    """A backend that takes its time, and another time for each request."""

    def __init__(self) -> None:
        super().__init__(200, b"{}")
        self.order: list[bytes] = []

    @asynccontextmanager
    async def ask(self, *given: Any) -> AsyncIterator[BackendAnswer]:
        body = given[3]
        if (body == b"1") == (self.number == 0):
            for _ in range(9):
                await asyncio.sleep(0)
        self.order.append(body)
        async with super().ask(*given) as answer:
            yield answer


def test_prefixes() -> None:
    """They are those of the bytes before each doubled length."""
    beginning = b"x" * 600
    assert prefixes_of(beginning + b"y" * 500)[:2] == prefixes_of(beginning)
    assert prefixes_of(b"z" + beginning)[0] != prefixes_of(beginning)[0]
    assert prefixes_of(b"x" * 255) == []
