"""Dividing a model among pipeline stages."""

from __future__ import annotations

from torch import nn

from vllm_module.distributed import PipelineStage
from vllm_module.errors import UnsupportedModelError
from vllm_module.layers.embedding import VocabParallelEmbedding
from vllm_module.layers.linear import LinearBase
from vllm_module.layers.stages import OtherStage, StageLayers


def divide(model: nn.Module, stage: PipelineStage) -> None:
    """Make a whole model, whose parameters are on meta, the model of one stage.

    The model declares ``divided_layers``: the path of the list of its layers. Modules with tensors
    that come before the list belong to the first stage, those behind it to the last. Modules of
    both that share a tensor, such as an embedding and the head, are on both stages.

    Raises:
        ShardingError: there are more stages than layers.
        UnsupportedModelError: the model declares no such list, or layers of two stages share a
            tensor.

    """
    path: str | None = getattr(model, "divided_layers", None)
    if path is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no pipeline stages, and {stage.size} are asked for: it "
            "runs as one stage, on tensor-parallel ranks, because it declares no divided_layers"
        )
    before: list[tuple[nn.Module, str]] = []
    behind: list[tuple[nn.Module, str]] = []
    holder = model
    for name in path.split("."):
        names = [child for child, module in holder.named_children() if module.state_dict()]
        if name not in names:
            raise ValueError(
                f"{type(model).__name__} declares divided_layers {path!r}, and "
                f"{type(holder).__name__} has no {name!r} with weights: it has {', '.join(names)}"
            )
        at = names.index(name)
        before += [(holder, each) for each in names[:at]]
        behind += [(holder, each) for each in names[at + 1 :]]
        parent, holder = holder, holder.get_submodule(name)
    layers = list(holder.children())
    own, last = stage.layers(len(layers)), stage.size - 1
    _refuse_shared(layers, stage.size)
    tied = _parameters(before) & _parameters(behind)
    for modules, end in ((before, 0), (behind, last)):
        for above, name in modules:
            shared = stage.rank in (0, last) and tied & _parameters([(above, name)])
            if stage.rank != end and not shared:
                setattr(above, name, OtherStage(end, stage.size))
            elif stage.rank != end:  # for its tensor alone
                for module in above.get_submodule(name).modules():
                    if isinstance(module, LinearBase | VocabParallelEmbedding):
                        module.called_elsewhere = True
    held = (
        layer if number in own else OtherStage(number * stage.size // len(layers), stage.size)
        for number, layer in enumerate(layers)
    )
    setattr(parent, path.rpartition(".")[2], StageLayers(held))


def _refuse_shared(layers: list[nn.Module], stages: int) -> None:
    first: dict[nn.Parameter, int] = {}
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            other = first.setdefault(parameter, number)
            if other * stages // len(layers) != number * stages // len(layers):
                raise UnsupportedModelError(
                    f"layers {other} and {number} share {name}, and would be on two of {stages} "
                    "pipeline stages: such a model runs as one stage"
                )


def _parameters(modules: list[tuple[nn.Module, str]]) -> set[nn.Parameter]:
    return {each for above, name in modules for each in above.get_submodule(name).parameters()}
