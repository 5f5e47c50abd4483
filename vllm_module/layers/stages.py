"""What a pipeline stage of a model has in place of the parts that other stages hold.

That is an :class:`OtherStage` for each, so layers keep their numbers, and names of
the other parts are skipped by a rule that names the stage. What a stage's ``forward`` returns is
what that of the next stage takes in place of token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import nn

from vllm_module.core.module import vLLMModule

# Hidden states and the residual, [tokens, hidden_size] each, after the last layer of a stage; the
# residual alone where a model has no more.
Passed: TypeAlias = tuple[torch.Tensor, ...]


class OtherStage(vLLMModule):
    """Stands where another stage holds a module; it cannot run."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.held_elsewhere = f"pipeline stage {rank} of {size} holds it"


class StageLayers(nn.ModuleList):
    """All layers of a model, of which a forward pass runs those that the stage holds."""

    def __iter__(self) -> Iterator[nn.Module]:
        return (each for each in super().__iter__() if not isinstance(each, OtherStage))
