"""Ranks of an engine that each send what they hold: which bytes come from whom, and what fails."""

from __future__ import annotations

import http.client
import json
import os
import runpy
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial, wraps
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM
from vllm_module.errors import CheckpointFormatError, RankError, WeightLoadError, WeightReadError
from vllm_module.runtime import rank_servers
from vllm_module.runtime.rank_servers import end_boxes, serve_boxes
from vllm_module.runtime.replica import RANKS
from vllm_module.weights.header import Entry, StoredDType
from vllm_module.weights.region import overlap
from vllm_module.weights.source import find_source
from vllm_module.weights.stores import ranks
from vllm_module.weights.stores.checkpoint import StoredCheckpoint
from vllm_module.weights.stores.store import Store

REPLICA = runpy.run_path(str(Path(__file__).with_name("test_replica.py")))
FAMILIES, SIZES, TOKEN = REPLICA["FAMILIES"], REPLICA["_SIZES"], REPLICA["TOKEN"]
engine, loaded, opened, same = (REPLICA[name] for name in ("engine", "loaded", "opened", "same"))
environment = REPLICA["environment"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(kind)
        config = AutoConfig.for_model(kind, **SIZES | FAMILIES[kind])
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def folder(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with engine(folder, tensor_parallel_size=2) as two_ranks:
        yield two_ranks


@pytest.fixture
def server(llm: LLM) -> Iterator[Any]:
    with llm.serve_weights(token=TOKEN) as serving:
        yield serving


def ports(server: Any) -> list[int]:
    with opened(server.url) as checkpoint:
        return [int(str(file.path).split(":")[2].split("/")[0]) for file, _ in checkpoint._ranks]


def described(server: Any) -> dict[str, Any]:
    """What a server says of its ranks."""
    found: dict[str, Any] = json.loads(server._small[RANKS])
    return found


SERVERS = partial(str.format, "{0.servers}")  # of a worker; other ranks can import it


def test_each_rank_sends_what_it_holds(folder: Path, server: Any) -> None:
    """Of rows and of columns, and nothing that a reader does not keep; the file is not read."""
    stored = load_file(folder / "model.safetensors")
    with opened(server.url) as checkpoint:
        whole, ranked = checkpoint._files[0], [file for file, _ in checkpoint._ranks]
        assert {name: (w.shape, w.dtype) for name, w in checkpoint.items()} == {
            name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()
        }
        for name, dim in (("mlp.up_proj", 0), ("mlp.down_proj", 1), ("self_attn.o_proj", 1)):
            name = f"model.layers.1.{name}.weight"
            for rank in range(2):
                before = [file.bytes_read for file in ranked]
                half = stored[name].shape[dim] // 2
                part = checkpoint[name].narrow(dim, rank * half, half).read()
                assert torch.equal(part, stored[name].narrow(dim, rank * half, half))
                read = [file.bytes_read - at for file, at in zip(ranked, before, strict=True)]
                assert read[rank] == part.nbytes
                assert read[1 - rank] == 0
        before = checkpoint.bytes_read
        assert all(torch.equal(w.read(), stored[name]) for name, w in checkpoint.items())
        assert checkpoint.bytes_read - before == sum(each.nbytes for each in stored.values())
        assert whole.bytes_read == 0


def test_a_rank_of_a_reader_reads_what_it_keeps(
    folder: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of two takes half of all matrices, most of it from rank 1; the norms are rank 0's."""
    kept: list[ranks.RankedCheckpoint] = []
    close = ranks.RankedCheckpoint.close
    monkeypatch.setattr(ranks.RankedCheckpoint, "close", lambda of: (kept.append(of), close(of)))
    parameters = loaded(server.url, 1, 2)
    assert same(parameters, loaded(folder, 1, 2))
    (checkpoint,) = kept
    padding = 4 * 32 * 4  # rows of the vocabulary, to 64
    assert checkpoint.bytes_read == sum(each.nbytes for each in parameters.values()) - padding
    first, second = (file.bytes_read for file, _ in checkpoint._ranks)
    norms = sum(each.nbytes for each in parameters.values() if each.dim() == 1)
    assert (first, second) == (norms, checkpoint.bytes_read - norms)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mixtral", {"enable_expert_parallel": True}),
        pytest.param("phi3", {}, marks=pytest.mark.at_length),
        pytest.param(
            "gpt_oss", {}, marks=pytest.mark.at_length
        ),  # as one rank's, in test_replica.py
    ],
)
def test_other_families_are_whole(
    folder_of: Callable[[str], Path], kind: str, options: dict[str, Any]
) -> None:
    """Spread experts come from their rank; boxes of another view from the first, as before."""
    folder = folder_of(kind)
    with (
        engine(folder, tensor_parallel_size=2, **options) as llm,
        llm.serve_weights(token=TOKEN) as server,
    ):
        with opened(server.url) as checkpoint:
            chunked = len(checkpoint._chunks)
            assert (chunked < len(checkpoint)) == (kind == "gpt_oss"), chunked
        for rank, size in ((0, 1), (1, 2)):
            assert same(loaded(server.url, rank, size), loaded(folder, rank, size))


def test_no_mixture_of_versions_is_read(
    llm: LLM, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update is found while ranks are asked, and when a rank is read later."""
    name = "model.norm.weight"
    with opened(server.url) as checkpoint:
        norm = checkpoint[name].read()
        llm.update_weights({name: norm + 1})
        for rank in range(2):
            part = checkpoint["model.layers.0.mlp.up_proj.weight"].narrow(0, 24 * rank, 24)
            with pytest.raises(WeightReadError, match="was changed since it was opened"):
                part.read()
    assert torch.equal(loaded(server.url)[name], norm + 1)

    def open_and_update(*arguments: Any) -> Any:
        llm.update_weights({name: norm})
        return open_file(*arguments)

    open_file = ranks.open_file
    monkeypatch.setattr(ranks, "open_file", open_and_update)
    with pytest.raises(WeightReadError, match="changed while its ranks were asked"):
        find_source(server.url).weights()
    monkeypatch.undo()


def test_ranks_serve_after_an_update_that_was_refused(folder: Path, llm: LLM, server: Any) -> None:
    """Nothing was written. After loading again, no rank lacks an update that others have."""

    def refused() -> list[tuple[str | None, bool]]:
        with pytest.raises(WeightLoadError, match=r"no\.such\.tensor"):
            llm.update_weights(iter([("no.such.tensor", torch.zeros(3))]))
        states: list[tuple[str | None, bool]] = llm.executor._everywhere("weights_state")
        return states

    assert refused() == [(None, False)] * 2
    with opened(server.url) as checkpoint:
        assert isinstance(checkpoint, ranks.RankedCheckpoint)
        stored = load_file(folder / "model.safetensors")
        assert all(torch.equal(w.read(), stored[name]) for name, w in checkpoint.items())
    llm.reload_weights()
    assert llm.executor._everywhere("weights_state") == [(None, True)] * 2
    refused()
    llm.sleep(level=2)
    llm.wake_up()
    assert llm.executor._everywhere("weights_state") == [(None, True)] * 2


def connections() -> set[str]:
    """Return the sockets that this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {each for each in found if each.startswith("socket:")}


@pytest.mark.parametrize("fails", [False, True])
def test_no_connection_is_left(
    llm: LLM, server: Any, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """To any rank, once the checkpoint is closed or was refused, also while something holds it."""
    before, threads = connections(), {*threading.enumerate()}
    made: list[Any] = []
    of_store = Store.__init__

    def keep(store: Store, *arguments: Any, **options: Any) -> None:
        made.append(store)
        of_store(store, *arguments, **options)

    monkeypatch.setattr(Store, "__init__", keep)
    if fails:
        monkeypatch.setattr(ranks, "RankedCheckpoint", None)  # is called last
        with pytest.raises(TypeError):
            find_source(server.url).weights()
    else:
        with opened(server.url) as checkpoint:
            made.append(checkpoint)
            assert type(checkpoint) is ranks.RankedCheckpoint
            assert all(weight.read() is not None for _, weight in checkpoint.items())
            assert connections() - before
    assert len(made) >= 2  # the stores of the first rank and of the second
    end = time.monotonic() + 10
    while time.monotonic() < end and (connections() - before or {*threading.enumerate()} - threads):
        time.sleep(0.05)  # of a server in this process: it learns that its client has gone
    assert connections() - before == set()
    assert {*threading.enumerate()} - threads == set()


def test_a_rank_wants_the_token(server: Any) -> None:
    for port in ports(server):
        for token, status in ((TOKEN, 404), ("wrong", 401)):
            headers = {"Authorization": f"Bearer {token}"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/x", headers=headers)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request)
            with refused.value as answer:
                assert answer.code == status


def test_boxes_of_another_server_are_not_taken(
    llm: LLM, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever listens behind a port that a rank had has no file of this server's name."""
    with llm.serve_weights(token=TOKEN) as other:
        assert described(server)["file"] != described(other)["file"]
        said = described(server) | {"ports": described(other)["ports"]}
        server._small[RANKS] = json.dumps(said).encode()
        with opened(server.url) as checkpoint:
            assert type(checkpoint) is StoredCheckpoint
        assert "404 (Not Found): there is no such file" in caplog.text


class Proxy(BaseHTTPRequestHandler):
    """Hands requests for ``/e1`` on to a port, as a reverse proxy does."""

    port = 0

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        kept = {name: self.headers[name] for name in ("Range", "Authorization")}
        headers = {name: value for name, value in kept.items() if value is not None}
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", self.path.removeprefix("/e1"), headers=headers)
        with closing(connection), connection.getresponse() as answer:
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.read())


def test_a_folder_of_a_proxy_is_that_of_the_first_rank(folder: Path, server: Any) -> None:
    """The others are asked by their ports, and the first one where it was found."""
    handler = type("ToServer", (Proxy,), {"port": server.port})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            url = f"replica://127.0.0.1:{proxy.server_port}/e1"
            with opened(url) as checkpoint:
                (second,) = described(server)["ports"]
                assert [str(file.path).rpartition("/")[0] for file, _ in checkpoint._ranks] == [
                    url,
                    f"replica://127.0.0.1:{second}",
                ]
            assert same(loaded(url), loaded(folder))
        finally:
            proxy.shutdown()


def test_a_port_at_which_nobody_answers_is_given_up_soon(
    folder: Path, server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy or tunnel may take a connection before it knows that there is no other end."""
    monkeypatch.setattr(ranks, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        said = described(server) | {"ports": [listening.getsockname()[1]]}
        server._small[RANKS] = json.dumps(said).encode()

        def hang_up() -> None:
            with suppress(OSError):  # it was closed
                while True:
                    listening.accept()[0].close()

        Thread(target=hang_up, daemon=True).start()
        begin = time.monotonic()
        with opened(server.url) as checkpoint:
            assert type(checkpoint) is StoredCheckpoint
        assert time.monotonic() - begin < 10
        assert same(loaded(server.url), loaded(folder))
        listening.shutdown(socket.SHUT_RDWR)
    assert "the first rank sends all" in caplog.text


def test_what_was_begun_ends_if_a_rank_cannot_listen(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong host is an error of the first rank. After one of another rank no server is left."""
    with pytest.raises(OSError, match="assign requested address"):
        llm.serve_weights("192.0.2.7", token=TOKEN)
    assert llm.collective_rpc(SERVERS) == ["{}", "{}"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    @wraps(serve_boxes)  # what other ranks call by this name is what it was
    def fails(*_: Any) -> int:
        raise OSError("no more files")

    monkeypatch.setattr(rank_servers, "serve_boxes", fails)
    with pytest.raises(OSError, match="no more files"):
        llm.serve_weights(port=port, token=TOKEN)
    assert llm.collective_rpc(SERVERS) == ["{}", "{}"]
    socket.create_server(("127.0.0.1", port)).close()


def test_a_rank_that_has_ended_hides_no_error(folder: Path) -> None:
    with engine(folder, tensor_parallel_size=2) as llm:
        with (  # noqa: PT012
            pytest.raises(KeyError, match="of the body"),
            llm.serve_weights(token=TOKEN) as server,
        ):
            assert described(server)["file"] in llm.collective_rpc(SERVERS)[1]
            processes = llm.executor._ranks.processes
            assert processes is not None
            processes._processes[1].kill()
            assert processes.ended.wait(30)
            raise KeyError("of the body")
        with pytest.raises(RankError):
            llm.update_weights({})


def test_servers_end_together_and_the_first_rank_has_all(folder: Path, llm: LLM) -> None:
    """A rank that cannot be reached is no reason to fail; after ``close`` no port answers."""
    with llm.serve_weights(token=TOKEN) as server:
        with opened(server.url) as checkpoint:
            fingerprint = checkpoint.fingerprint
        with llm.engine.alone():
            llm.executor.collective_rpc(end_boxes, args=(described(server)["file"],))
        with opened(server.url) as checkpoint:
            assert type(checkpoint) is not ranks.RankedCheckpoint
            # So ranks that read in different ways have the same checkpoint.
            assert checkpoint.fingerprint == fingerprint
        assert loaded(server.url).keys() == loaded(folder).keys()
    with llm.serve_weights(token=TOKEN) as server:
        first, second = ports(server)
    for port in (first, second):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1)


class File:
    """What a file says of its tensors."""

    path = Path("rank.safetensors")

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.entries = {
            name: Entry(StoredDType("float32", 4), shape, 0, 0) for name, shape in shapes.items()
        }

    def __getitem__(self, name: str) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("boxes", "covered"),
    [
        ([{"w@0,0": (2, 6)}, {"w@2,0": (2, 6)}], True),
        ([{"w@0,0": (4, 3), "w@0,3": (4, 3)}], True),
        ([{"w@0,0": (2, 6)}], False),
        ([{"w@0,0": (2, 6)}, {"w@1,0": (2, 6)}], False),
        ([{"w@0,0": (2, 6)}, {"w@3,0": (2, 6)}], False),
        ([{"w@0": (24,)}], False),
    ],
)
def test_boxes_that_are_not_all_of_a_tensor_are_not_used(
    boxes: list[dict[str, tuple[int, ...]]], covered: bool
) -> None:
    whole = {"w": File(w=(4, 6))}
    assert [n for n, _ in ranks._covered(whole, [File(**each) for each in boxes])] == [
        "w"
    ] * covered


def grid(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Boxes of one element."""
    return {f"w@{row},{column}": (1, 1) for row in range(rows) for column in range(columns)}


STEPS: dict[str, tuple[int, ...]] = {f"w@{at},{at}": (400 - at, 1) for at in range(400)}
STEPS |= {f"w@0,{at}": (at, 1) for at in range(1, 400)}


@pytest.mark.parametrize(
    ("shape", "boxes", "covered"),
    [
        ((2000, 1), grid(2000, 1), True),
        ((1, 2000), grid(1, 2000), True),
        ((40, 50), grid(40, 50), True),
        ((400, 400), STEPS, False),  # each lies beside all others, so nobody finds out
    ],
)
def test_many_boxes_are_compared_with_few(
    shape: tuple[int, int],
    boxes: dict[str, tuple[int, ...]],
    covered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(ranks, "overlap", lambda *two: (compared.append(two), overlap(*two))[1])
    assert bool([*ranks._covered({"w": File(w=shape)}, [File(**boxes)])]) == covered
    assert len(compared) <= 64 * len(boxes)


FILE = b'"file": "rank-0123456789abcdef.safetensors"'


@pytest.mark.parametrize(
    "data",
    [b'{"ports": [0], %s}', b'{"ports": "80", %s}', b"{%s}", b'{"ports": [70000], %s}', b"[{%s}]"],
)
def test_what_is_no_description_of_ranks_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointFormatError, match="Load from the engine again"):
        ranks._described(data % FILE, "ranks.json")
    for name in (b'"file": "../rank-0123456789abcdef.safetensors"', b'"file": 1', b'"x": 1'):
        with pytest.raises(CheckpointFormatError, match="Load from the engine again"):
            ranks._described(b'{"ports": [80], %s}' % name, "ranks.json")
    with pytest.raises(CheckpointFormatError, match="no box of another"):
        list(ranks._covered({}, [File(w=(1,))]))
