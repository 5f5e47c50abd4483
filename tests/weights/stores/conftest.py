"""A server of a checkpoint, as a web server and as S3, and what its folder gives."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.distributed import run_ranks
from vllm_module.weights import source
from vllm_module.weights.stores import spans, store, stored_bytes

# Pytest's importlib mode has no imports between test files.
STORES: Any = runpy.run_path(str(Path(__file__).with_name("served.py")))
servers, write, KINDS, state = (STORES[name] for name in ("servers", "write", "KINDS", "state"))


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


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def local(served: Any) -> list[list[dict[str, torch.Tensor]]]:
    """Return what each rank of 1 and of 4 has from the local folder."""
    folder = str(served.folder / "model")
    return [run_ranks(size, lambda rank: state(folder)) for size in (1, 4)]
