"""Experts of one rank of an engine: where they are, and how they move to other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from vllm_module.config import LoadConfig
from vllm_module.cooperative import exchange_boxes
from vllm_module.core.module import vLLMModule
from vllm_module.core.state import refuse_to_run
from vllm_module.core.tree import state_of
from vllm_module.distributed import ProcessGroup, TensorParallelGroup
from vllm_module.layers.placed_experts import PlacedExperts
from vllm_module.layout import (
    HeldBox,
    HeldParameter,
    Layout,
    Partition,
    RankBoxes,
    StoredTensorLayout,
    Strided,
    TransferPlan,
)
from vllm_module.layout.layout import EXPERT, FORMAT, VERSION
from vllm_module.parameters import BasevLLMParameter, Experts
from vllm_module.runtime.held_file import forget_layout
from vllm_module.runtime.ranks.worker_weights import WorkerWeights, changes_weights


class WorkerExperts(WorkerWeights):
    """The methods of a worker on experts that are spread over ranks."""

    load_config: LoadConfig
    _group: TensorParallelGroup

    def placed_experts(self) -> dict[str, Experts]:
        """Return the experts of each layer that has spread them over ranks, by its path."""
        return {path: layer.experts for path, layer in self._layers().items()}

    def count_experts(self) -> None:
        """Count the tokens of each expert from zero."""
        for layer in self._layers().values():
            if layer.counts is None:
                assert layer.places is not None
                number, device = layer.experts.count + 1, layer.places.device
                layer.counts = torch.zeros(number, dtype=torch.int64, device=device)
            layer.counts.zero_()

    def expert_counts(self) -> dict[str, list[int]]:
        """Return the tokens that each expert has got, by the path of its layer."""
        layers = self._layers().items()
        return {path: each.counts.tolist()[:-1] for path, each in layers if each.counts is not None}

    def _layers(self) -> dict[str, PlacedExperts]:
        return {
            path: module
            for path, module in self.model.named_modules()
            if isinstance(module, PlacedExperts) and module.experts.size > 1
        }

    @changes_weights
    def rearrange_experts(self, placements: Mapping[str, tuple[int, ...]]) -> int:
        """Move the experts of layers to other places; return the bytes that came from other ranks.

        If that fails, the model refuses to run until it is loaded again.

        Args:
            placements: of layers, by path; the same on every rank of a pipeline stage. What other
                stages have is passed over.

        """
        received, layers, limit = 0, self._layers(), self.load_config.timeout
        group = self._group.group if isinstance(self._group, ProcessGroup) else None
        try:
            for path, layer in layers.items():
                if path in placements:
                    received += move_experts(layer, placements[path], group, limit)
        except BaseException as error:
            refuse_to_run(self.model, error, "experts that were moved")
            raise
        finally:
            forget_layout(self.model)
            self._adapter_plans = None  # they know the places before
        # Of what was quantized while it was loaded, other ranks have the digests.
        state_of(self.model).sources.clear()
        return received


def move_experts(
    layer: PlacedExperts,
    placement: Sequence[int],
    group: dist.ProcessGroup | None,
    timeout: float,
) -> int:
    """Move a layer's experts to other places, in place; return the bytes that came to this rank.

    All ranks of ``group`` make this call, and a message may take ``timeout`` seconds. The values
    are a mixture if it raises.
    """
    source = held_layout(layer)
    layer.place_experts(placement)
    target = held_layout(layer)
    plan = TransferPlan(source, target, in_place=True)
    tensors: dict[str, torch.Tensor] = dict(layer.named_parameters())
    received = exchange_boxes(plan, source, target, tensors, group=group, timeout=timeout)
    modules: Any = layer.modules()
    for module in modules:
        for process in module.processing() if isinstance(module, vLLMModule) else ():
            process()
    return received


def held_layout(layer: PlacedExperts) -> Layout:
    """Return where each expert lies on all ranks, as they hold it: quantized, packed, padded.

    Tensors are the experts of each parameter, by its path and the expert's number.
    """
    experts = layer.experts
    parameters, shapes, partitions = {}, [], []
    tensors: list[StoredTensorLayout] = []
    kept = [replace(experts, rank=rank).kept for rank in range(experts.size)]
    for path, parameter in layer.named_parameters():
        if not isinstance(parameter, BasevLLMParameter) or parameter.experts is None:
            continue
        shape, strides, dtype = parameter.shape[1:], parameter.stride()[1:], str(parameter.dtype)
        step, at = parameter.stride(0), len(tensors)
        start = (0,) * len(shape)
        held = tuple(
            RankBoxes(
                (rank,),
                (HeldBox(start, tuple(shape), Strided(place * step, tuple(shape), strides, step)),),
                (expert, 1),
            )
            for rank, numbers in enumerate(kept)
            for place, expert in enumerate(numbers)
        )
        dtype = dtype.removeprefix("torch.")
        parameters[path] = HeldParameter(dtype, at)
        shapes.append(tuple(((rank,), (len(each), *shape)) for rank, each in enumerate(kept)))
        partitions.append(Partition(held))
        name, every = f"{path}.{EXPERT}", (0, experts.count)
        tensors.append(StoredTensorLayout(name, tuple(shape), dtype, path, at, experts=every))
    return Layout(
        FORMAT, VERSION, type(layer).__name__, experts.size, parameters, tuple(shapes),
        tuple(partitions), tuple(tensors),
    )  # fmt: skip
