"""The laws of loading where the weights come from a store: ranges of a file on a web server."""

from __future__ import annotations

import itertools
import runpy
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from safetensors.torch import save

from vllm_module.core import planner
from vllm_module.core.module import vLLMModule
from vllm_module.testing import LAWS, Law, assert_staged, assert_transfers
from vllm_module.testing.sources import WatchedSource
from vllm_module.weights.stores import spans
from vllm_module.weights.stores.checkpoint import open_file
from vllm_module.weights.stores.http_client import web_client
from vllm_module.weights.stores.place import parse
from vllm_module.weights.stores.store import Store

HERE = Path(__file__).parent
SUBJECTS = runpy.run_path(str(HERE / "subjects.py"))["SUBJECTS"]
servers: Any = runpy.run_path(str(HERE.parent / "weights" / "stores_server.py"))


class Both:
    """A handle of a store beside one that records reads: narrowed alike, and read alike."""

    def __init__(self, stored: Any, watched: Any) -> None:
        self._stored, self._watched = stored, watched
        self.shape, self.dtype = stored.shape, stored.dtype

    def narrow(self, dim: int, start: int, length: int) -> Both:
        narrowed = (each.narrow(dim, start, length) for each in (self._stored, self._watched))
        return Both(*narrowed)

    def view(self, shape: torch.Size) -> Both:
        return Both(self._stored.view(shape), self._watched.view(shape))

    def read_into(self, destination: torch.Tensor) -> None:
        self._watched.read_into(destination)
        destination.copy_(self._stored.read())

    def read(self) -> torch.Tensor:
        destination = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(destination)
        return destination


@contextmanager
def waiting_for_others(threads: set[threading.Thread]) -> Iterator[None]:
    """Wait at the end until only ``threads`` are there: those of connections end a bit later."""
    yield
    started = {each for each in threading.enumerate() if each.ident is not None}
    for each in started - threads:
        if each.name.startswith("store-request") or "process_request" in each.name:
            each.join(10)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Load and update from a server what is given as tensors; return how often that was done."""
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(spans, "REQUEST_BYTES", 256)
    monkeypatch.setattr(spans, "GAP_BYTES", 16)
    number, counted = itertools.count(), SimpleNamespace(number=0)

    def from_store(right: Any) -> Any:
        def call(module: vLLMModule, weights: Any) -> Any:
            if planner._current.get() is not None or not isinstance(weights, Mapping | list):
                return right(module, weights)  # inside of another load, or a stream
            watched = isinstance(weights, WatchedSource)
            pairs: Any = weights._tensors if watched else weights
            pairs = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
            plain = all(type(value) is torch.Tensor and not value.is_meta for _, value in pairs)
            if not plain or not pairs or len(dict(pairs)) < len(pairs):
                return right(module, weights)
            name = f"{next(number)}.safetensors"
            data = save({key: value.clone().contiguous() for key, value in pairs})
            server.kept[server.folder / "model" / name] = data
            place, threads = parse(f"{server.url}/model"), set(threading.enumerate())
            with waiting_for_others(threads), closing(Store(place, web_client(place))) as store:
                file, _ = open_file(store, name, "safetensors")
                counted.number += 1
                if watched:
                    given = {key: Both(file[key], handle) for key, handle in weights.items()}
                    return right(module, given)
                handles = [(key, file[key]) for key, _ in pairs]
                return right(module, dict(handles) if isinstance(weights, Mapping) else handles)

        return call

    before = settings.get_current_profile_name()
    settings.register_profile("stores", settings.get_profile(before), max_examples=3)
    settings.load_profile("stores")
    with servers["serving"](HERE) as server:
        for method in ("load_weights", "update_weights"):
            right = getattr(vLLMModule, method)
            monkeypatch.setattr(vLLMModule, method, from_store(right))
        yield counted
    settings.load_profile(before)


# A transfer is planned, and its values are numbers that no store has; a layer has no stages.
READING = [law for law in LAWS if law not in (assert_transfers, assert_staged)]


@pytest.mark.parametrize("law", READING, ids=lambda law: law.__name__)
def test_a_store_keeps_the_laws(law: Law, loads: Any) -> None:
    """Rows and columns of fused projections come from ranges, at every size that is drawn."""
    assert SUBJECTS["attention"].hold(law) > 0
    assert loads.number > 0
