"""Checkpoints of object stores and web servers: the same bits as from a folder, whatever fails."""

from __future__ import annotations

import base64
import errno
import gc
import itertools
import json
import logging
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import obstore
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer
from safetensors.torch import save_file

from vllm_module import DeviceConfig, ModelConfig, get_model
from vllm_module.build.model_source import ModelSource, build_model
from vllm_module.distributed import run_ranks
from vllm_module.errors import CheckpointFormatError, WeightLoadError, WeightReadError
from vllm_module.models.llama import LlamaConfig
from vllm_module.testing import random_weights, write_checkpoint
from vllm_module.weights import open_checkpoint, source
from vllm_module.weights.cut_rows import ByteRun
from vllm_module.weights.source import Folder, find_source
from vllm_module.weights.stores import http_client, http_connection, spans, store, stored_bytes
from vllm_module.weights.stores import source as stores_source
from vllm_module.weights.stores.client import BusyError
from vllm_module.weights.stores.place import parse

support = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
servers: Any = runpy.run_path(str(Path(__file__).with_name("stores_server.py")))
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
CPU = DeviceConfig(device="cpu")
FILE = "model-00001-of-00002.safetensors"
LIST = "list-type=2"


def write(folder: Path, seed: int = 0) -> None:
    model = build_model(LlamaConfig(**CONFIG), torch.float32, torch.device("cpu"))
    weights = random_weights(model.expected_weights(), seed=seed)
    write_checkpoint(folder, weights, config=CONFIG, files=2)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("served")
    write(folder / "model")
    with servers["serving"](folder) as server:
        yield server


@pytest.fixture
def server(served: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the server without faults; requests are small, and failed ones follow at once."""
    served.fault, served.requests = None, []
    served.counts.clear()
    monkeypatch.setattr(source, "registered_sources", {})
    monkeypatch.setattr(spans, "REQUEST_BYTES", 4096)
    monkeypatch.setattr(spans, "GAP_BYTES", 128)
    monkeypatch.setattr(stored_bytes, "_FIRST_BYTES", 512)
    monkeypatch.setattr(store, "_FIRST_DELAY", 1e-6)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in {
        "AWS_ENDPOINT_URL": served.url,
        "AWS_ACCESS_KEY_ID": "AKIAHIDDEN",
        "AWS_SECRET_ACCESS_KEY": "HIDDEN",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return served


def listing(handler: Any, folder: str = "model") -> bool:
    """Answer as S3 does where the folder is listed."""
    if LIST not in handler.path:
        return False
    names = sorted(path.name for path in (handler.server.folder / folder).iterdir())
    list_names(handler, names)
    return True


def list_names(handler: Any, names: list[str]) -> None:
    entries = "".join(
        f"<Contents><Key>folder/{name}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>one</ETag><Size>1</Size></Contents>"
        for name in names
    )
    text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
    handler.answer(200, text.encode(), Content_Type="application/xml")


def web(server: Any, fault: Callable[[Any], bool] | None = None) -> str:
    server.fault = fault
    return f"{server.url}/model"


def s3(server: Any, fault: Callable[[Any], bool] | None = None) -> str:
    def answer(handler: Any) -> bool:
        if fault is not None and fault(handler):
            return True
        if listing(handler):
            return True
        handler.path = handler.path.replace("/bucket/folder", "/model")
        return False

    server.fault = answer
    return "s3://bucket/folder"


KINDS = {"https": web, "s3": s3}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


def state(model: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return get_model(model_config=ModelConfig(model=model), device_config=CPU).state_dict()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(expected) and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


@pytest.fixture(scope="module")
def local(served: Any) -> list[list[dict[str, torch.Tensor]]]:
    """Return what each rank of 1 and of 4 has from the local folder."""
    folder = str(served.folder / "model")
    return [run_ranks(size, lambda rank: state(folder)) for size in (1, 4)]


def test_ranks_have_the_bits_of_the_local_folder(server: Any, kind: Any, local: Any) -> None:
    """Each rank of 1 and of 4 has what it has from the folder, and leaves no folder behind."""
    url = kind(server)
    for expected in local:
        found = run_ranks(len(expected), lambda rank: state(url))
        assert all(map(same, found, expected))


def reset(handler: Any) -> bool:
    handler.close_connection = True
    return True


def busy(status: int, **headers: str) -> Callable[[Any], bool]:
    def fault(handler: Any) -> bool:
        handler.answer(status, b"<html>busy</html>", Content_Type="text/html", **headers)
        return True

    return fault


def truncated(handler: Any) -> bool:
    if LIST in handler.path:
        return False
    handler.path = handler.path.replace("/bucket/folder", "/model")
    handler.serve(200, keep=7)
    return True


PASSING = {
    "an answer 503": busy(503),
    "an answer 500": busy(500),
    "an answer 429 that asks to wait": busy(429, Retry_After="0"),
    "a connection that is reset": reset,
    "an answer that is cut off": truncated,
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_request_that_fails_is_tried_again(
    server: Any, kind: Any, local: Any, fault: Any
) -> None:
    """Every third request fails, listing and headers too; the model has the same bits."""
    number = itertools.count(2)
    url = kind(server, lambda handler: next(number) % 3 == 0 and fault(handler))
    assert same(state(url), local[0][0])
    assert next(number) > 30


def always(
    answer: Callable[[Any], object], where: str = "of-00002.safetensors"
) -> Callable[[Any], bool]:
    def fault(handler: Any) -> bool:
        if where not in handler.path or LIST in handler.path:
            return False
        handler.path = handler.path.replace("/bucket/folder", "/model")
        answer(handler)
        return True

    return fault


def second(answer: Callable[[Any], object]) -> Callable[[Any], bool]:
    """Return a fault of what follows the first request for a file of weights."""

    def fault(handler: Any) -> bool:
        first = (handler.headers["Range"] or "").startswith("bytes=0-")
        return not first and always(answer)(handler)

    return fault


def grown(handler: Any) -> None:
    """Serve the file as if a byte had been added to it."""
    data = handler.data() or b""
    handler.data = lambda: data + b"\0"
    handler.serve(200)


def whole(handler: Any) -> None:
    handler.answer(200, handler.data() or b"")


def page(handler: Any) -> None:
    handler.answer(200, b"<html>log in</html>", Content_Type="text/html; charset=utf-8")


def redirect(handler: Any) -> None:
    handler.answer(302, Location="http://login.invalid/?token=HIDDEN")


def to(location: str) -> Callable[[Any], None]:
    return lambda handler: handler.answer(302, Location=location)


def loop(handler: Any) -> None:
    handler.answer(302, Location=handler.path)


def shifted(handler: Any) -> None:
    first = int(handler.headers["Range"].removeprefix("bytes=").partition("-")[0])
    handler.answer(206, bytes(8), Content_Range=f"bytes {first + 1}-{first + 8}/99999")


def nothing(handler: Any) -> None:
    handler.answer(416, Content_Range="bytes */0")


WEB_ONLY = {
    "an empty answer": (always(lambda h: h.answer(200)), "it is empty: copy it there again"),
    "an empty answer in between": (second(lambda h: h.answer(200)), "it is empty"),
    "an empty config.json": (always(lambda h: h.answer(200), "config.json"), "is not valid JSON"),
    "a page that says it is a file": (
        always(lambda h: h.answer(200, b"<html>log in</html>"), "config.json"),
        "is not valid JSON",
    ),
    "a web page": (always(page), "with a web page, such as one to log in"),
    "a web page as config.json": (always(page, "config.json"), "config.json: .* a web page"),
    "a redirect elsewhere": (always(redirect), r"another host, http://login.invalid,"),
    "a redirect of config.json": (always(redirect, "config.json"), "config.json: .*another host"),
    "redirects without end": (always(loop), "redirects more than 5 times"),
    "a redirect to nothing": (always(lambda h: h.answer(302)), "302, a redirect to no URL"),
    "a redirect to no port": (always(to("http://h:99999/")), "302, a redirect to no URL"),
    "a redirect with a space": (always(to("/a b")), "302, a redirect to no URL"),
    "a redirect that is not ASCII": (always(to("/\xe9")), "302, a redirect to no URL"),
    "an encoding": (
        always(lambda h: h.serve(200, Content_Encoding="gzip")),
        "with Content-Encoding 'gzip'",
    ),
    "a size that is not told": (
        always(lambda h: h.serve(200, Content_Range="bytes 0-511/*")),
        r"size of the file in Content-Range, got 'bytes 0-511/\*'",
    ),
    "another range": (always(shifted), "answers bytes=0-511 with bytes 1 to 8 of 99999"),
    "the whole file": (always(whole), "it serves no ranges; download"),
    "more than the range": (
        second(lambda h: h.serve(200, Content_Length="9999")),
        "with 9999 bytes, and not",
    ),
}
REFUSED = {
    "no permission": (always(lambda h: h.answer(403)), "403 Forbidden|no access"),
    "no credentials": (
        always(lambda h: h.answer(401)),
        r"401.*set an entry for 127\.0\.0\.1 in ~/\.netrc|no access.*AWS_",
    ),
    "a file that is missing": (always(lambda h: h.answer(404)), "no such file"),
    "no config.json": (always(lambda h: h.answer(404), "config.json"), "config.json: .*no such"),
    "a bad request": (always(lambda h: h.answer(400)), "400"),
    "another ETag": (
        second(lambda h: h.serve(200, ETag='"two"')),
        'changed since it was opened .*the tag "one", and now has .*"two"',
    ),
    "another size, and the same ETag": (
        second(grown),
        'changed since it was opened .*the tag "one", and now has .*"one"',
    ),
    "an empty file": (always(nothing), "it is empty: copy it there again"),
    "a file that was emptied": (second(nothing), "it ends before byte"),
    "a file that was deleted": (
        second(lambda h: h.answer(404)),
        "no such file.*It could be read when it was opened",
    ),
    "permission withdrawn": (
        second(lambda h: h.answer(403)),
        "It could be read when it was opened",
    ),
}


def refused(url: str) -> str:
    with pytest.raises(WeightLoadError) as error:
        state(url)
    text = str(error.value)
    assert "HIDDEN" not in text
    return text


@pytest.mark.parametrize(("fault", "message"), WEB_ONLY.values(), ids=WEB_ONLY)
def test_a_wrong_answer_of_a_web_server_is_refused(
    server: Any, fault: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error names the URL and what came, at once; no secret of a redirect is in it."""
    monkeypatch.setattr(store, "RETRY_SECONDS", 0.0)
    text = refused(web(server, fault))
    assert f"{server.url}/model" in text
    assert re.search(message, text), text


@pytest.mark.parametrize(("fault", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_answer_is_refused_at_once(
    server: Any, kind: Any, fault: Any, message: str
) -> None:
    """One error names the URL and the reason; nothing is asked for twice."""
    url = kind(server, fault)
    text = refused(url)
    assert f"{url}/" in text
    assert re.search(message, text), text


URLS = {
    "s3://user:HIDDEN@bucket/folder": "user name or password.*AWS_ACCESS_KEY_ID",
    "https://user:HIDDEN@host/folder": "user name or password.*netrc",
    "https://host/folder?token=HIDDEN": r"a query \(\?\)",
    "az://bucket/folder#HIDDEN": "fragment",
    "s3://": "expected s3://bucket/folder",
    "https:///folder": "expected https://host/folder",
    "https://host:port/folder": "host or port",
    "https://host/a/../b": "is empty, '.' or '..'",
    "s3://bucket/a//b": "is empty, '.' or '..'",
    "hf://owner": "expected hf://owner/name",
    "hf://owner/name@": "expected hf://owner/name",
    "hf://owner/name/file": "expected hf://owner/name",
    "https://host/a\nb": "printable characters",
}


@pytest.mark.parametrize(("url", "message"), URLS.items())
def test_a_url_that_is_not_valid_is_refused(url: str, message: str) -> None:
    """The refusal says what is expected, and shows no secret."""
    with pytest.raises(CheckpointFormatError, match=message) as error:
        find_source(url)
    assert "HIDDEN" not in str(error.value)


def test_what_a_store_cannot_do_is_refused(server: Any) -> None:
    """A format of local folders, a revision outside of the hub, and two revisions."""
    with pytest.raises(CheckpointFormatError, match=r"'dcp' is read from a local .* several requ"):
        find_source(web(server), load_format="dcp")
    with pytest.raises(CheckpointFormatError, match="only the hub has revisions"):
        find_source(web(server), "main")
    with pytest.raises(CheckpointFormatError, match="revision 'a', and the argument for 'b'"):
        find_source("hf://owner/name@a", "b")


def test_a_registered_source_goes_before(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user registers for a scheme that is known is what opens it."""
    folder = server.folder / "model"
    monkeypatch.setattr(source, "registered_sources", {"s3": lambda url: Folder(folder)})
    assert find_source("S3://anything").folder == folder


def test_obstore_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket without the library names the extra to install."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ImportError, match=r"vllm-module\[stores\]"):
        find_source("s3://bucket/folder")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses between requests, which take no time here; the clock runs with them."""
    found: list[float] = []
    monkeypatch.setattr(store.Store, "_wait", lambda _, seconds: found.append(seconds))
    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: 100 + sum(found)))
    monkeypatch.setattr(store, "_FIRST_DELAY", 0.1)
    return found


def test_requests_end_at_the_deadline(server: Any, kind: Any, pauses: list[float]) -> None:
    """The pauses double up to a limit; then one error has the URL, the tries and the reason."""
    url = kind(server, busy(503))
    text = refused(url)
    assert url in text
    assert f"in {len(pauses) + 1} tries" in text
    assert "503" in text
    assert 50 < sum(pauses) <= store.RETRY_SECONDS
    delays = [0.1 * 2**number for number in range(7)] + [8.0] * 20
    assert all(delay / 2 <= pause <= delay for pause, delay in zip(pauses, delays, strict=False))


@pytest.mark.parametrize("after", ["17", "Sun, 01 Jan 2040 00:00:00 GMT"])
def test_retry_after_is_waited_for_until_the_deadline(
    server: Any, pauses: list[float], after: str
) -> None:
    """Seconds within the deadline are waited for, a date beyond it ends the request at once."""
    text = refused(web(server, busy(429, Retry_After=after)))
    assert pauses == ([17.0] * 3 if after == "17" else [])
    assert "asks to wait" in text


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/m", "https://no-such-host.invalid/m"])
def test_an_unreachable_server_is_refused_at_once(
    server: Any, pauses: list[float], url: str
) -> None:
    """A port that nobody listens on, and a name that is not found, are not tried again."""
    assert "check the URL and the network" in refused(url)
    assert pauses == []


@pytest.mark.parametrize("url", ["http://a..b/m", "http://" + "a" * 64 + ".org/m"])
def test_a_host_that_no_name_server_knows_is_refused(
    server: Any, pauses: list[float], url: str
) -> None:
    """A label of a host that is empty or too long is an error with the URL."""
    assert "its host is not valid" in refused(url)
    assert pauses == []


SLOW = {
    "a body": "206 Partial\r\nContent-Range: bytes 0-511/9999\r\nContent-Length: 512\r\n\r\n",
    "a body without a length": "206 Partial\r\nContent-Range: bytes 0-511/9999\r\n\r\n",
    "an answer that is to come": "",
    "trailers": "206 Partial\r\nContent-Range: bytes 0-0/1\r\nTransfer-Encoding: chunked\r\n\r\n"
    "1\r\nx\r\n0\r\n",
    "the body of an error": "404 Missing\r\nContent-Length: 512\r\n\r\n",
    "a header": "206 Partial\r\nX: ",
}
PIECES = {"an answer that is to come": b"HTTP/1.1 100 Continue\r\n\r\n", "trailers": b"A: b\r\n"}


@pytest.mark.parametrize("what", SLOW)
def test_a_request_ends_however_slowly_its_answer_comes(
    server: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What comes piece by piece, without an end, is not waited for longer than one request may."""
    monkeypatch.setattr(store, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(http_connection, "_REQUEST_SECONDS", 0.05)
    pause = threading.Event()

    def drip(handler: Any) -> None:
        handler.wfile.write(f"HTTP/1.1 {SLOW[what]}".encode() if SLOW[what] else b"")
        for _ in range(400):  # ends when the client has closed the connection
            handler.wfile.write(PIECES.get(what, b"x"))
            pause.wait(0.005)

    begin = time.monotonic()
    text = refused(web(server, always(drip)))
    assert "its answer did not end in 0.05 s" in text
    assert time.monotonic() - begin < 1


def test_a_file_that_is_cut_off_by_the_deadline_is_not_whole(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose length is not told ends with its connection, but not with its deadline."""
    monkeypatch.setattr(http_connection, "_REQUEST_SECONDS", 0.05)
    done = threading.Event()

    def fault(handler: Any) -> bool:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n{}")
        done.wait(5)
        return True

    client = http_client.web_client(parse(web(server, fault)))
    with pytest.raises(BusyError, match="did not end"):
        client.fetch("config.json", 100)
    done.set()


def test_closing_ends_requests_under_way(server: Any) -> None:
    """A request whose answer does not come ends when its store is closed."""
    asked, done = threading.Event(), threading.Event()

    def fault(handler: Any) -> bool:
        asked.set()
        return done.wait(5)

    client = http_client.web_client(parse(web(server, fault)))
    with ThreadPoolExecutor(1) as executor:
        reading = executor.submit(client.read, FILE, 0, memoryview(bytearray(8)))
        assert asked.wait(5)
        client.close()
        assert "the store was closed" in str(reading.exception(timeout=2))
        done.set()


@pytest.mark.parametrize("silent", ["config.json", FILE])
def test_an_interrupt_ends_a_load_whose_store_is_silent(
    server: Any, kind: Any, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is raised while answers are waited for, whichever thread the signal is sent to."""
    done = threading.Event()
    waited: list[bool] = []

    def elsewhere() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def fault(handler: Any) -> bool:
        begins = silent == FILE and (handler.headers["Range"] or "").startswith("bytes=0-")
        if silent not in handler.path or begins:
            return False
        if not waited:
            threading.Thread(target=elsewhere).start()
        waited.append(done.wait(10))
        return True

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            state(kind(server, fault))
        assert not waited or all(waited), "the answers were waited for"
    finally:
        done.set()
        signal.signal(signal.SIGINT, before)


def test_a_store_without_versions_is_named_once(
    server: Any, local: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says that changes of files may be missed, and the weights are loaded."""
    with caplog.at_level(logging.WARNING, "vllm_module"):
        url = web(server, lambda handler: handler.serve(200, ETag="", Last_Modified="") or True)
        assert same(state(url), local[0][0])
    (record,) = caplog.records
    assert "sends neither ETag nor Last-Modified" in record.message
    assert url in record.message


@pytest.mark.parametrize("proxy", ["http://me:HIDDEN@h:abc", "http://me:HIDDEN@", "http://[h"])
def test_a_proxy_that_is_not_valid_is_refused(
    server: Any, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    """The error names the variable, and not the password in it."""
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", "")
    assert "correct http_proxy" in refused("http://inside.invalid/model")


def listed(names: list[str]) -> Callable[[Any], bool]:
    """Return the answers of a bucket with these files and the configuration, all of it {}."""

    def fault(handler: Any) -> bool:
        if LIST in handler.path:
            list_names(handler, ["config.json", *names])
        else:
            handler.answer(200, b"{}")
        return True

    return fault


def test_a_key_that_is_no_file_name_is_left_out(server: Any) -> None:
    """Keys of buckets may be longer than names of files are, and have invisible characters."""
    s3(server)
    server.fault = listed(["a" * 300 + ".json", "\xe9" * 150 + ".json", "a\u200b.json", "b.json"])
    found = find_source("s3://bucket/folder")  # which keeps the folder
    assert sorted(path.name for path in found.folder.iterdir()) == ["b.json", "config.json"]


@pytest.mark.parametrize("key", ["/x.json", "x\t.json", "../x.json"])
def test_a_key_that_is_no_path_hides_no_file(server: Any, local: Any, key: str) -> None:
    """Where the library lists nothing because of one key, files are asked for by their names."""

    def fault(handler: Any) -> bool:
        if LIST in handler.path:
            names = sorted(path.name for path in (handler.server.folder / "model").iterdir())
            list_names(handler, [*names, key])
            return True
        handler.path = handler.path.replace("/bucket/folder", "/model")
        return False

    s3(server)
    server.fault = fault
    assert same(state("s3://bucket/folder"), local[0][0])


def test_small_files_have_a_limit(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many of them, and too many bytes of them, are refused, and so is a full disk."""
    s3(server)
    server.fault = listed([f"{number}.json" for number in range(3)])
    monkeypatch.setattr(stores_source, "_MOST_FILES", 3)
    with pytest.raises(CheckpointFormatError, match=r"has 4 files .* at most 3 are fetched"):
        find_source("s3://bucket/folder")
    monkeypatch.setattr(stores_source, "_MOST_FILES", 4)
    monkeypatch.setattr(stores_source, "_MOST_BYTES", 5)
    with pytest.raises(CheckpointFormatError, match="more than 5 bytes together"):
        find_source("s3://bucket/folder")

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CheckpointFormatError, match="No space left on device; free space"):
        find_source("s3://bucket/folder")


def test_a_fork_leaves_the_folder_to_its_parent(server: Any) -> None:
    """The folder stays when a fork of the process drops its source."""
    found = find_source(web(server))
    folder = found.folder
    pid = os.fork()
    if pid == 0:
        del found
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    assert folder.exists()


def opened(url: str) -> Any:
    return ModelSource.find(ModelConfig(model=url)).open()


def test_a_header_takes_one_request_or_two(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that is longer than the first request takes one more; nothing else is read."""
    url = web(server)
    for nbytes, requests in ((1 << 20, 2), (512, 4)):
        monkeypatch.setattr(stored_bytes, "_FIRST_BYTES", nbytes)
        server.requests.clear()
        with opened(url) as checkpoint:
            assert checkpoint.requests == requests
            assert sum("Range" in headers for _, headers in server.requests) == requests
            assert checkpoint.bytes_read == 0
        with pytest.raises(WeightReadError, match="was closed"):
            checkpoint["model.norm.weight"].read()


def test_a_rank_requests_what_it_keeps(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are requested alone, columns with at most the gap between them."""
    monkeypatch.setattr(spans, "REQUEST_BYTES", 1 << 20)
    url = web(server)
    with opened(url) as checkpoint:
        before = checkpoint.bytes_requested
        handle = checkpoint["model.layers.0.mlp.gate_proj.weight"].narrow(0, 16, 16)
        handle.read()
        assert checkpoint.bytes_requested - before == checkpoint.bytes_read == 16 * 32 * 4
        before = checkpoint.bytes_requested
        whole = checkpoint["model.layers.0.mlp.down_proj.weight"]
        whole.narrow(1, 0, 32).read()  # half of each row: a gap of 128 bytes
        assert checkpoint.bytes_requested - before == 32 * 64 * 4 - 128
        before = checkpoint.bytes_requested
        whole.narrow(1, 0, 31).read()  # a gap of 132 bytes
        assert checkpoint.bytes_requested - before == 32 * 31 * 4


@settings(max_examples=60)
@given(st.data())
def test_spans_cover_their_runs(data: st.DataObject) -> None:
    """Each byte of each run lands once at its place; ranges and gaps keep to their limits."""
    content = bytes(random.Random(0).randbytes(4000))
    draw = data.draw
    runs, expected = [], bytearray()
    for _ in range(draw(st.integers(1, 5))):
        length, count = draw(st.integers(1, 90)), draw(st.integers(1, 6))
        stride = length + draw(st.integers(1, 90)) if count > 1 else 0
        offset = draw(st.integers(0, len(content) - (count - 1) * stride - length))
        runs.append((ByteRun(offset, length, stride, count), len(expected)))
        for start in (offset + index * stride for index in range(count)):
            expected += content[start : start + length]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "REQUEST_BYTES", request := draw(st.integers(1, 300)))
        patch.setattr(spans, "GAP_BYTES", gap := draw(st.integers(0, 60)))
        found = spans.spans(runs)
    result, filled = bytearray(len(expected)), 0
    for span in found:
        assert 0 < span.end - span.begin <= request
        touched = set()
        for run, address in span.parts:
            assert span.begin <= run.offset
            assert run.offset + run.span <= span.end
            for index in range(run.count):
                start, target = run.offset + index * run.stride, address + index * run.length
                result[target : target + run.length] = content[start : start + run.length]
                touched |= set(range(start, start + run.length))
                filled += run.length
        ends = sorted(touched)
        assert all(b - a - 1 <= gap for a, b in itertools.pairwise(ends))
        assert (ends[0], ends[-1] + 1) == (span.begin, span.end)
        assert span.direct == (len(span.parts) == 1 and len(touched) == span.end - span.begin)
    assert (result, filled) == (expected, len(expected))


def test_many_requests_are_under_way_at_once(server: Any) -> None:
    """The answers wait for each other: with fewer requests at once, none would come."""
    together = threading.Barrier(store.UNDER_WAY)

    def fault(handler: Any) -> bool:
        together.wait(60)
        return False

    url = web(server)
    with opened(url) as checkpoint:
        embedding = checkpoint["model.embed_tokens.weight"].narrow(0, 0, 64)
        expected = embedding.read()
        server.fault = fault
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spans, "REQUEST_BYTES", expected.nbytes // store.UNDER_WAY)
            assert torch.equal(embedding.read(), expected)


def test_an_update_and_a_plan_take_handles_of_a_store(server: Any, local: Any) -> None:
    """A running model takes the weights of a URL in place; a plan reads nothing."""
    found = ModelSource.find(ModelConfig(model=web(server)))
    with found.open() as checkpoint:
        model = found.build(torch.device("cpu"))
        assert sum(read.source.shape.numel() for read in model.plan_weights(checkpoint).reads())
        assert checkpoint.bytes_read == 0
        model.load_weights(checkpoint.items())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.update_weights(checkpoint.items())
    assert same(model.state_dict(), local[0][0])


def test_a_source_is_opened_again_elsewhere(server: Any) -> None:
    """A pickled source opens the same version, from the same folder while that is there."""
    found = find_source(web(server))
    pickled, folder = pickle.dumps(found), found.folder
    again = pickle.loads(pickled)
    assert again.folder == folder
    prints = []
    for fault in (None, None, lambda handler: bool(handler.serve(200, ETag='"two"')) or True):
        server.fault = fault
        with again.weights() as checkpoint:
            prints.append(checkpoint.fingerprint)
    assert prints[0] == prints[1] != prints[2]
    server.fault = None
    del found
    gc.collect()
    assert not folder.exists()
    again = pickle.loads(pickled)  # as on another machine
    assert again.folder != folder
    assert json.loads((again.folder / "config.json").read_text()) == CONFIG


def test_the_index_and_the_files_must_agree(server: Any, kind: Any) -> None:
    """A tensor that the index does not know is refused, as in a local folder."""
    index = server.folder / "model" / "model.safetensors.index.json"
    text = index.read_text()
    wrong = text.replace("model.norm.weight", "model.nrom.weight")

    def fault(handler: Any) -> bool:
        if not handler.path.endswith("index.json"):
            return False
        handler.answer(200, wrong.encode())
        return True

    assert "'model.norm.weight' is here" in refused(kind(server, fault))


def test_a_single_file_without_an_index(server: Any, kind: Any, local: Any) -> None:
    """``model.safetensors`` is found by name, and any other name where the store can list."""
    folder = server.folder / "single"
    folder.mkdir(exist_ok=True)
    name = "model.safetensors" if kind is web else "weights.safetensors"
    with open_checkpoint(server.folder / "model") as whole:
        save_file({key: handle.read() for key, handle in whole.items()}, folder / name)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    found = kind(server)
    before = server.fault
    if kind is web:
        assert same(state(f"{server.url}/single"), local[0][0])
        return

    def single(handler: Any) -> bool:
        if LIST in handler.path:
            return listing(handler, "single")
        handler.path = handler.path.replace("/bucket/folder", "/single")
        return False

    server.fault = single
    assert before is not None
    assert same(state(found), local[0][0])


COMMIT = "a" * 40


@pytest.fixture
def hub(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Patch the hub: small files are in its cache, and weights redirect to another host."""
    snapshot = tmp_path / "models--owner--name" / "snapshots" / COMMIT
    shutil.copytree(
        server.folder / "model", snapshot, ignore=shutil.ignore_patterns("*.safetens*s")
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **given: str(snapshot))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    server.expired = {}  # by query, the status that it gets

    def fault(handler: Any) -> bool:
        path, _, query = handler.path.partition("?")
        prefix = f"/owner/name/resolve/{COMMIT}/"
        if path.startswith(prefix):
            number = server.counts[handler.path]
            other = f"http://localhost:{server.server_port}/model/{path.removeprefix(prefix)}"
            handler.answer(302, Location=f"{other}?signature={number}")
            return True
        if query in server.expired:
            handler.answer(server.expired[query])
            return True
        handler.path = path
        return False

    server.fault = fault
    return server


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_the_hub_is_read_by_ranges(hub: Any, local: Any, status: int) -> None:
    """A commit is pinned; the token goes to the hub alone; an expired target is asked for anew."""
    given = ModelConfig(model="hf://owner/name@main", hf_token="hf_HIDDEN")
    found = ModelSource.find(given)
    assert found.revision == COMMIT
    assert COMMIT in repr(found.source)
    assert "HIDDEN" not in repr(found)
    with found.open() as checkpoint:
        hub.expired["signature=1"] = status
        model = found.build(torch.device("cpu"))
        model.load_weights(checkpoint.items())
    assert same(model.state_dict(), local[0][0])
    tokens = {
        (headers["Host"].split(":")[0], headers.get("Authorization")) for _, headers in hub.requests
    }
    assert tokens == {("127.0.0.1", "Bearer hf_HIDDEN"), ("localhost", None)}
    asked = sum(path.startswith("/owner") for path, _ in hub.requests)
    assert asked < 40 < len(hub.requests)  # one for each range would be more


def test_netrc_is_sent_to_its_host(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry of a server authenticates each request to it."""
    path = tmp_path / ".netrc"
    path.write_text("machine 127.0.0.1 login me password HIDDEN\n")
    path.chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    opened(web(server)).close()
    value = "Basic " + base64.b64encode(b"me:HIDDEN").decode()
    assert {headers.get("Authorization") for _, headers in server.requests} == {value}


@pytest.mark.parametrize(
    "user", ["", "me:HIDDEN@", "me%40host:a%2Fb%3Ac@", "m%C3%A9:%20@"], ids=str.__str__
)
def test_a_proxy_of_the_environment_is_asked(
    server: Any, monkeypatch: pytest.MonkeyPatch, local: Any, user: str
) -> None:
    """A host that only a proxy knows is read through it, and urllib tells the proxy the same."""
    monkeypatch.setenv("http_proxy", server.url.replace("//", f"//{user}"))
    monkeypatch.setenv("no_proxy", "")

    def fault(handler: Any) -> bool:
        handler.path = handler.path.removeprefix("http://inside.invalid")
        return False

    server.fault = fault
    assert same(state("http://inside.invalid/model"), local[0][0])
    asked = {headers.get("Proxy-Authorization") for _, headers in server.requests}
    server.requests.clear()
    urllib.request.build_opener().open("http://inside.invalid/model/config.json").close()
    ((_, theirs),) = server.requests
    assert asked == {theirs.get("Proxy-Authorization")}


def test_a_real_s3_server(server: Any, local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of obstore and moto's S3: listing, ranges, ETags, what is not there."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        host, port = moto.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        request = urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
        urllib.request.urlopen(request).close()
        bucket = obstore.store.S3Store("bucket", client_options={"allow_http": True})
        for path in (server.folder / "model").iterdir():
            obstore.put(bucket, f"a/b c/{path.name}", path.read_bytes())
        assert same(state("s3://bucket/a/b c"), local[0][0])
        for change, message in (
            (lambda: obstore.put(bucket, f"a/b c/{FILE}", bytes(1000)), r"was changed|ends before"),
            (lambda: obstore.delete(bucket, f"a/b c/{FILE}"), "NoSuchKey.* could be read when it"),
        ):
            data = (server.folder / "model" / FILE).read_bytes()
            obstore.put(bucket, f"a/b c/{FILE}", data)
            with opened("s3://bucket/a/b c") as checkpoint:
                change()
                with pytest.raises(WeightReadError, match=message):
                    checkpoint["model.embed_tokens.weight"].read()
        obstore.put(bucket, f"a/b c/{FILE}", b"")
        assert "it is empty: copy it there again" in refused("s3://bucket/a/b c")
        assert "has no config.json; there is nothing" in refused("s3://bucket/a")
        assert "404 Not Found (NoSuchBucket)" in refused("s3://none/a")
    finally:
        moto.stop()


def test_ranks_in_processes_read_a_url_together(server: Any, tmp_path: Path) -> None:
    """Each byte of the weights is requested once by all ranks, also where columns are cut."""
    folder, url = str(server.folder / "model"), web(server)
    expected = run_ranks(2, lambda rank: state(folder))
    server.sent = 0

    def load(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        torch.save(state(url), tmp_path / str(rank))
        dist.barrier()
        dist.destroy_process_group()

    pids = support["fork_ranks"](2, load, port=support["free_port"]())
    assert support["exit_codes"](pids) == [0, 0]
    for rank in range(2):
        assert same(torch.load(tmp_path / str(rank)), expected[rank])
    with open_checkpoint(Path(folder)) as checkpoint:
        nbytes = checkpoint.nbytes
        headers = sum(path.stat().st_size for path in checkpoint.files) - nbytes
    small = sum(path.stat().st_size for path in Path(folder).glob("*.json"))
    first = 2 * 512  # of each file, and what follows it again in the second request
    assert server.sent <= nbytes + 2 * (headers + small + first)
