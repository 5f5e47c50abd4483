"""Experts of one rank of an engine: where they are, and how they move to other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_module.config import LoadConfig
from vllm_module.cooperative import exchange_boxes
from vllm_module.core.layout_of import layout_of_module
from vllm_module.core.module import vLLMModule
from vllm_module.core.state import refuse_to_run, state_of
from vllm_module.distributed import ProcessGroup, TensorParallelGroup
from vllm_module.layers.placed_experts import PlacedExperts
from vllm_module.layout import TransferPlan
from vllm_module.parameters import Experts


class WorkerExperts:
    """The methods of a worker on experts that are spread over ranks."""

    model: vLLMModule
    load_config: LoadConfig
    _group: TensorParallelGroup

    def placed_experts(self) -> dict[str, Experts]:
        """Return the experts of each layer that has spread them over ranks, by its path."""
        return {path: layer.experts for path, layer in self._layers().items()}

    def _layers(self) -> dict[str, PlacedExperts]:
        return {
            path: module
            for path, module in self.model.named_modules()
            if isinstance(module, PlacedExperts) and module.experts.size > 1
        }

    def rearrange_experts(self, placements: Mapping[str, tuple[int, ...]]) -> int:
        """Move the experts of layers to other places; return the bytes that came from other ranks.

        If that fails, the model refuses to run until it is loaded again.

        Args:
            placements: of layers, by path; the same on every rank of a pipeline stage. What other
                stages have is passed over.

        """
        received, layers = 0, self._layers()
        try:
            for path, layer in layers.items():
                if path in placements:
                    received += self._rearrange(layer, placements[path])
        except BaseException as error:
            refuse_to_run(self.model, error, "experts that were moved")
            raise
        # Of what was quantized while it was loaded, other ranks have the digests.
        state_of(self.model).sources.clear()
        return received

    def _rearrange(self, layer: PlacedExperts, placement: tuple[int, ...]) -> int:
        ranks = layer.experts.size
        source = layout_of_module(layer, ranks)
        layer.place_experts(placement)
        target = layout_of_module(layer, ranks)
        plan = TransferPlan(source, target, in_place=True)
        tensors: dict[str, torch.Tensor] = dict(layer.named_parameters())
        assert isinstance(self._group, ProcessGroup)
        limit = self.load_config.timeout
        received = exchange_boxes(
            plan, source, target, tensors, group=self._group.group, timeout=limit
        )
        modules: Any = layer.modules()
        for module in modules:
            for process in module.processing() if isinstance(module, vLLMModule) else ():
                process()
        return received
