"""What tests of refusals share: edits of a checkpoint, and checks of the error.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_module import ModelConfig, get_model
from vllm_module.build.model_source import build_model, read_config
from vllm_module.distributed import run_ranks, tensor_parallel
from vllm_module.errors import (
    ModelNotReadyError,
    WeightLoadError,
)
from vllm_module.quantization import rules_for
from vllm_module.weights import open_checkpoint

Tensors = dict[str, torch.Tensor]
ADVICE = "Check that config.json and the weights belong together"
CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.1.mlp"
# The first, middle and last slot of a fused layer, and layers of one slot.
LAYERS = {
    f"{ATTENTION}.q_proj": (f"{ATTENTION}.qkv_proj", "q_proj"),
    f"{ATTENTION}.k_proj": (f"{ATTENTION}.qkv_proj", "k_proj"),
    f"{ATTENTION}.v_proj": (f"{ATTENTION}.qkv_proj", "v_proj"),
    f"{ATTENTION}.o_proj": (f"{ATTENTION}.o_proj", ""),
    f"{MLP}.up_proj": (f"{MLP}.gate_up_proj", "up_proj"),
    f"{MLP}.down_proj": (f"{MLP}.down_proj", ""),
}


def ask(checkpoint: Any, quantization: Any = None, **entries: Any) -> ModelConfig:
    return ModelConfig(model=str(checkpoint.folder), quantization=quantization, **entries)


def refuse(checkpoint: Any, kind: type[Exception], quantization: Any = None, size: int = 1) -> str:
    """Check that the public API refuses a checkpoint, and return the message."""
    with pytest.raises(kind) as refused:
        run_ranks(size, lambda rank: get_model(model_config=ask(checkpoint, quantization)))
    assert isinstance(refused.value, WeightLoadError)
    return str(refused.value)


def refuse_weights(
    checkpoint: Any, kind: type[Exception], quantization: Any = None, size: int = 1
) -> str:
    """Check that the API and a model refuse the weights and that the model does not run after."""
    message = refuse(checkpoint, kind, quantization, size)

    def work() -> None:
        config_asked = ask(checkpoint, quantization)
        config = read_config(checkpoint.folder, config_asked)
        rules = rules_for(quantization, getattr(config, "quantization_config", None))
        model: Any = build_model(config, torch.float32, CPU, rules)
        with open_checkpoint(checkpoint.folder) as stored, pytest.raises(kind) as refused:
            model.load_weights(stored)
        assert str(refused.value) == message
        with pytest.raises(ModelNotReadyError):
            model(checkpoint.ids, torch.arange(len(checkpoint.ids)))
        with pytest.raises(ModelNotReadyError):
            model.compute_logits(torch.zeros(1, checkpoint.config["hidden_size"]))

    if size == 1:
        with tensor_parallel(rank=0, size=1):
            work()
    return message


def scaled(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """Return an edit that changes one tensor of a checkpoint."""

    def edit(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name])

    return edit


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def assert_names(message: str, layer: str, attr: str) -> None:
    """Check that a message names a tensor by its layer and slot."""
    path, slot = LAYERS[layer]
    assert message.startswith((f"{path}.{attr}", f"{layer}.{attr}")), message
    assert not slot or f"{slot!r}" in message or f"{layer}.{attr}" in message, message
