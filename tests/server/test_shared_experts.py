"""Engines behind one address that share experts, from the command to its end."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_module import LLM, SamplingParams

serve: Any = importlib.import_module("vllm_module.cli.commands.serve")
TESTS = Path(__file__).parents[1]
SUPPORT = runpy.run_path(str(TESTS / "support.py"))
PIPELINE = runpy.run_path(str(TESTS / "distributed" / "test_pipeline.py"))
PROMPTS = [each["prompt_token_ids"] for each in PIPELINE["PROMPTS"][:4]]


def children(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found |= {int(each) for each in (task / "children").read_text().split()}
    return found


def engines(server: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of the engines."""
    commands = {each: Path(f"/proc/{each}/cmdline").read_bytes() for each in children(server.pid)}
    return [pid for pid, command in commands.items() if b"--enable-expert-parallel" in command]


@pytest.fixture
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = PIPELINE["write"](tmp_path_factory.mktemp("mixtral") / "1", "mixtral")
    return found


@pytest.fixture
def server(checkpoint: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command and its address, once its engines answer."""
    port = SUPPORT["free_port"]()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_module.cli", "serve", str(checkpoint), "--port", str(port),
         "--data-parallel-size", "2", "--enable-expert-parallel", "--device", "cpu",
         "--dtype", "float32", "--served-model-name", "mixtral"],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:

        def is_up() -> bool:
            assert process.poll() is None
            return ask(url, "/health")[0] == 200

        SUPPORT["wait_until"](is_up, "the server answers")
        yield process, url
    finally:
        process.kill()
        process.communicate()


def ask(url: str, path: str, **body: Any) -> tuple[int, Any]:
    """Return the status and the text of an answer; 0 where nobody listens."""
    headers = {"Content-Type": "application/json"}
    data = json.dumps({"model": "mixtral", **body}).encode() if body else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def test_no_connection_takes_the_port_before_the_engines_meet() -> None:
    """The system chooses ports of connections from 32768 on, unless it is told otherwise."""
    ports = {serve._meeting_port() for _ in range(50)}
    assert len(ports) > 40
    assert max(ports) < 32_768


@pytest.mark.at_length
def test_tokens_are_those_of_one_engine(server: tuple[Any, str], checkpoint: Path) -> None:
    """One request at a time, while the other engine has none, and all at once; then SIGTERM."""
    process, url = server
    with LLM(str(checkpoint), skip_tokenizer_init=True, dtype="float32", device="cpu") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6)
        given = [{"prompt_token_ids": each} for each in PROMPTS]
        outputs = llm.generate(given, params, use_tqdm=False)
        expected = [list(each.outputs[0].token_ids) for each in outputs]
    assert len({token for each in expected for token in each}) > 6

    def tokens(prompt: list[int]) -> list[int]:
        status, text = ask(
            url, "/v1/completions", prompt=prompt, max_tokens=6, temperature=0,
            return_token_ids=True,
        )  # fmt: skip
        assert status == 200, text
        found: list[int] = json.loads(text)["choices"][0]["token_ids"]
        return found

    assert [tokens(each) for each in PROMPTS[:2]] == expected[:2]
    found: dict[int, list[int]] = {}

    def work(index: int) -> None:
        found[index] = tokens(PROMPTS[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(PROMPTS))] == expected

    pids = engines(process)
    assert len(pids) == 2
    process.terminate()
    printed = process.stderr.read()
    assert process.wait() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "Traceback" not in printed
    assert "no more part" not in printed
