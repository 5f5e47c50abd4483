"""The plans of other ranks, which are found from the model of rank 0."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module.build import registry
from vllm_module.build.model_source import build_model
from vllm_module.core.module import vLLMModule
from vllm_module.core.plan import LoadPlan
from vllm_module.distributed import expert_parallel, tensor_parallel
from vllm_module.hf_config import parse_config
from vllm_module.quantization import rules_for
from vllm_module.runtime.cache.kv_cache import page_bytes

CASES = runpy.run_path(str(Path(__file__).with_name("configurations.py")))
CONFIGS = CASES["CONFIGS"]

# Tensor-parallel size, expert-parallel size and how weights are quantized while they load.
LAYOUTS = [(2, 1, None), (4, 1, "fp8_per_channel"), (1, 3, None), (2, 4, "fp8_per_tensor")]


def build(config: Any, rank: int, tp_size: int, ep_size: int, scheme: str | None) -> vLLMModule:
    """Build the model of a rank."""
    experts = expert_parallel(rank=rank, size=ep_size) if ep_size > 1 else nullcontext()
    with tensor_parallel(rank=rank % tp_size, size=tp_size), experts:
        return build_model(config, torch.float32, torch.device("cpu"), rules_for(scheme, None))


def figures(plan: LoadPlan) -> Iterator[object]:
    """Yield the pieces that a rank reads, and what it holds."""
    for name, path, slot, source in plan.reads():
        assert isinstance(source, torch.Tensor)
        yield name, path, slot, source.dtype, source.storage_offset(), source.shape
    for path, tensor in plan.module.state_dict().items():
        yield path, tensor.shape, tensor.dtype


def folded(plan: LoadPlan) -> tuple[LoadPlan, list[int]]:
    """Return the plan with one tensor of those that are cut alike, and how many they are."""
    groups = plan.alike()
    first = [each[0] for each in groups]
    return replace(plan, fills=first), [len(each) for each in groups]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in CASES["DISTINCT"] else [pytest.mark.at_length])
        for name in CONFIGS
    ],
)
def test_a_plan_of_another_rank_is_that_of_its_model(name: str) -> None:
    """Pieces, shapes and memory found from rank 0 are those of a model built for the rank."""
    hf_config = AutoConfig.for_model(**CONFIGS[name])
    cls = AutoModelForCausalLM._model_mapping[type(hf_config)].__name__
    entries = hf_config.to_dict() | {"architectures": [cls]}
    config = parse_config(registry.config_class([cls]), entries, Path("config.json"))
    spread = False
    for tp_size, ep_size, scheme in LAYOUTS:
        if ep_size > 1 and not spread:
            continue
        first = build(config, 0, tp_size, ep_size, scheme)
        spread = any(getattr(p, "experts", None) is not None for p in first.parameters())
        weights = first.expected_weights()
        plan = first.plan_weights(weights)
        assert plan.report.ok
        few, counts = folded(plan)
        for rank in range(max(tp_size, ep_size)):
            own = build(config, rank, tp_size, ep_size, scheme).plan_weights(weights)
            assert list(figures(plan.of_rank(rank))) == list(figures(own))
            for device in ("cpu", "cuda"):
                assert few.of_rank(rank).memory(device, counts) == own.memory(device)
            cached = (page_bytes(each, 16, torch.float32) for each in (first, own.module))
            assert len(set(cached)) == 1
