"""A model is a folder or an id of the hub, and what is neither is explained."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
import huggingface_hub
import pytest
from huggingface_hub import errors

from vllm_module.errors import CheckpointFormatError
from vllm_module.weights import resolve


def test_what_exists_is_returned_without_the_hub(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert resolve(str(tmp_path), None) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve("owner/name", "main") == Path("owner/name")


@pytest.mark.parametrize("model", ["/no/such", "./absent", "../absent", "~/absent", "a/b/c"])
def test_a_path_that_does_not_exist_is_called_one(model: str, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(CheckpointFormatError, match=r"the folder .* does not exist"):
        resolve(model, None)


def test_weights_configuration_and_tokenizer_are_downloaded(tmp_path: Path, monkeypatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        (tmp_path / "m.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/name", "v1") == tmp_path
    assert (asked["repo_id"], asked["revision"]) == ("owner/name", "v1")
    names = ["config.json", "m.safetensors", "tokenizer.json", "tokenizer.model", "merges.txt"]
    names += ["modules.json", "1_Pooling/config.json", "qwen.tiktoken"]
    unwanted = ["m.bin", "consolidated.safetensors", "original/m.safetensors", "m.gguf"]
    unwanted += ["onnx/config.json", "training/m.safetensors"]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects(names + unwanted, **patterns)) == names


def test_python_files_are_downloaded_only_for_who_trusts_them(tmp_path: Path, monkeypatch) -> None:
    """Code is asked for with its revision, and not at all by default."""
    asked: list[tuple[str, bool]] = []

    def download(repo_id: str, revision: str, allow_patterns: list[str], **_: Any) -> str:
        asked.append((revision, "*.py" in allow_patterns))
        (tmp_path / "m.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for code in (False, True):
        resolve("owner/name", "v1", code=code)
    assert asked == [("v1", False), ("v1", True)]


@pytest.mark.parametrize("present", ["m.safetensors", "pytorch_model.bin", "m.pt", "m.gguf"])
def test_one_format_of_the_weights_is_downloaded(present: str, tmp_path: Path, monkeypatch) -> None:
    """Weights of torch.save are downloaded where there are no others, without a trainer's state."""
    names = [present, "m.pt", "config.json", "training_args.bin", "optimizer.pt", "m.h5"]

    def download(repo_id: str, allow_patterns: list[str], ignore_patterns: Any, **_: Any) -> str:
        chosen = huggingface_hub.utils.filter_repo_objects(
            names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for name in chosen:
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve("owner/name", None)
    weights = "m.pt" if present == "m.gguf" else present
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", weights}


@pytest.mark.parametrize(
    ("load_format", "expected"),
    [
        ("auto", {"m.safetensors"}),
        ("safetensors", {"m.safetensors"}),
        ("pt", {"m.bin"}),
        ("npcache", {"m.bin"}),
        ("dcp", {".metadata", "__0_0.distcp", "__1_0.distcp"}),
        ("dummy", set()),
    ],
)
def test_the_format_that_is_asked_for_is_downloaded(
    load_format: str, expected: set[str], tmp_path: Path, monkeypatch
) -> None:
    """Where the hub has several formats, no other one comes; dummy weights need none."""

    def download(repo_id: str, allow_patterns: list[str], ignore_patterns: Any, **_: Any) -> str:
        names = ["config.json", "m.safetensors", "m.bin", "m.pt", ".metadata", "__0_0.distcp"]
        names += ["__1_0.distcp", "big/m.gguf", "big/__0_0.distcp"]
        options: Any = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        for name in huggingface_hub.utils.filter_repo_objects(names, **options):
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve("owner/name", None, load_format=load_format)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"} | expected


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["m-Q4_0.gguf", "m-Q8_0.gguf"], None),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "big/m.gguf", "other/m.gguf"], 2),
        (["m.gguf"], 1),
        (ConnectionError("offline"), 0),
    ],
)
def test_several_models_in_gguf_files_are_not_downloaded(
    names: Any, chosen: int | None, tmp_path: Path, monkeypatch
) -> None:
    """Quantizations of a model are listed; the parts of one, and what is cached, are taken."""

    def list_files(*_: object, **__: object) -> list[str]:
        if isinstance(names, Exception):
            raise names
        return names

    def download(repo_id: str, allow_patterns: list[str], ignore_patterns: Any, **_: Any) -> str:
        assert chosen is not None, "the files were listed before"
        options: Any = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        for name in huggingface_hub.utils.filter_repo_objects(names if chosen else [], **options):
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", list_files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    if chosen is None:
        with pytest.raises(CheckpointFormatError, match=r"several models.*m-Q4_0.gguf, m-Q8_0"):
            resolve("owner/name", None, load_format="gguf")
    else:
        resolve("owner/name", None, load_format="gguf")
        assert len(list(tmp_path.iterdir())) == chosen


def test_a_signature_in_an_error_of_the_hub_is_not_shown(monkeypatch) -> None:
    """Signed URLs of its storage give access to the file; neither message nor cause has them."""

    def fail(*_: object, **__: object) -> str:
        raise RuntimeError("403 at https://u:pw@cdn.example/f?X-Amz-Signature=SIG&token=abc")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)  # no test asks the hub itself
    with pytest.raises(CheckpointFormatError, match=r"failed \(403 at .*cdn.example") as refused:
        resolve("owner/name", None)
    assert not any(secret in str(refused.value) for secret in ("SIG", "abc", "u:pw"))
    assert refused.value.__suppress_context__
    assert refused.value.__cause__ is None


def test_a_token_that_no_header_can_have_is_not_shown(monkeypatch) -> None:
    """The library below huggingface_hub shows the header."""

    def fail(*_: object, token: str, **__: object) -> str:
        headers = [("Host", "hub"), ("Authorization", f"Bearer {token}")]
        raise AssertionError(h11.Request(method="GET", target="/", headers=headers))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)  # no test asks the hub itself
    with pytest.raises(CheckpointFormatError, match="Illegal header value") as refused:
        resolve("owner/name", None, token="hf_SIG\n")
    assert "SIG" not in str(refused.value)


def hub_error(kind: type[Exception]) -> Exception:
    if issubclass(kind, errors.HfHubHTTPError):
        return kind("hub", response=SimpleNamespace(headers={}, request=None))
    return kind("hub")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.HFValidationError, "nor an id of the hub"),
        (errors.GatedRepoError, "accept the terms"),
        (errors.RevisionNotFoundError, "'owner/name' at revision 'v1': .* not this revision"),
        (errors.RepositoryNotFoundError, "no such model on the hub; check the spelling"),
        (errors.LocalEntryNotFoundError, "the hub cannot be reached"),
        (errors.OfflineModeIsEnabled, "the hub cannot be reached"),
        (errors.HfHubHTTPError, r"the download failed \(hub\); try again"),
        (ConnectionError, "the download failed"),
        (RuntimeError, r"the download failed \(hub\); try again"),  # as its client for Xet raises
    ],
)
def test_an_error_of_the_hub_says_what_to_do(kind, message: str, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)  # no test asks the hub itself
    with pytest.raises(CheckpointFormatError, match=message):
        resolve("owner/name", "v1")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_called_one(code: int, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)  # no test asks the hub itself
    with pytest.raises(CheckpointFormatError, match=f"{os.strerror(code)}.*; free space") as full:
        resolve("owner/name", None)
    assert "'owner/name'" in str(full.value)


def test_a_name_that_no_disk_can_hold_is_no_crash() -> None:
    for model in ("/" + "x" * 5000, "./a\0b", "/\ud800\x1b[2J"):
        with pytest.raises(CheckpointFormatError, match="does not exist") as refusal:
            resolve(model, None)
        assert str(refusal.value).isprintable()


def test_an_invalid_id_is_refused_by_the_real_hub_client() -> None:
    with pytest.raises(CheckpointFormatError, match="nor an id of the hub"):
        resolve("no spaces allowed", None)


@pytest.mark.parametrize("header", ["X-Linked-Etag", "X-Repo-Commit", None])
def test_a_tag_that_is_a_path_names_no_file(header: str | None, tmp_path: Path) -> None:
    """A mirror whose tags are paths has nothing written there, and is told about."""
    outside = tmp_path / "outside"
    headers = {"ETag": '"e"', "X-Repo-Commit": "c" * 40}
    headers |= {header: f'"{outside}"'} if header else {}

    class Mirror(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            file = {"type": "file", "path": "config.json", "size": 2, "oid": "a" * 40}
            about = {
                "id": "owner/name",
                "sha": "c" * 40,
                "siblings": [{"rfilename": "config.json"}],
            }
            api = "/api/" in self.path
            data = json.dumps([file] if "/tree/" in self.path else about if api else {}).encode()
            self.send_response(200)
            for name, value in ({} if api else headers).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET  # noqa: N815  # the library's name

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        code = "from vllm_module.weights import resolve; resolve('owner/name', None, weights=False)"
        where = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **where},
            text=True,
            capture_output=True,
        )
    finally:
        server.shutdown()
        server.server_close()
    assert not outside.exists()
    if header is None:
        assert done.returncode == 0, done.stderr
    else:
        assert f"the server's {header} is a path" in done.stderr
