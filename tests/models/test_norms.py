"""Norms of each model in bfloat16: they round where those of transformers do."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import ModelConfig, get_model

_configurations = runpy.run_path(str(Path(__file__).with_name("configurations.py")))["CONFIGS"]
OF_TYPE: dict[str, dict[str, Any]] = {}
for each in _configurations.values():
    OF_TYPE.setdefault(each["model_type"], each)


def norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the norms of one tensor; others are called with a gate, too."""

    def is_one(module: nn.Module) -> bool:
        arguments = inspect.signature(module.forward).parameters.values()
        required = [each for each in arguments if each.default is each.empty]
        return "norm" in type(module).__name__.lower() and len(required) == 1

    return {name: module for name, module in model.named_modules() if is_one(module)}


@pytest.mark.parametrize("kind", sorted(OF_TYPE))
def test_norms_round_where_those_of_transformers_do(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**OF_TYPE[kind])
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(0)
    theirs = norms(reference.eval())
    for module in theirs.values():
        for parameter in module.parameters():
            parameter.data.normal_()
    reference.save_pretrained(tmp_path)
    ours = norms(get_model(model_config=ModelConfig(model=str(tmp_path), dtype="bfloat16")))
    both = ours.keys() & theirs.keys()
    assert len(both) >= 2, (ours, theirs)
    for name in both:
        x = torch.randn(50, *ours[name].weight.shape, dtype=torch.bfloat16)
        with torch.no_grad():
            expected, got = theirs[name](x), ours[name](x)
        differ = (got != expected).float().mean().item()
        assert differ < 0.005, (name, differ)  # a sum in another order; 0.25 where it rounds once
