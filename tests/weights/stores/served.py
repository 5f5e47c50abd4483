"""Checkpoints behind a web server and behind S3, and what a load of them gives.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import DeviceConfig, ModelConfig, get_model
from vllm_module.build.model_source import ModelSource, build_model
from vllm_module.errors import WeightLoadError
from vllm_module.models.llama import LlamaConfig
from vllm_module.testing import random_weights, write_checkpoint

support = runpy.run_path(str(Path(__file__).parents[2] / "support.py"))
servers: Any = runpy.run_path(str(Path(__file__).parents[1] / "stores_server.py"))
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


def state(model: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return get_model(model_config=ModelConfig(model=model), device_config=CPU).state_dict()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(expected) and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def busy(status: int, **headers: str) -> Callable[[Any], bool]:
    def fault(handler: Any) -> bool:
        handler.answer(status, b"<html>busy</html>", Content_Type="text/html", **headers)
        return True

    return fault


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


def whole(handler: Any) -> None:
    handler.answer(200, handler.data() or b"")


def refused(url: str) -> str:
    with pytest.raises(WeightLoadError) as error:
        state(url)
    text = str(error.value)
    assert "HIDDEN" not in text
    return text


def listed(names: list[str]) -> Callable[[Any], bool]:
    """Return the answers of a bucket with these files and the configuration, all of it {}."""

    def fault(handler: Any) -> bool:
        if LIST in handler.path:
            list_names(handler, ["config.json", *names])
        else:
            handler.answer(200, b"{}")
        return True

    return fault


def opened(url: str) -> Any:
    return ModelSource.find(ModelConfig(model=url)).open()
