"""Adapters are models of a server, which operators load and unload."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.torch import load_file, save_file

from vllm_module import LLM, SamplingParams
from vllm_module.cli import main

SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
ADMIN = "sk-admin"
TEXT = "hello adapters"
FILE = "adapter_model.safetensors"


def test_an_adapter_is_a_model(server: Any, sync: LLM, adapter: Path) -> None:
    """It is loaded, listed, asked by its name beside the model, and unloaded."""
    given = {"lora_name": "tuned", "lora_path": str(adapter)}
    assert server.ask("POST", "/v1/load_lora_adapter", given)[0] == 401
    code, answer = server.ask("POST", "/v1/load_lora_adapter", given, ADMIN)
    assert (code, answer) == (200, {"status": "loaded"})
    try:
        for name, why in (
            ("tuned", "called 'tuned' already"),
            ("tiny", "called 'tiny'"),
            ("other-name", "called 'other-name'"),
        ):
            code, answer = server.ask(
                "POST", "/v1/load_lora_adapter", {**given, "lora_name": name}, ADMIN
            )
            assert code == 400
            assert why in answer["error"]["message"]
        client = server.client()
        listed = {each.id: each.model_dump() for each in client.models.list().data}
        assert listed.keys() == {"tiny", "other-name", "tuned"}
        assert listed["tuned"]["parent"] == "tiny"
        assert listed["tuned"]["root"] == str(adapter)

        sync.load_adapter("tuned", adapter)
        params = SamplingParams(temperature=0, max_tokens=12)
        expected = {
            name: sync.generate(TEXT, params, use_tqdm=False, lora_request=asked)[0].outputs[0].text
            for name, asked in (("tiny", None), ("tuned", "tuned"))
        }
        assert expected["tiny"] != expected["tuned"]
        for name, text in expected.items():
            answer = client.completions.create(
                model=name, prompt=TEXT, max_tokens=12, temperature=0
            )
            assert (answer.model, answer.choices[0].text) == (name, text)
        said = {
            name: client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": TEXT}],
                max_tokens=12,
                temperature=0,
            )
            .choices[0]
            .message.content
            for name in expected
        }
        assert said["tiny"] != said["tuned"]
        code, answer = server.ask("POST", "/v1/embeddings", {"model": "tuned", "input": TEXT})
        assert code == 400
        assert "adapters generate text" in answer["error"]["message"]
        with client.completions.create(
            model="tuned", prompt=TEXT, max_tokens=900, stream=True
        ) as stream:
            next(iter(stream))
            code, answer = server.ask(
                "POST", "/v1/unload_lora_adapter", {"lora_name": "tuned"}, ADMIN
            )
            assert code == 409
            assert "1 requests use the adapter" in answer["error"]["message"]
    finally:
        while (
            server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "tuned"}, ADMIN)[0] == 409
        ):
            pass
    with pytest.raises(openai.NotFoundError, match="'tuned' does not exist"):
        client.completions.create(model="tuned", prompt=TEXT)
    code, answer = server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "tuned"}, ADMIN)
    assert code == 400
    assert "no adapter is called 'tuned'" in answer["error"]["message"]


def test_an_update_in_place(server: Any, sync: LLM, adapter: Path, tmp_path: Path) -> None:
    """With load_inplace, an adapter is loaded, or new files of it are written into it."""
    doubled = {name: 2 * each for name, each in load_file(adapter / FILE).items()}
    save_file(doubled, tmp_path / FILE)
    shutil.copy(adapter / "adapter_config.json", tmp_path)
    sync.load_adapter("doubled", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=12)
    (wanted,) = sync.generate(TEXT, params, use_tqdm=False, lora_request="doubled")
    sync.unload_adapter("doubled")
    texts = []
    for path in (adapter, tmp_path):
        given = {"lora_name": "pushed", "lora_path": str(path), "load_inplace": True}
        code, answer = server.ask("POST", "/v1/load_lora_adapter", given, ADMIN)
        assert (code, answer) == (200, {"status": "loaded"})
        completion = server.client().completions.create(
            model="pushed", prompt=TEXT, max_tokens=12, temperature=0
        )
        texts.append(completion.choices[0].text)
    assert texts[1] == wanted.outputs[0].text != texts[0]
    del given["load_inplace"]
    code, answer = server.ask("POST", "/v1/load_lora_adapter", given, ADMIN)
    assert code == 400
    assert "called 'pushed' already" in answer["error"]["message"]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 3}))
    given["load_inplace"] = True
    code, answer = server.ask("POST", "/v1/load_lora_adapter", given, ADMIN)
    assert code == 400
    assert "lora_alpha 3.0 for" in answer["error"]["message"]
    given = {"lora_name": "pushed"}
    assert server.ask("POST", "/v1/unload_lora_adapter", given, ADMIN)[0] == 200


def test_a_wrong_folder(server: Any, tmp_path: Path) -> None:
    for path in (str(tmp_path), "~no-such-user/adapter"):
        given = {"lora_name": "wrong", "lora_path": path}
        code, answer = server.ask("POST", "/v1/load_lora_adapter", given, ADMIN)
        assert code == 400
        assert "adapter_config.json" in answer["error"]["message"]


def test_the_command(folder: Path, sync: LLM, adapter: Path, tmp_path: Path) -> None:
    """Adapters of --lora-modules are models from the start."""
    port = SUPPORT["free_port"]()
    process = SUPPORT["start_command"](
        "serve", folder, "--port", port,
        "--max-loras", "1", "--max-cpu-loras", "1", "--lora-modules", f"one={adapter}",
        "--lora-modules", f"two={adapter}", "--device", "cpu", "--dtype", "float32",
        log=tmp_path / "log",
    )  # fmt: skip
    sync.load_adapter("served", adapter)
    params = SamplingParams(temperature=0, max_tokens=12)
    (wanted,) = sync.generate(TEXT, params, use_tqdm=False, lora_request="served")
    sync.unload_adapter("served")
    body = {"prompt": TEXT, "max_tokens": 12, "temperature": 0}

    def ask(path: str, **entries: Any) -> Any:
        data = json.dumps(body | entries).encode() if entries else None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def is_up() -> bool:
        assert process.is_alive()
        try:
            return bool(ask("/v1/models")["data"])
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    try:
        SUPPORT["wait_until"](is_up, "the server answers")
        assert [each["id"] for each in ask("/v1/models")["data"]] == [str(folder), "one", "two"]
        texts = [
            ask("/v1/completions", model=name)["choices"][0]["text"] for name in ("one", "two")
        ]
        assert texts == [wanted.outputs[0].text] * 2
        assert ask("/v1/completions", model=str(folder))["choices"][0]["text"] != texts[0]
        os.kill(process.pid, signal.SIGTERM)
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["x"], "expected NAME=DIR, got 'x'"),
        (["=x"], "expected NAME=DIR"),
        (["x=y", "x=z"], "two models are called 'x'"),
        (["named=y"], "two models are called 'named'"),
    ],
)
def test_wrong_usage(
    folder: Path, given: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [word for each in given for word in ("--lora-modules", each)]
    assert main(["serve", str(folder), "--served-model-name", "named", *options]) == 2
    assert why in capsys.readouterr().err
