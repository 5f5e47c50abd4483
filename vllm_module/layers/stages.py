"""The parts of a model that a pipeline stage holds, and what stands for those of other stages.

A stage of a model is the model itself without the parts that other stages hold. In the place of
each is an :class:`OtherStage`, so layers keep their numbers, and names of the other parts are
skipped by a rule that names the stage. What a stage's ``forward`` returns is what that of the next
stage begins with, in place of token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.distributed import pipeline_stage

# Hidden states and the residual, [tokens, hidden_size] each, after the last layer of a stage; the
# residual alone where a model has no more.
Passed: TypeAlias = tuple[torch.Tensor, ...]


class OtherStage(vLLMModule):
    """Stands where another stage holds a module; it cannot run."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.held_elsewhere = f"pipeline stage {rank} of {size} holds it"


class StageParts:
    """Which parts of a model the stage that is built here holds.

    Args:
        layers: number of layers of the whole model.
        tied: whether the head shares the embedding's weight. The first and the last stage have
            both modules then, each with its own copy of the weight, whatever name it is stored by.

    Raises:
        ShardingError: there are more stages than layers.

    """

    def __init__(self, layers: int, tied: bool) -> None:
        self.stage = stage = pipeline_stage()
        self.count = layers
        self.numbers = stage.layers(layers)
        ends = stage.is_first or stage.is_last
        self.has_embedding = stage.is_first or (tied and ends)
        self.has_head = stage.is_last or (tied and ends)

    def embedding(self, build: Callable[[], nn.Module]) -> Any:
        """Return the embedding of tokens, or what stands for it."""
        return build() if self.has_embedding else OtherStage(0, self.stage.size)

    def only_first(self, build: Callable[[], nn.Module]) -> Any:
        """Return what the first stage computes with, or what stands for it."""
        return build() if self.stage.is_first else OtherStage(0, self.stage.size)

    def layers(self, build: Callable[[int], nn.Module]) -> nn.ModuleList:
        """Return all layers, each built from its number or what stands for it."""
        size = self.stage.size
        return nn.ModuleList(
            build(number)
            if number in self.numbers
            else OtherStage(self.stage.holder(number, self.count), size)
            for number in range(self.count)
        )

    def held(self, layers: nn.ModuleList) -> Iterator[nn.Module]:
        """Yield the layers that this stage holds, in order."""
        return (layers[number] for number in self.numbers)

    def only_last(self, build: Callable[[], nn.Module]) -> Any:
        """Return what the last stage computes with, or what stands for it."""
        size = self.stage.size
        return build() if self.stage.is_last else OtherStage(size - 1, size)

    def head(self, build: Callable[[], nn.Module]) -> Any:
        """Return the head, or what stands for it."""
        size = self.stage.size
        return build() if self.has_head else OtherStage(size - 1, size)
