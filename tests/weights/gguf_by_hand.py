"""A GGUF file written by hand, and a small model whose files gguf-py writes.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import json
import runpy
import struct
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module import ModelConfig, get_model
from vllm_module.weights.source import find_source

written = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("gguf_models.py"))))
SMALL = {**written.CONFIGS["llama"], "num_hidden_layers": 1}
IDS = torch.arange(2, 14)


@pytest.fixture(scope="module")
def model() -> Any:
    """The model that most files here hold."""
    return written.new_model(SMALL)


def logits(path: Path, **config: Any) -> torch.Tensor:
    built = get_model(model_config=ModelConfig(model=str(path), dtype="float32", **config))
    with torch.inference_mode():
        computed: torch.Tensor = built.compute_logits(built(IDS, torch.arange(len(IDS))))
    return computed


def header(
    keys: Mapping[str, Any] | None = None,
    tensors: list[tuple[str, list[int], int, int]] | None = None,
    *,
    data: int = 256,
    counts: tuple[int, int] | None = None,
    magic: bytes = b"GGUF",
    version: int = 3,
) -> bytes:
    """Return a file written by hand, by the format's description."""

    def text(value: str | bytes) -> bytes:
        value = value.encode() if isinstance(value, str) else value
        return struct.pack("<Q", len(value)) + value

    keys = {"general.architecture": (8, text("llama")), **(keys or {})}
    tensors = [("a", [32, 2], 0, 0)] if tensors is None else tensors
    out = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(keys))))
    for key, (kind, value) in keys.items():
        out += text(key) + struct.pack("<I", kind) + value
    for name, sizes, kind, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return out + bytes(-len(out) % 32) + bytes(data)


def config_of(path: Path) -> Any:
    return json.loads((find_source(str(path)).folder / "config.json").read_text())
