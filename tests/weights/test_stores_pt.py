"""Files of torch.save in stores: the bits of the local folder, by ranges."""

from __future__ import annotations

import json
import runpy
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import DeviceConfig, ModelConfig, get_model
from vllm_module.build.model_source import ModelSource, build_model
from vllm_module.distributed import run_ranks
from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.models.llama import LlamaConfig
from vllm_module.testing import random_weights
from vllm_module.weights import source
from vllm_module.weights.stores import store, stored_bytes

servers: Any = runpy.run_path(str(Path(__file__).with_name("stores_server.py")))
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 4096,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
CPU = DeviceConfig(device="cpu")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Serve one file, two files with an index, and a file that would run code."""
    folder = tmp_path_factory.mktemp("served")
    model = build_model(LlamaConfig(**CONFIG), torch.float32, torch.device("cpu"))
    weights = random_weights(model.expected_weights(), seed=0)
    for each in ("one", "two", "hostile"):
        (folder / each).mkdir()
        (folder / each / "config.json").write_text(json.dumps(CONFIG))
    torch.save(dict(weights), folder / "one" / "pytorch_model.bin")
    torch.save({"w": print}, folder / "hostile" / "pytorch_model.bin")
    names = sorted(weights)
    weight_map = {name: f"part-{at % 2}.bin" for at, name in enumerate(names)}
    for file in set(weight_map.values()):
        held = {name: weights[name] for name in names if weight_map[name] == file}
        torch.save(held, folder / "two" / file)
    index = folder / "two" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with servers["serving"](folder) as server:
        yield server


@pytest.fixture
def server(served: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    served.fault, served.sent = None, 0
    monkeypatch.setattr(source, "registered_sources", {})
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return served


def state(model: str) -> dict[str, torch.Tensor]:
    return get_model(model_config=ModelConfig(model=model), device_config=CPU).state_dict()


@pytest.mark.parametrize("kept", [False, True], ids=["fetched", "kept on disk"])
@pytest.mark.parametrize("name", ["one", "two"])
def test_ranks_have_the_bits_of_the_local_folder(
    server: Any, name: str, kept: bool, tmp_path: Path
) -> None:
    """Each rank of 1 and of 2 has what it has from the folder; auto finds the format."""
    directory = str(tmp_path) if kept else None

    def load(model: str) -> dict[str, torch.Tensor]:
        config = ModelConfig(model=model, download_dir=directory)
        return get_model(model_config=config, device_config=CPU).state_dict()

    for size in (1, 2):
        expected = run_ranks(size, lambda rank: state(str(server.folder / name)))
        found = run_ranks(size, lambda rank: load(f"{server.url}/{name}"))
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[each], theirs[each]) for each in ours)


def test_a_part_is_read_and_no_more(server: Any) -> None:
    """Opening reads the archive's list and pickle; a handle's rows are requested alone."""
    found = ModelSource.find(ModelConfig(model=f"{server.url}/one"), "pt")
    with found.open() as checkpoint:
        assert checkpoint.load_format == "pt"
        assert 0 < checkpoint.bytes_requested < checkpoint.nbytes / 4
        before = checkpoint.bytes_requested
        checkpoint["model.layers.0.mlp.up_proj.weight"].narrow(0, 0, 1024).read()
        assert checkpoint.bytes_requested - before == 1024 * 64 * 4
        assert checkpoint.fingerprint != ""


def test_headers_of_members_are_requested_together(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their answers wait for each other, so that one by one none would come; a failure ends all."""
    monkeypatch.setattr(stored_bytes, "_FIRST_BYTES", 512)
    found = ModelSource.find(ModelConfig(model=f"{server.url}/one"), "pt")
    together = threading.Barrier(stored_bytes._AHEAD)
    headers: list[str] = []

    def asks_for_header(handler: Any) -> bool:
        first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        return first > 0 and last + 1 - first == stored_bytes._LEAST_BYTES

    def fault(handler: Any) -> bool:
        if asks_for_header(handler):
            headers.append(handler.path)
            if len(headers) <= stored_bytes._AHEAD:
                together.wait(60)
        return False

    server.fault = fault
    with found.open() as checkpoint:
        assert checkpoint.nbytes > 1 << 20
    assert together.broken is False
    assert len(headers) >= stored_bytes._AHEAD
    asked = len(headers)
    headers.clear()

    def fail(handler: Any) -> bool:
        if asks_for_header(handler):
            headers.append(handler.path)
            handler.answer(404)
            return True
        return False

    server.fault = fail
    with pytest.raises(WeightReadError, match=r"one/pytorch_model.bin.*could be read when it"):
        found.open()
    # Of one part, another answer may have had the bytes before.
    assert 0 < len(headers) <= asked + 1


def test_a_network_that_fails_is_no_damage_of_the_file(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the list of an archive cannot be read, the error is that of the network."""
    monkeypatch.setattr(store, "RETRY_SECONDS", 0.0)
    found = ModelSource.find(ModelConfig(model=f"{server.url}/one"), "pt")

    def fault(handler: Any) -> bool:
        if handler.headers["Range"].startswith("bytes=0-"):
            return False
        handler.answer(503)
        return True

    server.fault = fault
    with pytest.raises(WeightReadError, match="try again when the store") as error:
        found.open()
    assert "damaged" not in str(error.value)


def test_the_file_that_cannot_be_read_is_named(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not another one, whose headers were asked for at the same time."""
    monkeypatch.setattr(stored_bytes, "_FIRST_BYTES", 512)
    found = ModelSource.find(ModelConfig(model=f"{server.url}/two"), "pt")
    failed = threading.Event()

    def fault(handler: Any) -> bool:
        first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        is_header = first > 0 and last + 1 - first == stored_bytes._LEAST_BYTES
        if is_header and handler.path.endswith("part-1.bin"):
            handler.answer(404)
            failed.set()
            return True
        if is_header:
            failed.wait(5)
            time.sleep(0.2)
        return False

    server.fault = fault
    with pytest.raises(WeightReadError, match=r"two/part-1.bin.*could be read when it"):
        found.open()


def test_a_pickle_that_asks_for_more_than_tensors_is_refused(server: Any) -> None:
    """The error has the URL, and nothing is run."""
    with pytest.raises(CheckpointFormatError, match=r"hostile/pytorch_model.bin.*nothing of it"):
        state(f"{server.url}/hostile")
