"""Formats of whole folders in stores: the bits of the local folder, by ranges."""

from __future__ import annotations

import io
import json
import pickle
import runpy
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import obstore
import pytest
import torch
from moto.server import ThreadedMotoServer

from vllm_module import DeviceConfig, LoadConfig, ModelConfig, get_model
from vllm_module.build.model_source import ModelSource, build_model
from vllm_module.distributed import run_ranks
from vllm_module.errors import CheckpointFormatError, ShardingError, UnsupportedModelError
from vllm_module.export.sharded_state import shard
from vllm_module.models.llama import LlamaConfig
from vllm_module.testing import random_weights, write_checkpoint
from vllm_module.weights import (
    find_changes,
    open_checkpoint,
    open_update,
    source,
    write_update,
)
from vllm_module.weights.source import find_source

HERE = Path(__file__).parent
servers: Any = runpy.run_path(str(HERE / "stores_server.py"))
gguf: Any = runpy.run_path(str(HERE / "gguf_models.py"))
mistral: Any = runpy.run_path(str(HERE / "test_mistral.py"))
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
# By the folder below, what is added to its URL on a server that does not list files.
NAMED = {
    "gguf": "/model.gguf",
    "split": "/m-00001-of-00002.gguf",
    "mistral": "",
    "sharded": "",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder of each format."""
    folder = tmp_path_factory.mktemp("formats")
    for name in ("gguf", "split"):
        (folder / name).mkdir()
    model = gguf["new_model"](gguf["CONFIGS"]["llama-wide"])
    gguf["write"](folder / "gguf" / "model.gguf", model, lambda name: "Q8_0")
    model = gguf["new_model"](gguf["CONFIGS"]["qwen2"])
    gguf["write"](folder / "split" / "m.gguf", model, split_max_tensors=14)
    torch.manual_seed(0)
    model = mistral["MistralForCausalLM"](mistral["MistralConfig"](**mistral["SHAPE"]))
    own = mistral["published"](folder, model, mistral["PARAMS"]) / "own"
    own.rename(folder / "mistral")
    shutil.rmtree(folder / "hf")
    plain = build_model(LlamaConfig(**CONFIG), torch.float32, torch.device("cpu"))
    weights = random_weights(plain.expected_weights(), seed=0)
    write_checkpoint(folder / "plain", weights, config=CONFIG, files=1)
    shard(ModelConfig(model=str(folder / "plain")), 2, folder / "sharded")
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Any]:
    with servers["serving"](folder) as server:
        yield server


@pytest.fixture
def server(served: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    served.fault, served.sent = None, 0
    served.counts.clear()
    monkeypatch.setattr(source, "registered_sources", {})
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return served


@pytest.fixture(scope="module")
def bucket(folder: Path) -> Iterator[str]:
    """Put the folders into a bucket."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    with pytest.MonkeyPatch.context() as patch:
        endpoint = "http://{}:{}".format(*moto.get_host_and_port())
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "AKIAHIDDEN",
            "AWS_SECRET_ACCESS_KEY": "HIDDEN",
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }.items():
            patch.setenv(name, value)
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
        store = obstore.store.S3Store("bucket", client_options={"allow_http": True})
        for path in folder.rglob("*"):
            if path.is_file():
                obstore.put(store, path.relative_to(folder).as_posix(), path.read_bytes())
        try:
            yield "s3://bucket"
        finally:
            moto.stop()


def test_one_file_of_weights_in_a_bucket(bucket: str) -> None:
    """A trainer's update is an object by itself: nothing beside it is asked for."""
    store = obstore.store.S3Store("bucket", client_options={"allow_http": True})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step-1.safetensors")
        changes = find_changes(torch.zeros(40), torch.arange(40.0))
        write_update(path, {"w": changes, "v": torch.ones(3)}, version="1", after="0")
        obstore.put(store, "mailbox/step-1.safetensors", path.read_bytes())
    with open_update(f"{bucket}/mailbox/step-1.safetensors") as update:
        assert (update.version, update.after, list(update)) == ("1", "0", ["v", "w"])
        assert update["w"].values.tolist() == [*range(1, 40)]
        assert update["v"].read().tolist() == [1, 1, 1]
    with pytest.raises(CheckpointFormatError, match=r"step-2\.safetensors"):
        open_update(f"{bucket}/mailbox/step-2.safetensors")


def states(model: str, size: int, load_format: str = "auto") -> list[dict[str, torch.Tensor]]:
    asked: Any = load_format

    def state(rank: int) -> dict[str, torch.Tensor]:
        config, load = ModelConfig(model=model), LoadConfig(load_format=asked)
        return get_model(model_config=config, load_config=load, device_config=CPU).state_dict()

    return run_ranks(size, state)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("name", NAMED)
def test_ranks_have_the_bits_of_the_local_folder(
    server: Any, bucket: str, folder: Path, name: str
) -> None:
    """Each rank has them over HTTP and from a bucket; auto finds the format where it can list."""
    for size in (2,) if name == "sharded" else (1, 2):
        expected = states(str(folder / name), size)
        assert_same(states(f"{server.url}/{name}{NAMED[name]}", size), expected)
        assert_same(states(f"{bucket}/{name}", size), expected)


@pytest.mark.parametrize("name", NAMED)
def test_a_pickled_source_opens_the_same_weights(server: Any, bucket: str, name: str) -> None:
    """Another process has the folder that was written, and the names of tensors."""
    for url in (f"{server.url}/{name}{NAMED[name]}", f"{bucket}/{name}"):
        found = find_source(url)
        again = pickle.loads(pickle.dumps(found))
        assert again.folder == found.folder
        assert (again.folder / "config.json").is_file()
        with found.weights() as first, again.weights() as second:
            assert first.load_format == second.load_format
            assert list(first) == list(second)
            assert first.fingerprint == second.fingerprint


def test_a_rank_of_a_sharded_state_reads_its_own_files(server: Any) -> None:
    """The other rank's file is not asked for; another number of ranks is refused by the URL."""
    found = ModelSource.find(ModelConfig(model=f"{server.url}/sharded"))
    with found.open() as checkpoint:
        weights = checkpoint.of_rank(1)  # type: ignore[union-attr]
        assert weights
        first = "/sharded/model-rank-0-part-0.safetensors"
        assert not server.counts[first]
    with pytest.raises(ShardingError, match=rf"{server.url}/sharded was sharded for 2"):
        states(f"{server.url}/sharded", 1)


def test_a_rank_file_that_was_changed_is_refused(server: Any) -> None:
    """A file of other bytes than the manifest says, and one that is not there."""

    def fault(answer: Any) -> Any:
        def fail(handler: Any) -> bool:
            if "rank-1" not in handler.path:
                return False
            answer(handler)
            return True

        return fail

    path = server.folder / "sharded" / "model-rank-1-part-0.safetensors"
    data = path.read_bytes()
    changed = data[:-1] + bytes([data[-1] ^ 1])

    def other(handler: Any) -> None:
        first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        body = changed[first : last + 1]
        handler.answer(
            206,
            body,
            ETag='"x"',
            Content_Range=f"bytes {first}-{first + len(body) - 1}/{len(data)}",
        )

    for answer, message in (
        (lambda handler: handler.answer(404), "is not there, and sharded_state.json lists it"),
        (other, "has another one. It was changed after it was written"),
    ):
        server.fault = fault(answer)
        with pytest.raises(CheckpointFormatError, match=message) as error:
            states(f"{server.url}/sharded", 2)
        assert f"{server.url}/sharded/model-rank-1" in str(error.value)


def test_a_tensor_of_a_gguf_file_is_read_alone(server: Any) -> None:
    """Opening reads the header; a slice of blocks is requested alone."""
    found = ModelSource.find(ModelConfig(model=f"{server.url}/gguf/model.gguf"))
    with found.open() as checkpoint:
        assert checkpoint.load_format == "gguf"
        name = "model.layers.0.mlp.up_proj.weight_q8_0"
        before = checkpoint.bytes_requested  # type: ignore[union-attr]
        rows = checkpoint[name].narrow(0, 0, 512).read()
        requested = checkpoint.bytes_requested - before  # type: ignore[union-attr]
        assert requested == rows.numel() == 512 * 8 * 34


def test_the_hub_is_read_in_these_formats(
    server: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several GGUF files is named below the repository, and its cache is not written to."""
    commit = "a" * 40
    snapshot = tmp_path / "models--owner--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **given: str(snapshot))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    template = f"{server.url}/gguf/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    names = ["model.gguf", "other.gguf"]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **given: names)
    expected = states(str(folder / "gguf"), 1)
    assert_same(states("hf://owner/name@main/model.gguf", 1), expected)
    with pytest.raises(CheckpointFormatError, match=r"several models .* model.gguf, other.gguf"):
        find_source("hf://owner/name")
    names.pop()
    assert_same(states("hf://owner/name", 1), expected)
    assert list(snapshot.iterdir()) == []


def test_what_cannot_be_found_is_refused(server: Any, bucket: str) -> None:
    """Each refusal has the URL and says what to do."""
    for url, load_format, message in (
        (f"{server.url}/gguf", "gguf", "a GGUF file has to be named: add /NAME.gguf"),
        (f"{server.url}/gguf", "auto", "config.json: .*no such file"),
        (f"{server.url}/gguf/none.gguf", "auto", "none.gguf: .*no such file"),
        (f"{server.url}/split/m-00001-of-00009.gguf", "auto", "m-00001-of-00009.gguf is not there"),
        (f"{server.url}/plain", "sharded_state", "holds no sharded state"),
        (f"{bucket}/plain", "gguf", r"holds no \*.gguf file, .*there is config.json, model.safe"),
        (f"{bucket}/plain", "npcache", "each tensor is a file of its own"),
    ):
        with pytest.raises(CheckpointFormatError, match=message) as error:
            states(url, 1, load_format)
        assert url.rpartition("/")[0] in str(error.value)
    with pytest.raises(UnsupportedModelError, match="no dummy weights are made of the blocks"):
        states(f"{server.url}/gguf/model.gguf", 1, "dummy")


@pytest.mark.parametrize(
    ("asked", "name"),
    [("dummy", "dummy"), ("auto", "safetensors"), ("safetensors", "safetensors")],
)
def test_the_format_of_a_source_is_that_of_a_folder(
    server: Any, bucket: str, folder: Path, asked: str, name: str
) -> None:
    """Dummy weights are of none that is there, wherever the configuration is."""
    for url in (f"{server.url}/plain", f"{bucket}/plain", str(folder / "plain")):
        assert getattr(find_source(url, load_format=asked), "load_format") == name  # noqa: B009


def test_files_of_the_second_suffix_are_found(bucket: str, folder: Path) -> None:
    """A bucket whose weights are ``*.pt`` alone is read; it has no index and no usual name."""
    with open_checkpoint(folder / "plain") as checkpoint:
        buffer = io.BytesIO()
        torch.save({name: handle.read() for name, handle in checkpoint.items()}, buffer)
    store = obstore.store.S3Store("bucket", client_options={"allow_http": True})
    obstore.put(store, "pt/weights.pt", buffer.getvalue())
    obstore.put(store, "pt/config.json", json.dumps(CONFIG).encode())
    assert_same(states(f"{bucket}/pt", 1), states(str(folder / "plain"), 1))


def test_files_of_trainers_are_refused_by_the_reason(bucket: str) -> None:
    """A folder of torch.distributed.checkpoint is recognized, and says why it is to be here."""
    store = obstore.store.S3Store("bucket", client_options={"allow_http": True})
    for name, data in ((".metadata", b""), ("config.json", json.dumps(CONFIG).encode())):
        obstore.put(store, f"trained/{name}", data)
    with pytest.raises(CheckpointFormatError, match="'dcp' is read from a local folder only"):
        states(f"{bucket}/trained", 1)
