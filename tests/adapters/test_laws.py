"""The laws of loading hold for adapters, by the same functions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from vllm_module.adapters import Adapter, AdapterConfig
from vllm_module.models.deepseek_v3 import DeepseekV3ForCausalLM
from vllm_module.models.llama import LlamaForCausalLM
from vllm_module.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm_module.testing import LAWS, Law, model_configs

MODELS = {
    "dense": (LlamaForCausalLM, AdapterConfig(r=3, lora_alpha=6)),
    "experts": (Qwen3MoeForCausalLM, AdapterConfig(r=2, lora_alpha=6)),
    "packed experts": (
        DeepseekV3ForCausalLM,
        AdapterConfig(r=2, lora_alpha=6, target_parameters=["gate_up_proj", "down_proj"]),
    ),
}


@pytest.fixture
def fewer_cases() -> Iterator[None]:
    """Try fewer cases than of a model, whose tree an adapter has; "make laws" tries more."""
    before = settings.get_current_profile_name()
    examples = 25 if "AT_LENGTH" in os.environ else 5
    settings.register_profile("few", settings.get_profile(before), max_examples=examples)
    settings.load_profile("few")
    yield
    settings.load_profile(before)


@pytest.mark.usefixtures("fewer_cases")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law: Law, name: str) -> None:
    """A whole adapter is loaded: A and B of every slot of every layer that can have them."""
    base, config = MODELS[name]

    def adapter(drawn: Any) -> Adapter:
        return Adapter(base(drawn), config)

    law(adapter, model_configs(base))
