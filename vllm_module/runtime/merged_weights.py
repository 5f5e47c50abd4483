"""The weights of a running engine with an adapter added to them."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from vllm_module.adapters import Adapter
from vllm_module.adapters.adapter import LoRALayer
from vllm_module.adapters.config import AdapterConfig
from vllm_module.adapters.merging import MERGE_FIRST, additions
from vllm_module.build.model_source import ModelSource
from vllm_module.core.tensors import is_typed
from vllm_module.core.tree import locations
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import UnsupportedModelError
from vllm_module.runtime.held_file import HeldFile
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.runtime.served_adapter import ServedAdapter


def merged_weights(
    source: ModelSource, executor: Executor, adapter: ServedAdapter
) -> dict[str, torch.Tensor]:
    """Return the stored tensors that an adapter changes, with what it adds, by name.

    What the ranks hold is added, so updates of the model and of the adapter count.

    Raises:
        UnsupportedModelError: the model is quantized, or the merged model would not compute what
            the adapter computes beside it.
        WeightReadError: a sum is no number of its dtype.

    """

    def call(function: object) -> list[object]:
        return executor.collective_rpc("call_with_adapter", args=(adapter.number, function))

    try:
        held = HeldFile(executor.apply_model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            "the weights are quantized, and an adapter is added to weights in full precision: "
            f"{MERGE_FIRST}"
        ) from error
    of_adapter = HeldFile(call)
    present = frozenset[str]().union(*cast(list[frozenset[str]], call(_present)))
    weights = {name: of_adapter.take(name) for name in of_adapter.regions() if name in present}
    with tensor_parallel(rank=0, size=1):  # which has no place for second copies of experts
        model = replace(source, redundant_experts=0).build(torch.device("cpu"))
    stored = held.regions()
    config = cast(list[AdapterConfig], call(_config))[0]
    added = additions(model.plan_weights(stored), stored, config, dict(weights))
    return {name: each.added_to(name, held.take(name)) for name, each in added.items()}


def _config(adapter: Adapter) -> AdapterConfig:
    return adapter.config


def _present(adapter: Adapter) -> frozenset[str]:
    """Return the names of A and B that the adapter has on this rank, without absent slots."""
    return frozenset(
        location.stored_name(slot)
        for location in locations(adapter)
        if is_typed(location.tensor)
        for slot in location.tensor.slots
        if slot not in cast(LoRALayer, location.node.module).absent
    )
