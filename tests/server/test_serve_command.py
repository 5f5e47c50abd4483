"""``vllm-module serve`` as a process: the lines of the README, its start and its stop."""

from __future__ import annotations

import json
import os
import queue
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import DeviceConfig, ModelConfig, get_model
from vllm_module.cli import main
from vllm_module.cli.commands.serve import serve
from vllm_module.server.app import ROUTES

ROOT = Path(__file__).parents[2]
SUPPORT = runpy.run_path(str(ROOT / "tests/support.py"))
GUIDE = ROOT / "docs/serving.md"
BLOCK = re.search(r"## Serve\n\n```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def status(url: str | urllib.request.Request) -> int:
    """Return the status of an answer; 0 where nobody listens."""
    try:
        with urllib.request.urlopen(url) as answer:
            found: int = answer.status
            return found
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def test_help_and_guide_have_every_path() -> None:
    """What the server answers is in the help and in the guide, and neither has another path."""
    answered = {path for _, path, _, _ in ROUTES} | {"/"}
    section = re.search(r"## Paths\n(.*?)\n## ", GUIDE.read_text(), re.DOTALL)
    assert section is not None
    columns = " ".join(line.split("|")[1] for line in section[1].splitlines() if "|" in line)
    assert set(re.findall(r"`(?:GET|POST) ([^`]+)`", columns)) == answered
    assert serve.__doc__ is not None
    told = re.search(r"The paths are (.*?)\. While", serve.__doc__, re.DOTALL)
    assert told is not None
    assert set(re.findall(r"/[\w/]*", told[1])) == answered


def test_the_lines_of_the_readme(folder: Path) -> None:
    """The server loads, answers the README's request, and finishes a stream when it is stopped."""
    assert BLOCK is not None
    _, serve, curl = (shlex.split(line[2:]) for line in BLOCK.group(1).splitlines())
    port = SUPPORT["free_port"]()
    base = f"http://127.0.0.1:{port}"
    arguments = [str(folder) if word == "CKPT" else word for word in serve[1:]]
    arguments = [str(port) if word == "8000" else word for word in arguments]
    options = shlex.split("--device cpu --max-num-seqs 3 --kv-cache-memory-bytes 131072")
    options += ["--allowed-origins", "https://a.example", "--allowed-origins", "https://b.example"]
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_module.cli", *arguments, *options, "--enforce-eager"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"VLLM_MODULE_ADMIN_KEY": "one two"},
    )
    try:
        assert process.stderr is not None
        first = process.stderr.readline()  # long before the last byte is loaded
        assert first == f"loading {folder}, listening at {base}\n"
        seen = set()

        def is_up() -> bool:
            seen.add(status(f"{base}/health"))
            assert process.poll() is None
            return 200 in seen

        SUPPORT["wait_until"](is_up, "the server answers")
        assert 503 in seen
        body = curl[curl.index("-d") + 1].encode()
        headers = dict([curl[curl.index("-H") + 1].split(": ")])
        url = curl[1].replace("8000", str(port))
        request = urllib.request.Request(url, body, headers)
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
        assert found["usage"]["completion_tokens"] == 9
        assert found["model"] == str(folder)
        for origin, allowed in (("https://b.example", 200), ("https://c.example", 400)):
            asked = {
                "Origin": origin, "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization, content-type",
            }  # fmt: skip
            request = urllib.request.Request(url, None, asked, method="OPTIONS")
            assert status(request) == allowed
            request = urllib.request.Request(url, body, {**headers, "Origin": origin})
            with urllib.request.urlopen(request) as answer:
                told = answer.headers["Access-Control-Allow-Origin"]
            assert told == (origin if allowed == 200 else None)
        with urllib.request.urlopen(f"{base}/summary") as answer:
            facts = json.dumps(json.load(answer))
        assert "3 in a step" in facts
        assert "64 pages of 16 tokens" in facts
        resumed = urllib.request.Request(
            f"{base}/resume", b"", {"Authorization": "Bearer two"}, method="POST"
        )
        with urllib.request.urlopen(resumed) as answer:
            assert answer.status == 200
        long = {"prompt": "hello", "max_tokens": 300, "stream": True, "temperature": 0}
        request = urllib.request.Request(url, json.dumps(long).encode(), headers)
        with urllib.request.urlopen(request) as stream:
            stream.readline()
            process.send_signal(signal.SIGTERM)
            lines = [line for line in stream if line.strip()]
        assert lines[-1] == b"data: [DONE]\n"
        assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
        error = process.communicate(timeout=60)[1]
        assert process.returncode == 0, error
        assert f"serving {folder} at {base}" in error
        assert "hello" not in error
        assert "Bearer" not in error
    finally:
        process.kill()
        process.communicate()


def test_stop_seconds_end_requests_that_go_on(folder: Path, tmp_path: Path) -> None:
    """After SIGTERM they have this second, and are told then; that is no failure of the command."""
    model = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    # So long that the limit of tokens does not end it.
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 20}))
    base = f"http://127.0.0.1:{SUPPORT['free_port']()}"
    log = tmp_path / "log"
    process = SUPPORT["start_command"](
        "serve", model, "--device", "cpu", "--port", base.rpartition(":")[2],
        "--stop-seconds", "1", log=log,
    )  # fmt: skip
    try:

        def is_up() -> bool:
            assert process.is_alive()
            return status(f"{base}/health") == 200

        SUPPORT["wait_until"](is_up, "the server answers")
        long = {"prompt": "hello", "max_tokens": 1 << 19, "stream": True, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        url, answers = f"{base}/v1/completions", queue.SimpleQueue[tuple[int, Any]]()

        def ask_for_all() -> None:
            body = json.dumps(long | {"stream": False}).encode()
            try:
                urllib.request.urlopen(urllib.request.Request(url, body, headers))
            except urllib.error.HTTPError as error:
                with error:
                    answers.put((error.code, json.load(error)))

        def runs() -> bool:
            with urllib.request.urlopen(f"{base}/metrics") as answer:
                return re.search(rb"num_requests_running\S* 1", answer.read()) is not None

        whole = threading.Thread(target=ask_for_all)
        whole.start()
        SUPPORT["wait_until"](runs, "the whole answer is being made")
        request = urllib.request.Request(url, json.dumps(long).encode(), headers)
        with urllib.request.urlopen(request) as stream:
            stream.readline()
            begin = time.monotonic()
            os.kill(process.pid, signal.SIGTERM)
            lines = []
            with suppress(HTTPException, ConnectionError):
                for line in stream:
                    lines.append(line)
            seconds = time.monotonic() - begin
        process.join(60)
        error = log.read_text()
        assert process.exitcode == 0, error
        assert len(lines) > 10
        assert b"data: [DONE]\n" not in lines
        told = json.loads([line for line in lines if line.strip()][-1][6:])["error"]
        whole.join()
        code, answer = answers.get(timeout=0)
        assert (code, answer["error"]) == (503, told)
        assert "server has stopped" in told["message"]
        assert 1 <= seconds < 15, "the default is 30"
        assert "Traceback" not in error
    finally:
        process.kill()
        process.join()


def test_another_engine_loads_from_a_server(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With --weights-port, by the admin key; and without a key, the option is refused."""
    assert main(["serve", str(folder), "--weights-port", "1"]) == 2
    assert "it needs an --admin-key" in capsys.readouterr().err
    port, weights = SUPPORT["free_port"](), SUPPORT["free_port"]()
    process = SUPPORT["start_command"](
        "serve", folder, "--device", "cpu", "--port", port, "--weights-port", weights,
        log=tmp_path / "log", environment={"VLLM_MODULE_ADMIN_KEY": "key-of-operators"},
    )  # fmt: skip
    try:

        def is_up() -> bool:
            assert process.is_alive()
            return status(f"http://127.0.0.1:{port}/health") == 200

        SUPPORT["wait_until"](is_up, "the server answers")
        monkeypatch.setenv("VLLM_MODULE_REPLICA_TOKEN", "key-of-operators")
        found, expected = (
            dict(
                get_model(
                    model_config=ModelConfig(model=model), device_config=DeviceConfig(device="cpu")
                ).named_parameters()
            )
            for model in (f"replica://127.0.0.1:{weights}", str(folder))
        )
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    finally:
        process.kill()
        process.join()


def test_what_is_refused_at_once(
    folder: Path, start: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that is taken, half of TLS, and a missing extra are one message each."""
    with start(None) as other:
        assert main(["serve", str(folder), "--port", str(other.port)]) == 1
    assert (
        f"cannot listen on 127.0.0.1:{other.port}: Address already in use"
        in capsys.readouterr().err
    )
    assert main(["serve", str(folder), "--ssl-certfile", "x"]) == 2
    assert "TLS needs both files" in capsys.readouterr().err
    assert (
        main(["serve", str(folder), "--port", "0", "--ssl-certfile", "x", "--ssl-keyfile", "y"])
        == 1
    )
    assert "cannot listen on 127.0.0.1:0: No such file" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.startswith("vllm_module.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(folder)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "the extra vllm-module[serve]" in error


def test_a_checkpoint_that_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is that of every command, and the server's thread has ended.

    A log says before what is loaded, and where health is answered; a terminal has the progress.
    """
    before = {*threading.enumerate()}  # one of another test may end meanwhile
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    loading, error = capsys.readouterr().err.split("\n", 1)
    assert re.fullmatch(rf"loading {tmp_path}, listening at http://127\.0\.0\.1:\d+", loading)
    assert error.startswith("error: ")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats standard error as a terminal
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    error = capsys.readouterr().err
    assert "error:" in error
    assert "listening at" not in error
    assert {*threading.enumerate()} <= before
