"""Updates that a trainer writes to a bucket."""

from __future__ import annotations

import gc
import http.server
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from moto.server import ThreadedMotoServer

from vllm_module.errors import WeightReadError
from vllm_module.weights import find_changes, open_update, write_update
from vllm_module.weights.handle import TensorHandle
from vllm_module.weights.stores import obstore_client, store

URL = "s3://updates/mail box/step-1.safetensors"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Use keys of a test and a folder for temporary files, in which nothing is left."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIAHIDDEN",
        "AWS_SECRET_ACCESS_KEY": "HIDDEN",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(store, "_FIRST_DELAY", 1e-6)  # failed requests follow at once
    yield
    gc.collect()  # sources of open_update have folders there until they are collected
    assert list(folder.glob("vllm-module-*")) == []


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket of moto's server. Servers of one process have the same buckets."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        endpoint = "http://{}:{}".format(*moto.get_host_and_port())
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/updates", method="PUT")).close()
        made = obstore.store.S3Store("updates", client_options={"allow_http": True})
        obstore.delete(made, names(made))
        yield made
    finally:
        moto.stop()


def names(bucket: Any) -> list[str]:
    return [each["path"] for each in obstore.list(bucket).collect()]


class Uploads(http.server.BaseHTTPRequestHandler):
    """Answers uploads with planned codes, and keeps their bodies."""

    answers: list[int]
    bodies: list[bytes]

    def log_message(self, format: str, *args: Any) -> None:  # what it would print
        pass

    def do_PUT(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.answers.pop(0))
        self.send_header("ETag", '"one"')
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Uploads]]:
    handler: Any = type("PlannedUploads", (Uploads,), {"answers": [], "bodies": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield handler
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("parts", [1, 2])
def test_an_update_in_a_bucket(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """The object has the bytes of the local file, in one request and in parts, and replaces one."""
    whole = torch.randn(2_500_000, generator=torch.Generator().manual_seed(0))
    old = torch.zeros(40)
    weights = {"w": find_changes(old, old.index_fill(0, torch.tensor([3, 9]), 1.0)), "v": whole}
    if parts == 1:
        monkeypatch.setattr(obstore_client, "_PARTS", 1)  # a part of 8 MiB would be too small
    path = tmp_path / "u.safetensors"
    for version in ("1", "2"):
        for place in (path, URL):
            write_update(place, weights, version=version, after="0", digests=True)
        found = obstore.get(bucket, "mail box/step-1.safetensors")
        assert bytes(found.bytes()) == path.read_bytes()
        # S3 gives the object of an upload in parts a tag that ends with their number.
        tag = str(found.meta["e_tag"]).strip('"')
        assert tag.endswith("-2") is (parts > 1), tag
        with open_update(URL) as update:
            assert (update.version, update.after) == (version, "0")
            assert update["w"].indices.tolist() == [3, 9]
            assert torch.equal(update["v"].read(), whole)
    assert names(bucket) == ["mail box/step-1.safetensors"]


def test_what_is_refused_is_not_uploaded(bucket: Any) -> None:
    """An older object stays."""
    write_update(URL, {"w": torch.ones(3)}, version="a")
    for weights in ({"w": torch.full((3,), float("nan"))}, {"w": torch.ones(3, device="meta")}):
        with pytest.raises(WeightReadError, match="w "):
            write_update(URL, weights, version="b")
    with open_update(URL) as update:
        assert update.version == "a"
    assert len(names(bucket)) == 1


def test_an_upload_is_tried_again(uploads: type[Uploads], tmp_path: Path) -> None:
    """A store that is busy gets the same bytes again."""
    uploads.answers += [503, 429, 200]
    for place in (URL, tmp_path / "u.safetensors"):
        write_update(place, {"w": torch.ones(3)}, version="a")
    assert uploads.bodies == [(tmp_path / "u.safetensors").read_bytes()] * 3


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (403, "403.*: no access to write it; set AWS_ACCESS_KEY_ID"),
        (404, "404.*: no such file or bucket; check the URL"),
        (400, "400.*; check the region"),
        (503, "it could not be written in 1 try: .*503.*; try again when the store"),
    ],
)
def test_an_upload_that_fails_is_an_error_of_the_system(
    uploads: type[Uploads], monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    """As a disk's is: it has the URL and the reason, and no key."""
    monkeypatch.setattr(store, "RETRY_SECONDS", 0.0)
    uploads.answers.append(code)
    with pytest.raises(OSError, match=f"{URL}: .*{message}") as error:
        write_update(URL, {"w": torch.ones(3)}, version="a")
    assert "HIDDEN" not in str(error.value)
    assert len(uploads.bodies) == 1


def test_a_bucket_that_is_not_there(bucket: Any) -> None:
    """The answer's code is in the message."""
    del bucket  # another one
    with pytest.raises(OSError, match="NoSuchBucket"):
        write_update("s3://other/u.safetensors", {"w": torch.ones(3)}, version="a")


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:9/u.safetensors",
        "http://127.0.0.1:9/u.safetensors",
        "replica://127.0.0.1:9/u.safetensors",
        "hf://owner/name/u.safetensors",
        "s3://u.safetensors",
        "s3:///u.safetensors",
        "other://bucket/u.safetensors",
        "s3://key:HIDDEN@bucket/u.safetensors",
        "s3://bucket/../u.safetensors",
    ],
)
def test_urls_that_cannot_be_written(url: str) -> None:
    """They are refused before a tensor is read; a secret in the URL is not shown."""

    class Unread(TensorHandle):
        def read(self) -> torch.Tensor:
            raise AssertionError("it was read")

    weights = {"w": Unread("w", torch.ones(3))}
    with pytest.raises(ValueError, match=r"cannot be written|expected|user name|is empty") as error:
        write_update(url, weights, version="a")
    assert "HIDDEN" not in str(error.value)
