"""What is fetched of a store and kept on disk has the same bits, whatever happens to it."""

from __future__ import annotations

import errno
import logging
import os
import runpy
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import DeviceConfig, ModelConfig, get_model
from vllm_module.build.model_source import ModelSource, build_model
from vllm_module.distributed import run_ranks
from vllm_module.models.llama import LlamaConfig
from vllm_module.testing import random_weights, write_checkpoint
from vllm_module.weights import source
from vllm_module.weights.source import find_source
from vllm_module.weights.stores import cache
from vllm_module.weights.stores.client import Version

servers: Any = runpy.run_path(str(Path(__file__).with_name("stores_server.py")))
support = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
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
URL = "https://host/model/file"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("served")
    model = build_model(LlamaConfig(**CONFIG), torch.float32, torch.device("cpu"))
    weights = random_weights(model.expected_weights(), seed=0)
    write_checkpoint(folder / "model", weights, config=CONFIG, files=2)
    with servers["serving"](folder) as server:
        yield server


@pytest.fixture
def server(served: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    served.fault, served.requests = None, []
    monkeypatch.setattr(source, "registered_sources", {})
    monkeypatch.setattr(cache, "CHUNK_BYTES", 4096)
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return served


def state(url: str, folder: Path | None) -> dict[str, torch.Tensor]:
    config = ModelConfig(model=url, download_dir=folder and str(folder))
    return get_model(model_config=config, device_config=CPU).state_dict()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


@pytest.fixture(scope="module")
def local(served: Any) -> list[dict[str, torch.Tensor]]:
    """Return what each rank of 2 has, and then what a rank of 1 has, from the local folder."""
    folder = str(served.folder / "model")
    return [*run_ranks(2, lambda rank: state(folder, None)), state(folder, None)]


def ranges(server: Any) -> list[str]:
    """Return the ranges of weights that were requested, and forget them."""
    found = [headers["Range"] for _, headers in server.requests if "Range" in headers]
    server.requests.clear()
    return found


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_second_load_requests_only_what_proves_the_version(
    server: Any, local: Any, tmp_path: Path
) -> None:
    """One byte of each file is requested again, at any size; without the folder, none is kept."""
    url = f"{server.url}/model"
    assert same(state(url, None), local[2])
    assert not entries(tmp_path)
    assert same(state(url, tmp_path), local[2])
    server.requests.clear()
    assert same(state(url, tmp_path), local[2])
    assert ranges(server) == ["bytes=0-0"] * 2
    found = run_ranks(2, lambda rank: state(url, tmp_path))
    assert all(map(same, found, local))
    assert set(ranges(server)) == {"bytes=0-0"}


def test_what_a_rank_kept_serves_another_cut(server: Any, local: Any, tmp_path: Path) -> None:
    """A load of the whole model after that of one rank requests the rest, and has the same bits."""
    url = f"{server.url}/model"
    with ModelSource.find(ModelConfig(model=url, download_dir=str(tmp_path))).open() as checkpoint:
        handle = checkpoint["model.layers.1.mlp.down_proj.weight"].narrow(1, 8, 24)
        handle.read()
    assert same(state(url, tmp_path), local[2])
    server.requests.clear()
    assert same(state(url, tmp_path), local[2])
    assert ranges(server) == ["bytes=0-0"] * 2


def test_what_is_kept_is_for_its_user_only(server: Any, tmp_path: Path) -> None:
    """Folders have 0700 and files 0600, whatever the umask; a folder for others is not used."""
    folder = tmp_path / "made"
    old = os.umask(0)
    try:
        state(f"{server.url}/model", folder)
    finally:
        os.umask(old)
    (top,) = folder.iterdir()
    for path in (top, *top.rglob("*")):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected
    assert len(entries(top)) == 2


@pytest.mark.parametrize("mode", [0o777, *(0o700 | 1 << bit for bit in range(6))], ids=oct)
def test_a_folder_that_others_may_enter_is_not_used(
    server: Any, local: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    """Nothing is read from it or written to it; the log says why, once, and the model loads."""
    top = tmp_path / cache._FOLDER
    top.mkdir()
    top.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert same(state(f"{server.url}/model", tmp_path), local[2])
    assert not entries(tmp_path)
    (said,) = [each.getMessage() for each in caplog.records if "is not kept" in each.getMessage()]
    assert "0700" in said


@pytest.mark.parametrize("kind", ["a file", "a link", "no permission"])
def test_a_folder_that_cannot_be_made_is_not_fatal(
    server: Any, local: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has the same bits; a link to another folder is not followed."""
    top, outside = tmp_path / "kept" / cache._FOLDER, tmp_path / "outside"
    top.parent.mkdir()
    outside.mkdir(mode=0o700)
    mkdir = Path.mkdir
    if kind == "a file":
        top.touch()
    elif kind == "a link":
        top.symlink_to(outside)
    else:

        def forbidden(path: Path, *given: Any, **named: Any) -> None:
            if path.is_relative_to(top):
                raise PermissionError(errno.EACCES, "Permission denied")
            mkdir(path, *given, **named)

        monkeypatch.setattr(Path, "mkdir", forbidden)
    assert same(state(f"{server.url}/model", top.parent), local[2])
    assert not entries(outside)
    assert len(entries(top.parent)) == (kind == "a file")


def test_a_full_disk_is_not_fatal(
    server: Any, local: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """What was written before is kept; the rest is fetched, now and later."""
    written = 0
    pwrite = os.pwrite

    def full(file: int, data: Any, at: int) -> int:
        nonlocal written
        written += 1
        if written > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data[:1000], at)  # and a write may be a short one

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "pwrite", full)
        assert same(state(f"{server.url}/model", tmp_path), local[2])
    assert "No space left on device" in caplog.text
    assert same(state(f"{server.url}/model", tmp_path), local[2])


def test_a_damaged_chunk_is_fetched_again(server: Any, local: Any, tmp_path: Path) -> None:
    """Any byte that was changed, of data or digests, costs a request and not the right bits."""
    url = f"{server.url}/model"
    state(url, tmp_path)
    path = max(entries(tmp_path), key=lambda each: each.stat().st_size)
    data = path.read_bytes()
    count = len(data) // (4096 + 16)
    for at in (5000, count * 4096 + 16):  # both of the second chunk
        damaged = bytearray(data)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        server.requests.clear()
        assert same(state(url, tmp_path), local[2])
        assert sorted(ranges(server)) == ["bytes=0-0"] * 2 + ["bytes=4096-8191"]
        assert path.read_bytes() == data
    swapped = data[4096:8192] + data[:4096] + data[8192:]
    digests = count * 4096
    path.write_bytes(
        swapped[:digests] + data[digests + 16 : digests + 32] + data[digests : digests + 16]
        + data[digests + 32 :]
    )  # fmt: skip
    assert same(state(url, tmp_path), local[2])
    for length in (0, 100, len(data) + 5):
        path.write_bytes(data[:length].ljust(length, b"x"))
        assert same(state(url, tmp_path), local[2])
        assert path.stat().st_size == len(data)


def test_an_object_that_changed_is_fetched_anew(server: Any, tmp_path: Path) -> None:
    """What is kept of the old version is not taken for the new one, and is removed."""
    url = f"{server.url}/model"
    first = state(url, tmp_path)
    before = entries(tmp_path)
    name = "model-00002-of-00002.safetensors"
    path = server.folder / "model" / name
    old = path.read_bytes()

    def fault(handler: Any) -> bool:
        return name in handler.path and (handler.serve(200, ETag='"two"') or True)

    server.fault = fault
    try:
        server.kept[path] = old[:-4] + bytes(4)
        second = state(url, tmp_path)
    finally:
        server.kept[path] = old
    assert sum(not torch.equal(first[each], second[each]) for each in first) == 1
    assert len(entries(tmp_path)) == len(before) == len({*before} & {*entries(tmp_path)}) + 1


@pytest.mark.parametrize("tag", ["", 'W/"one"'])
def test_a_time_of_change_and_a_weak_tag_prove_nothing(
    server: Any, local: Any, tmp_path: Path, tag: str
) -> None:
    """Such a server is asked for everything: two versions may be of one second, or "alike"."""
    server.fault = lambda handler: handler.serve(200, ETag=tag) or True
    assert same(state(f"{server.url}/model", tmp_path), local[2])
    assert not entries(tmp_path)


def test_an_endpoint_has_files_of_its_own(tmp_path: Path) -> None:
    """Two services may have buckets of one name, and files in them with one ETag."""
    version = Version(4, '"one"', True)
    for origin, data in (("a", b"aaaa"), ("b", b"bbbb")):
        opened = cache.StoreCache(tmp_path, origin).open(URL, version)
        assert opened is not None
        opened.keep(0, data)
    assert read(tmp_path, version, "a") == b"aaaa"
    assert read(tmp_path, version, "b") == b"bbbb"


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ACCOUNT_NAME"])
def test_what_the_environment_adds_to_a_url_tells_stores_apart(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A container of one Azure account is not that of another, and their URLs are the same."""
    origins = set()
    for value in ("one", "two"):
        monkeypatch.setenv(name, value)
        made = find_source(f"{server.url}/model", download_dir=str(tmp_path))._cache()  # type: ignore[attr-defined]
        origins.add(made._of(URL))
    assert len(origins) == 2


def read(folder: Path, version: Version, origin: str = "", fetched: bytes = b"") -> bytes:
    """Return the whole of what is kept; ``fetched`` is what the store has."""
    opened = cache.StoreCache(folder, origin).open(URL, version)
    assert opened is not None
    view = memoryview(bytearray(version.size))

    def fetch(begin: int, part: memoryview) -> None:
        assert fetched, "fetched what should have been kept"
        part[:] = fetched[begin : begin + len(part)]

    opened.read(0, view, fetch)
    return bytes(view)


@pytest.mark.parametrize("writes", range(6))
def test_a_writer_that_is_killed_leaves_nothing_to_be_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """It is killed in the middle of each of its writes; what is read next are the store's bytes."""
    monkeypatch.setattr(cache, "CHUNK_BYTES", 4096)
    data = os.urandom(10_000)
    version = Version(len(data), '"one"', True)
    pid = os.fork()
    if pid == 0:
        count, pwrite = 0, os.pwrite

        def write(file: int, part: Any, at: int) -> int:
            nonlocal count
            if count == writes:
                pwrite(file, part[: len(part) // 2], at)
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return pwrite(file, part, at)

        os.pwrite = write
        read(tmp_path, version, fetched=data)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert read(tmp_path, version, fetched=data) == data
    assert read(tmp_path, version) == data


def test_processes_share_what_they_fetch(server: Any, local: Any, tmp_path: Path) -> None:
    """Two at once have the right bits, and a third requests nothing."""
    url, out = f"{server.url}/model", tmp_path / "out"
    out.mkdir()

    def load(rank: int) -> None:
        torch.set_num_threads(1)
        torch.save(state(url, tmp_path / "kept"), out / str(rank))

    pids = support["fork_ranks"](2, load, port=support["free_port"]())
    assert support["exit_codes"](pids) == [0, 0]
    server.requests.clear()
    assert same(state(url, tmp_path / "kept"), local[2])
    assert ranges(server) == ["bytes=0-0"] * 2
