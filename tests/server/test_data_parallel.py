"""Several engines behind one address, each a process, and what happens when one ends."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from vllm_module import LLM, SamplingParams
from vllm_module.cli import main
from vllm_module.cli.options import DeviceOptions, EngineRankOptions, UsageError

# Pytest's importlib mode has no imports between test files.
engines = runpy.run_path(str(Path(__file__).with_name("stubs.py")))["engines"]
serve: Any = importlib.import_module("vllm_module.cli.commands.serve")
SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
KEY, ADMIN = "key-of-clients", "key-of-operators"
Until = Callable[[Callable[[], object]], None]


class Replicated(NamedTuple):
    """A server with two engines."""

    process: BaseProcess
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

    def unanswered(self) -> dict[str, float]:
        """Return the number of requests that each engine has."""
        running, waiting = (self.numbers(f"num_requests_{kind}") for kind in ("running", "waiting"))
        return {engine: running[engine] + waiting.get(engine, 0) for engine in running}

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
def starting(folder: Path, log: Path) -> Iterator[Replicated]:
    port = SUPPORT["free_port"]()
    process = SUPPORT["start_command"](
        "serve", folder, "--port", port, "--data-parallel-size", "2", "--device", "cpu",
        "--dtype", "float32", log=log,
        environment={"VLLM_MODULE_API_KEY": KEY, "VLLM_MODULE_ADMIN_KEY": ADMIN},
    )  # fmt: skip
    try:
        yield Replicated(process, f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.join()


@contextmanager
def serving(folder: Path, log: Path) -> Iterator[Replicated]:
    with starting(folder, log) as server:
        seen = set()

        def is_up() -> bool:
            assert server.process.is_alive()
            seen.add(server.status("/health"))
            return 200 in seen

        SUPPORT["wait_until"](is_up, "the server answers")
        assert 503 in seen, "while it is loading"
        yield server


@pytest.fixture(scope="module")
def one_server(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Replicated]]:
    """Return the function that starts a server, unless one runs."""
    servers: list[Replicated] = []
    log = tmp_path_factory.mktemp("server") / "log"
    with ExitStack() as ends:

        def started() -> Replicated:
            if not servers or not servers[-1].process.is_alive():
                servers.append(ends.enter_context(serving(folder, log)))
            return servers[-1]

        yield started


@pytest.fixture
def server(one_server: Callable[[], Replicated]) -> Replicated:
    """A server with two engines, which tests share until one of them ends it."""
    return one_server()


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


def test_engines_that_end(server: Replicated, sync: LLM, until: Until) -> None:
    """The stream of one that is killed ends with an error; what had no answer is done again."""
    stream = server.open(
        "/v1/completions", prompt="streamed", max_tokens=900, temperature=0, stream=True
    )
    with stream:
        stream.readline()
        server.ask("/pause", ADMIN, mode="keep")  # neither request ends before an engine does
        other: list[str] = []
        waiting = threading.Thread(target=lambda: other.append(server.text("whole", 600)))
        waiting.start()
        until(lambda: sorted(server.unanswered().values()) == [1, 1])
        engines = server.engines()
        assert len(engines) == 2
        os.kill(engines[0], signal.SIGKILL)  # of one or the other request
        until(lambda: len(server.unanswered()) == 1)
        server.ask("/resume", ADMIN, model="x")
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
    server.process.join()
    assert server.process.exitcode == 0
    until(lambda: not Path(f"/proc/{engines[1]}").exists())


@pytest.mark.at_length  # so do those of a process in test_front.py
def test_engines_end_with_a_server_that_is_killed(server: Replicated, until: Until) -> None:
    engines = server.engines()
    server.process.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines))


def test_a_server_is_told_to_end_while_its_engines_load(
    folder: Path, tmp_path: Path, until: Until
) -> None:
    """It ends them first, so that they leave no folders behind."""
    with starting(folder, tmp_path / "log") as server:
        until(lambda: len(server.engines()) == 2)
        engines = server.engines()
        server.process.terminate()
        server.process.join()
        assert server.process.exitcode == 0
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
    (tmp_path / "config.json").write_text('{"architectures": ["Nobody')
    port = str(SUPPORT["free_port"]())
    assert main(["serve", str(tmp_path), *several, "--port", port]) == 1
    error = capfd.readouterr().err
    place = f"by 2 engines, listening at http://127.0.0.1:{port}"
    assert error.startswith(f"loading {tmp_path} {place}\n")
    assert "config.json is not valid JSON" in error
    assert re.search(r"engine \d \(pid \d+\) ended with exit code 1 before it had loaded", error)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["serve", str(folder), *several]) == 2
    assert "without torchrun" in capfd.readouterr().err


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
