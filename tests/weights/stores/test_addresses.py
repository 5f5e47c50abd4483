"""URLs, and what else says where a store is: the hub, proxies, netrc."""

from __future__ import annotations

import base64
import re
import runpy
import shutil
import sys
import threading
import urllib.request
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
import pytest
import torch

from vllm_module import ModelConfig
from vllm_module.build.model_source import ModelSource
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.source import find_source
from vllm_module.weights.stores.http_client import web_client
from vllm_module.weights.stores.http_connection import HttpConnection
from vllm_module.weights.stores.place import parse
from vllm_module.weights.stores.store import Store

# Pytest's importlib mode has no imports between test files.
STORES: Any = runpy.run_path(str(Path(__file__).with_name("served.py")))
web, state, same, refused = (STORES[name] for name in ("web", "state", "same", "refused"))
opened = STORES["opened"]
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


def test_obstore_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket without the library names the extra to install."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ImportError, match=r"vllm-module\[stores\]"):
        find_source("s3://bucket/folder")


@pytest.mark.parametrize(
    "proxy",
    ["http://me:HIDDEN@h:abc", "http://me:HIDDEN@", "http://[h", "socks5://me:HIDDEN@127.0.0.1:9"],
)
def test_a_proxy_that_is_not_valid_is_refused(
    server: Any, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    """The error names the variable, and not the password in it."""
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", "")
    assert "correct http_proxy" in refused("http://inside.invalid/model")


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (407, "proxy asks for a user name and password.* set {0}_proxy=http://user:password@"),
        (403, "403 .*{1}"),
    ],
)
def test_a_proxy_that_refuses_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, scheme: str, status: int, advice: str
) -> None:
    """The password that it asks for is not the server's, and another try would be refused, too."""
    asked = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_CONNECT(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.01,)).start()
        monkeypatch.setenv(f"{scheme}_proxy", f"http://me:HIDDEN@127.0.0.1:{proxy.server_port}")
        monkeypatch.setenv("no_proxy", "")
        place = parse(f"{scheme}://inside.invalid/m")
        try:
            # Without time for a second try, what may succeed later is another error.
            with (
                closing(Store(place, web_client(place), patience=0.0)) as store,
                pytest.raises(CheckpointFormatError) as error,
            ):
                store.fetch("config.json", 10)
        finally:
            proxy.shutdown()
    wanted = advice.format(scheme, "no_proxy" if scheme == "https" else "netrc")
    assert re.search(wanted, str(error.value))
    assert "HIDDEN" not in str(error.value)
    assert len(asked) == 1


@pytest.mark.parametrize("entry", ["inside.invalid:81", "inside.invalid", ".invalid:81", "*"])
@pytest.mark.parametrize("port", [80, 81, 8181])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_entry_of_no_proxy_may_have_a_port(
    monkeypatch: pytest.MonkeyPatch, entry: str, port: int, scheme: str
) -> None:
    """The proxy, which would see a token, is asked where urllib asks it."""
    proxy = "http://proxy.invalid:8080"
    monkeypatch.setenv(f"{scheme}_proxy", proxy)
    monkeypatch.setenv("no_proxy", entry)
    theirs = urllib.request.Request(f"{scheme}://inside.invalid:{port}/model")
    urllib.request.ProxyHandler().proxy_open(theirs, proxy, scheme)
    opened = HttpConnection.to(urlsplit(f"{scheme}://inside.invalid:{port}/model")).opened
    assert f"{opened.host}:{opened.port}" == theirs.host


def test_a_token_that_no_header_can_have_is_not_shown(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line ends of the file that a token was read from are no part of it."""
    url = web(server).replace("http://", "replica://")
    for token in ("HIDDEN\nof mine", "HIDDEN\u00e9", "HIDDEN\u65e5"):
        monkeypatch.setenv("VLLM_MODULE_REPLICA_TOKEN", token)
        assert "cannot be sent: correct VLLM_MODULE_REPLICA_TOKEN" in refused(url)
    assert not server.requests
    monkeypatch.setenv("VLLM_MODULE_REPLICA_TOKEN", "of mine\r\n")
    find_source(url)
    assert {headers["Authorization"] for _, headers in server.requests} == {"Bearer of mine"}


def test_an_address_of_ipv6_needs_no_port(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last number is not one; a tunnel through a proxy leads there too."""
    for scheme, port in (("http", 80), ("https", 443)):
        connection = HttpConnection.to(urlsplit(f"{scheme}://[2001:db8::5]/m")).opened
        assert (connection.host, connection.port) == ("2001:db8::5", port)
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:8080")
    monkeypatch.setenv("no_proxy", "")
    tunnel: Any = HttpConnection.to(urlsplit("https://[2001:db8::5]/m")).opened
    assert (tunnel._tunnel_host, tunnel._tunnel_port) == ("2001:db8::5", 443)


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


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
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


@pytest.mark.parametrize("lists", [False, True])
def test_nothing_is_asked_of_the_hub_where_it_is_offline(
    hub: Any, monkeypatch: pytest.MonkeyPatch, lists: bool
) -> None:
    """By HF_HUB_OFFLINE, as huggingface_hub reads it. Without an index, the files are listed."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if lists:
        (Path(huggingface_hub.snapshot_download()) / "model.safetensors.index.json").unlink()
    assert "HF_HUB_OFFLINE is set" in refused("hf://owner/name")
    assert hub.requests == []


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
    server.requests.clear()
    path.write_bytes(b"machine 127.0.0.1 login me password \xe4\n")  # no UTF-8
    opened(web(server)).close()
    assert {headers.get("Authorization") for _, headers in server.requests} == {None}


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
