"""The laws of loading hold for adapters, by the same functions."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

from vllm_module.adapters import Adapter, AdapterConfig
from vllm_module.models.deepseek_v2 import DeepseekV2ForCausalLM
from vllm_module.models.deepseek_v3 import DeepseekV3ForCausalLM
from vllm_module.models.gpt2 import GPT2LMHeadModel
from vllm_module.models.llama import LlamaForCausalLM
from vllm_module.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm_module.models.qwen3_next import Qwen3NextForCausalLM
from vllm_module.testing import LAWS, Law, model_configs

WRAPPED = runpy.run_path(str(Path(__file__).parents[1] / "laws/wrapped.py"))
AT_LENGTH = "AT_LENGTH" in os.environ


class Subject(NamedTuple):
    """What builds a base model, with what is drawn for it, and the settings of its adapter."""

    base: Callable[..., Any]
    arguments: Mapping[str, Any]
    config: AdapterConfig


def own(base: Any, **entries: Any) -> Subject:
    return Subject(base, {"config": model_configs(base)}, AdapterConfig(lora_alpha=6, **entries))


def wrapped(kind: str) -> Subject:
    base = partial(WRAPPED["build"], kind)
    return Subject(base, WRAPPED["FAMILIES"][kind], AdapterConfig(r=3, lora_alpha=6))


SUBJECTS = {
    "dense": own(LlamaForCausalLM, r=3),
    "experts": own(Qwen3MoeForCausalLM, r=2),
    "latent, packed experts": own(
        DeepseekV3ForCausalLM, r=2, target_parameters=["gate_up_proj", "down_proj"]
    ),
    "latent": own(DeepseekV2ForCausalLM, r=3),
    "transposed": own(GPT2LMHeadModel, r=3),
    "hybrid": own(Qwen3NextForCausalLM, r=2),
    "wrapped": wrapped("smollm3"),
    "wrapped, experts": wrapped("mixtral"),
}
# All laws of the first, and some of the others: "make laws" tries all of them.
PAIRS = [
    (name, law)
    for row, name in enumerate(SUBJECTS)
    for column, law in enumerate(LAWS)
    if AT_LENGTH or row < 1 or (row + column) % 5 == 0
]


@pytest.fixture
def fewer_cases(request: pytest.FixtureRequest) -> Iterator[None]:
    """Try fewer cases than of a model, whose tree an adapter has; "make laws" tries more."""
    before = settings.get_current_profile_name()
    is_wrapped = "wrapped" in str(request.node.callspec.params["name"])  # built for each rank
    examples = (5 if is_wrapped else 25) if AT_LENGTH else (1 if is_wrapped else 3)
    settings.register_profile("few", settings.get_profile(before), max_examples=examples)
    settings.load_profile("few")
    yield
    settings.load_profile(before)


@pytest.mark.usefixtures("fewer_cases")
@pytest.mark.parametrize(("name", "law"), PAIRS)
def test_law(name: str, law: Law) -> None:
    """A whole adapter is loaded: A and B of every slot of every layer that can have them."""
    base, arguments, config = SUBJECTS[name]

    def adapter(**drawn: Any) -> Adapter:
        return Adapter(base(**drawn), config)

    law(adapter, **arguments)
