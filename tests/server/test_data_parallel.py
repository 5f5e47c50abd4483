"""Several engines behind one address: which of them answers, and what happens when one ends."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from vllm_module import LLM, SamplingParams
from vllm_module.cli import main
from vllm_module.cli.options import DeviceOptions, EngineRankOptions, UsageError
from vllm_module.server.backends import (
    DEAD,
    BackendAnswer,
    BackendError,
    Backends,
    prefixes_of,
)
from vllm_module.server.connection import Limits
from vllm_module.server.endpoint import Keys
from vllm_module.server.errors import ApiError
from vllm_module.server.front import Front, front_application

serve: Any = importlib.import_module("vllm_module.cli.commands.serve")
SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
KEY, ADMIN = "key-of-clients", "key-of-operators"
Until = Callable[[Callable[[], object]], None]


class Replicated(NamedTuple):
    """A server with two engines."""

    process: subprocess.Popen[str]
    url: str

    def open(self, path: str, key: str | None = KEY, **body: Any) -> Any:
        data = json.dumps(body).encode() if body else None
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers))

    def ask(self, path: str, key: str | None = KEY, **body: Any) -> Any:
        with self.open(path, key, **body) as answer:
            return json.load(answer)

    def status(self, path: str, key: str | None = KEY, **body: Any) -> int:
        try:
            with self.open(path, key, **body) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def text(self, prompt: str, tokens: int = 8) -> str:
        answer = self.ask("/v1/completions", prompt=prompt, max_tokens=tokens, temperature=0)
        return str(answer["choices"][0]["text"])

    def numbers(self, name: str) -> dict[str, float]:
        """Return a metric by engine."""
        with self.open("/metrics") as answer:
            found = re.findall(rf'vllm:{name}{{engine="(\d)".*}} (\S+)', answer.read().decode())
        return {engine: float(value) for engine, value in found}

    def engines(self) -> list[int]:
        """Return the process ids of the engines."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if (
                    parent == self.process.pid
                    and b"data-parallel-size" in (path / "cmdline").read_bytes()
                ):
                    found.append(int(path.name))
        return sorted(found)


@contextmanager
def starting(folder: Path) -> Iterator[Replicated]:
    port = SUPPORT["free_port"]()
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_module.cli", "serve", str(folder), "--port", str(port),
         "--data-parallel-size", "2", "--device", "cpu", "--dtype", "float32"],
        stderr=subprocess.PIPE, text=True,
        env=os.environ | {"VLLM_MODULE_API_KEY": KEY, "VLLM_MODULE_ADMIN_KEY": ADMIN},
    )  # fmt: skip
    try:
        yield Replicated(process, f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.communicate()


@contextmanager
def serving(folder: Path) -> Iterator[Replicated]:
    with starting(folder) as server:
        seen = set()

        def is_up() -> bool:
            assert server.process.poll() is None
            seen.add(server.status("/health"))
            return 200 in seen

        SUPPORT["wait_until"](is_up, "the server answers")
        assert 503 in seen, "while it is loading"
        yield server


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Replicated]:
    with serving(folder) as served:
        yield served


def expected(sync: LLM, prompt: str, tokens: int = 8) -> str:
    params = SamplingParams(temperature=0, max_tokens=tokens)
    return str(sync.generate(prompt, params, use_tqdm=False)[0].outputs[0].text)


def test_requests_are_shared_out(server: Replicated, sync: LLM) -> None:
    """Tokens are those of one engine, and both engines compute some of them."""
    prompts = [f"prompt {number}" for number in range(6)]
    found: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda each=each: found.update({each: server.text(each)}))
        for each in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {each: expected(sync, each) for each in prompts}
    computed = server.numbers("prompt_tokens_total")
    assert computed.keys() == {"0", "1"}
    assert min(computed.values()) >= len(prompts[0]), "each engine has computed one at least"


def test_a_prompt_goes_where_its_beginning_was(server: Replicated) -> None:
    """Pages of a conversation are found again, in every turn of it."""
    for conversation in ("first", "second", "third"):
        text = f"{conversation} " + "of many words, " * 30
        for turn in range(3):
            before = server.numbers("prefix_cache_hits_total")
            server.text(text)
            after = server.numbers("prefix_cache_hits_total")
            hits = sum(after.values()) - sum(before.values())
            assert hits > 200 if turn else hits < 200
            text += "and more of them, " * 3


def test_operators_reach_every_engine(server: Replicated) -> None:
    """A pause holds all engines up; keys are asked for; what is refused is so by the protocol."""
    assert server.status("/v1/models", None) == server.status("/v1/models", "wrong") == 401
    assert server.status("/pause", KEY, mode="keep") == 401
    assert server.ask("/pause", ADMIN, mode="keep") == {"status": "paused"}
    for _ in range(2):  # whichever is asked
        assert server.status("/ready") == 503
    assert server.ask("/resume", ADMIN, model="x") == {"status": "resumed"}
    assert server.status("/ready") == 200
    assert server.status("/v1/completions", prompt="x", unknown=1) == 400
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.ask("/v1/messages", messages=[])
    with refused.value as answer:
        assert json.load(answer)["type"] == "error"


def test_a_client_that_leaves_ends_its_request(server: Replicated, until: Until) -> None:
    with server.open(
        "/v1/completions", prompt="leaves", max_tokens=900, temperature=0, stream=True
    ) as stream:
        stream.readline()
        assert sum(server.numbers("num_requests_running").values()) == 1
    until(lambda: not sum(server.numbers("num_requests_running").values()))
    assert sum(server.numbers("generation_tokens_total").values()) < 800


def test_engines_that_end(folder: Path, sync: LLM, until: Until) -> None:
    """The stream of one that is killed ends with an error; what had no answer is done again."""
    with serving(folder) as server:
        stream = server.open(
            "/v1/completions", prompt="streamed", max_tokens=900, temperature=0, stream=True
        )
        with stream:
            stream.readline()
            other: list[str] = []
            waiting = threading.Thread(target=lambda: other.append(server.text("whole", 600)))
            waiting.start()
            until(lambda: sorted(server.numbers("num_requests_running").values()) == [1, 1])
            engines = server.engines()
            assert len(engines) == 2
            os.kill(engines[0], signal.SIGKILL)  # of one or the other request
            lines = [line for line in stream if line.strip()]
        waiting.join()
        assert other == [expected(sync, "whole", 600)]
        if lines[-1] != b"data: [DONE]\n":
            assert "has ended" in json.loads(lines[-1].removeprefix(b"data: "))["error"]["message"]
        assert server.status("/health") == 200
        assert len(server.numbers("num_requests_running")) == 1
        for number in range(3):
            assert server.text(f"after {number}") == expected(sync, f"after {number}")
        server.process.terminate()
        assert server.process.wait() == 0
        until(lambda: not Path(f"/proc/{engines[1]}").exists())


def test_engines_end_with_a_server_that_is_killed(folder: Path, until: Until) -> None:
    with serving(folder) as server:
        engines = server.engines()
        server.process.kill()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines))


def test_a_server_is_told_to_end_while_its_engines_load(folder: Path, until: Until) -> None:
    """It ends them first, so that they leave no folders behind."""
    with starting(folder) as server:
        until(lambda: len(server.engines()) == 2)
        engines = server.engines()
        server.process.terminate()
        assert server.process.wait() == 0
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines))


@pytest.mark.parametrize("option", ["--api-key", "--admin-key"])
def test_an_empty_key_is_refused(option: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A request without a key would have it."""
    assert main(["serve", "nowhere", option, "", option, "other"]) == 2
    assert "a key is empty" in capfd.readouterr().err


def test_what_is_refused(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """An engine that cannot load ends the command with its message."""
    several = ["--data-parallel-size", "2", "--device", "cpu"]
    assert main(["serve", str(folder), *several, "--weights-port", "1", "--admin-key", "x"]) == 2
    assert "the port of one engine" in capfd.readouterr().err
    (tmp_path / "config.json").write_text('{"architectures": ["Nobody"], "model_type": "none"}')
    port = str(SUPPORT["free_port"]())
    assert main(["serve", str(tmp_path), *several, "--port", port]) == 1
    error = capfd.readouterr().err
    assert "Nobody" in error
    assert re.search(r"engine \d \(pid \d+\) ended with exit code 1 before it had loaded", error)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["serve", str(folder), *several]) == 2
    assert "without torchrun" in capfd.readouterr().err


def engines(*running: int) -> Any:
    """Return the choice among engines that have so many requests."""
    chosen: Any = object.__new__(Backends)
    chosen.all = [
        SimpleNamespace(number=number, running=count, code=None, dropped=False)
        for number, count in enumerate(running)
    ]
    chosen._of_prefix, chosen._turn = OrderedDict(), 0
    return chosen


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


class Stub:
    """A backend that gives the same answer each time, in pieces, and may end in the middle."""

    code: int | None = None
    hangs = False

    def __init__(
        self, status: int, *pieces: bytes, kind: str = "application/json", ends: bool = False
    ) -> None:
        self.status, self.pieces, self.kind, self.ends = status, pieces, kind.encode(), ends
        self.number, self.running, self.asked, self.dropped = 0, 0, 0, False

    @asynccontextmanager
    async def ask(self, *_: object) -> AsyncIterator[BackendAnswer]:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()

        async def body() -> AsyncIterator[bytes]:
            for piece in self.pieces:
                yield piece
            if self.ends:
                raise BackendError("ended")

        yield BackendAnswer(self.status, [(b"content-type", self.kind)], body())

    async def health(self) -> str:
        return "ok" if self.status == 200 else DEAD

    def end(self) -> None:
        self.dropped = True


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
        "type": "http", "method": method, "path": path, "root_path": "", "query_string": b"",
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


def test_metrics_are_of_the_engines_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs, or whose own engine has ended, hides those of no other."""
    monkeypatch.setattr("vllm_module.server.front._SCRAPE", 0.2)
    lives, hangs, dead = Stub(200, b"# TYPE a\na{} 1\n"), Stub(200, b"{}"), Stub(500, b"ended")
    hangs.hangs = True
    status, body = answered("/metrics", hangs, dead, lives, method="GET")
    assert (status, body) == (200, b'# TYPE a\na{engine="0",} 1\n')
    assert dead.dropped
    assert not hangs.dropped


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
        async with super().ask() as answer:
            yield answer


def test_an_adapter_of_all_engines(server: Replicated, adapter: Path) -> None:
    """It is loaded, used, and unloaded in both, and in neither while a request uses it."""

    def listed() -> set[str]:
        return {each["id"] for _ in range(4) for each in server.ask("/v1/models")["data"]}

    given = {"lora_name": "tuned", "lora_path": str(adapter)}
    assert server.ask("/v1/load_lora_adapter", ADMIN, **given) == {"status": "loaded"}
    body = {"model": "tuned", "prompt": "x", "max_tokens": 900, "temperature": 0}
    for _ in range(4):
        assert server.status("/v1/completions", **{**body, "max_tokens": 1}) == 200
    with server.open("/v1/completions", **body, stream=True) as stream:
        stream.readline()
        assert server.status("/v1/unload_lora_adapter", ADMIN, lora_name="tuned") == 409
        for _ in range(4):
            assert server.status("/v1/completions", **{**body, "max_tokens": 1}) == 200
    # The client has gone; its engine may still be at a step of it.
    SUPPORT["wait_until"](
        lambda: server.status("/v1/unload_lora_adapter", ADMIN, lora_name="tuned") == 200,
        "it is unloaded",
    )
    assert "tuned" not in listed()
    for _ in range(4):
        assert server.status("/v1/completions", **body) == 404


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine has as many as its ranks, and no other engine has them."""
    monkeypatch.setattr(serve, "torch_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cuda, two = DeviceOptions("cuda"), EngineRankOptions(tp=2)
    assert serve._devices(two, DeviceOptions("cpu"), 3) == [{}] * 3
    names = [each["CUDA_VISIBLE_DEVICES"] for each in serve._devices(two, cuda, 2)]
    assert names == ["0,1", "2,3"]
    with pytest.raises(UsageError, match="3 engines of 2 ranks need 6 devices, and there are 4"):
        serve._devices(two, cuda, 3)
    with pytest.raises(UsageError, match="it is one device"):
        serve._devices(two, DeviceOptions("cuda:1"), 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    names = [each["CUDA_VISIBLE_DEVICES"] for each in serve._devices(EngineRankOptions(), cuda, 2)]
    assert names == ["5", "GPU-7"]


def test_prefixes() -> None:
    """They are those of the bytes before each doubled length."""
    beginning = b"x" * 600
    assert prefixes_of(beginning + b"y" * 500)[:2] == prefixes_of(beginning)
    assert prefixes_of(b"z" + beginning)[0] != prefixes_of(beginning)[0]
    assert prefixes_of(b"x" * 255) == []
