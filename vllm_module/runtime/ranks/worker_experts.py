"""Experts of one rank of an engine: where they are, and how they move to other ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from vllm_module.config import LoadConfig
from vllm_module.cooperative import exchange_boxes
from vllm_module.core.layout_of import layout_of_module
from vllm_module.core.module import vLLMModule
from vllm_module.core.state import refuse_to_run
from vllm_module.core.tree import state_of
from vllm_module.distributed import ProcessGroup, TensorParallelGroup, together
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
                number = layer.experts.count + 1
                layer.counts = torch.zeros(number, dtype=torch.int64, device=self.device)
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
        received, limit = 0, self.load_config.timeout
        moved = {path: each for path, each in self._layers().items() if path in placements}
        group = self._group.group if isinstance(self._group, ProcessGroup) else None
        try:
            for path, layer in moved.items():
                received += move_experts(layer, placements[path], group, limit)
        except BaseException as error:
            refuse_to_run(self.model, error, "experts that were moved")
            for path, layer in moved.items():  # all ranks load to the same places afterwards
                layer.place_experts(placements[path])
            raise
        finally:
            self.forget_places()
        forget_sources(self.model, moved)
        return received


def forget_sources(model: vLLMModule, layers: Collection[str]) -> None:
    """Drop the digests kept of what ``layers`` have quantized or cast: other ranks have those."""
    state, below = state_of(model), tuple(f"{path}." for path in layers)
    names = layout_of_module(model).names() if state.sources else ()
    others = {name for name, entry, _ in names if not entry.parameter.startswith(below)}
    state.sources = {name: each for name, each in state.sources.items() if name in others}


def move_experts(
    layer: PlacedExperts,
    placement: Sequence[int],
    group: dist.ProcessGroup | None,
    timeout: float,
) -> int:
    """Move a layer's experts to other places, in place; return the bytes that came to this rank.

    All ranks of ``group`` make this call, and a message may take ``timeout`` seconds. Before they
    send a parameter, and at the end, they tell each other that none has failed. The values are a
    mixture if it raises, on every rank.
    """
    steps, received = _steps(layer, placement, group, timeout), None

    def step() -> None:
        nonlocal received
        received = next(steps)

    while received is None:
        together(step, timeout=timeout, group=group, refusals=(Exception,))
    return received


def _steps(
    layer: PlacedExperts,
    placement: Sequence[int],
    group: dist.ProcessGroup | None,
    timeout: float,
) -> Iterator[int | None]:
    """Move experts; yield ``None`` where ranks have to agree to go on, and the bytes at the end."""
    source = held_layout(layer)
    layer.place_experts(placement)
    target = held_layout(layer)
    plan = TransferPlan(source, target, in_place=True)
    tensors: dict[str, torch.Tensor] = dict(layer.named_parameters())
    received = yield from exchange_boxes(
        plan, source, target, tensors, group=group, timeout=timeout
    )
    modules: Any = layer.modules()
    for module in modules:
        for process in module.processing() if isinstance(module, vLLMModule) else ():
            process()
    yield received


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
