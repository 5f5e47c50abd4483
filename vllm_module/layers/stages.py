"""A pipeline stage of a model: the model without the parts that other stages hold.

In the place of each such part is an :class:`OtherStage`, so layers keep their numbers, and names of
the other parts are skipped by a rule that names the stage. What a stage's ``forward`` returns is
what that of the next stage takes in place of token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.distributed import PipelineStage
from vllm_module.errors import UnsupportedModelError

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


def divide(model: nn.Module, stage: PipelineStage) -> None:
    """Make a whole model, whose parameters are on meta, the model of one stage.

    The model declares ``divided_layers``: the path of the list of its layers. Modules with tensors
    that come before the list belong to the first stage, those behind it to the last. Modules of
    both that share a tensor, such as an embedding and the head, are on both stages.

    Raises:
        ShardingError: there are more stages than layers.
        UnsupportedModelError: the model declares no such list.

    """
    path: str | None = getattr(model, "divided_layers", None)
    if path is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no pipeline stages, and {stage.size} are asked for: it "
            "runs as one stage, on tensor-parallel ranks"
        )
    before: list[tuple[nn.Module, str]] = []
    behind: list[tuple[nn.Module, str]] = []
    holder = model
    for name in path.split("."):
        names = [child for child, module in holder.named_children() if module.state_dict()]
        at = names.index(name)
        before += [(holder, each) for each in names[:at]]
        behind += [(holder, each) for each in names[at + 1 :]]
        parent, holder = holder, holder.get_submodule(name)
    layers = list(holder.children())
    own, last = stage.layers(len(layers)), stage.size - 1
    tied = _parameters(before) & _parameters(behind)
    for modules, end in ((before, 0), (behind, last)):
        for above, name in modules:
            shared = stage.rank in (0, last) and tied & _parameters([(above, name)])
            if stage.rank != end and not shared:
                setattr(above, name, OtherStage(end, stage.size))
    held = (
        layer if number in own else OtherStage(number * stage.size // len(layers), stage.size)
        for number, layer in enumerate(layers)
    )
    setattr(parent, path.rpartition(".")[2], StageLayers(held))


def _parameters(modules: list[tuple[nn.Module, str]]) -> set[nn.Parameter]:
    return {each for above, name in modules for each in above.get_submodule(name).parameters()}
