"""The commands do with a URL what they do with the folder that it leads to."""

from __future__ import annotations

import io
import json
import re
import runpy
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import obstore
import pytest
from moto.server import ThreadedMotoServer
from safetensors.torch import load_file

from vllm_module.kernels.digest.digest import digest_box
from vllm_module.weights.digests import digests_file

servers: Any = runpy.run_path(str(Path(__file__).parents[1] / "weights" / "stores_server.py"))
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PROMPT = ("--prompt", "hello", "--max-new-tokens", 4, "--max-model-len", 32)
COMMANDS: dict[str, tuple[Any, ...]] = {
    "inspect": ("inspect", "--json"),
    "plan": ("plan", "--tp", 2, "--json"),
    "load": ("load", "--tp", 2, "--device", "cpu"),
    "load --digests": ("load", "--tp", 2, "--device", "cpu", "--digests"),
    "digest": ("digest", "--json"),
    "check": ("check", "--tokens", 3, "--dtype", "float32", "--device", "cpu"),
    "generate": ("generate", *PROMPT, "--device", "cpu"),
    "chat": ("chat", "--max-model-len", 32, "--device", "cpu"),
}


@pytest.fixture(scope="module")
def local(with_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "model"
    shutil.copytree(with_text, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    tensors = {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}
    digests = {name: digest_box(tensor).hex for name, tensor in tensors.items()}
    (path / "digests.json").write_text(json.dumps(digests_file([digests])))
    return path


@pytest.fixture(scope="module")
def urls(local: Path) -> Iterator[dict[str, str]]:
    """Serve the folder as S3 does, and over HTTP."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    with pytest.MonkeyPatch.context() as patch, servers["serving"](local.parent) as server:
        for name in ("http_proxy", "all_proxy"):
            patch.delenv(name, raising=False)
            patch.delenv(name.upper(), raising=False)
        endpoint = "http://{}:{}".format(*moto.get_host_and_port())
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIAHIDDEN")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "HIDDEN")
        patch.setenv("AWS_REGION", "us-east-1")
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
        bucket = obstore.store.S3Store("bucket", client_options={"allow_http": True})
        for path in local.iterdir():
            obstore.put(bucket, f"model/{path.name}", path.read_bytes())
        try:
            yield {"s3": "s3://bucket/model", "http": f"{server.url}/model"}
        finally:
            moto.stop()


def said(result: Any) -> str:
    """Return what a command printed, without times, memory and the checkpoint's name."""
    assert result.code == 0, result.err
    assert "HIDDEN" not in result.out + result.err
    text = re.sub(r"(s3|http)://[\w.:/-]*model|/[\w./-]*/store\d*/model", "CKPT", result.out)
    text = re.sub(r"\d+(\.\d+)? ?(k|M|G|Ki|Mi|Gi)?(B/s|B|ms|s)\b", "N", text)
    return re.sub(r" +", " ", text)


@pytest.mark.parametrize(
    ("command", "scheme"),
    [
        ("inspect", "s3"),
        ("plan", "http"),
        ("load", "s3"),
        ("generate", "http"),
        ("chat", "s3"),
        ("digest", "http"),
        ("load --digests", "s3"),
        ("check", "http"),
    ],
)
def test_a_command_says_of_a_url_what_it_says_of_the_folder(
    run: Callable[..., Any],
    local: Path,
    urls: dict[str, str],
    command: str,
    scheme: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Output, tokens and exit code are the same; with --download-dir, what was fetched is kept."""
    name, *options = COMMANDS[command]
    printed = []
    for source in (str(local), urls[scheme]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        printed.append(said(run(name, source, *options, "--download-dir", tmp_path)))
    assert printed[0] == printed[1]
    assert name != "digest" or json.loads(printed[1])["different"] == []
    assert list(tmp_path.rglob("*"))


def test_a_package_that_is_missing_is_named(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket without obstore is one line, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    result = run("load", "s3://bucket/folder")
    assert (result.code, result.out) == (1, "")
    assert "pip install 'obstore>=0.8' (the extra vllm-module[stores])" in result.err
    assert "Traceback" not in result.err


def test_an_architecture_that_is_not_known_is_named(
    run: Callable[..., Any], local: Path, urls: dict[str, str]
) -> None:
    """Inspecting a GGUF file of a store says so, and not that there is no such folder."""
    writer = gguf.GGUFWriter(local.parent / "other.gguf", "other")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    url = f"{urls['http'].removesuffix('model')}other.gguf"
    result = run("inspect", url)
    assert result.code == 0
    assert f"{url}: general.architecture is 'other'" in " ".join(result.out.split())
