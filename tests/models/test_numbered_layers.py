"""What each layer is, where entries of a configuration say it by numbers of layers."""

from __future__ import annotations

import runpy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module.build.model_source import build_model
from vllm_module.build.registry import config_class
from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import parse_config
from vllm_module.layers import FusedMoE

CONFIGS = runpy.run_path(str(Path(__file__).with_name("configurations.py")))["CONFIGS"]

LAYERS = 4
DENSE: dict[str, list[Any]] = {"mlp_only_layers": [[], [0, 3]], "decoder_sparse_step": [1, 2, 3, 5]}
# The entries of a model that number layers, and values that differ in what some layer is.
NUMBERS: dict[str, dict[str, list[Any]]] = {
    "deepseek-v2": {"first_k_dense_replace": [0, 1, 4]},
    "deepseek-v3": {"first_k_dense_replace": [0, 3, 4]},
    "qwen2-moe": DENSE,
    "qwen3-moe": DENSE,
    "qwen3-next": {"full_attention_interval": [2, 3], "decoder_sparse_step": [1, 2],
                   "mlp_only_layers": [[], [1]]},
    "bamba": {"attn_layer_indices": [[0], [3], [1, 2]]},
}  # fmt: skip


def build(theirs: Any, **entries: Any) -> vLLMModule:
    """Build our model of a configuration of transformers', with these entries beside its own."""
    cls = AutoModelForCausalLM._model_mapping[type(theirs)].__name__
    stored = theirs.to_dict() | {"architectures": [cls]} | entries
    config = parse_config(config_class([cls]), stored, Path("config.json"))
    return build_model(config, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", NUMBERS)
def test_each_layer_is_what_it_is_in_transformers(name: str) -> None:
    """The tensors of each layer are those that transformers stores, whatever the numbers are."""
    found = set()
    for values in product(*NUMBERS[name].values()):
        numbers = dict(zip(NUMBERS[name], values, strict=True))
        entries = CONFIGS[name] | {"num_hidden_layers": LAYERS} | numbers
        theirs = AutoConfig.for_model(**entries)
        with torch.device("meta"):
            stored = AutoModelForCausalLM.from_config(theirs).state_dict()
        plan = build(theirs).plan_weights(stored)
        assert plan.report.ok, numbers
        found.add(frozenset(stored))
    assert len(found) > 2  # the values do differ


@pytest.mark.parametrize(
    ("first", "every", "expected"),
    [
        (0, 1, "EEEE"), (0, 2, "E.E."), (0, 3, "E..E"), (0, 4, "E..."), (1, 1, ".EEE"),
        (1, 2, "..E."), (1, 3, "...E"), (2, 2, "..E."), (3, 2, "...."), (3, 3, "...E"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_every_nth_layer_has_experts(name: str, first: int, every: int, expected: str) -> None:
    """``moe_layer_freq`` counts from layer 0, as in DeepSeek's own code; transformers lacks it."""
    theirs = AutoConfig.for_model(
        **CONFIGS[name] | {"num_hidden_layers": LAYERS, "first_k_dense_replace": first}
    )
    layers: Any = build(theirs, moe_layer_freq=every).get_submodule("model.layers")
    sparse = [any(isinstance(each, FusedMoE) for each in layer.modules()) for layer in layers]
    assert "".join(".E"[each] for each in sparse) == expected
