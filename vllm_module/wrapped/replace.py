"""Replacing layers and parameters of transformers by our typed ones, by the plan of the class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vllm_module.core.tree import loads_itself
from vllm_module.distributed import expert_parallel_group, tensor_parallel_group
from vllm_module.errors import ShardingError, UnsupportedModelError
from vllm_module.layers import ParallelLMHead, VocabParallelEmbedding
from vllm_module.layers.linear import LinearBase
from vllm_module.parameters import BasevLLMParameter
from vllm_module.wrapped.experts import RoutedOnMeta, WrappedExperts, is_experts, is_routed
from vllm_module.wrapped.names import TransformersNames
from vllm_module.wrapped.norms import norm_of
from vllm_module.wrapped.plan_styles import (
    ALL_REDUCE,
    COLUMN,
    EXPERTS,
    GATHERED,
    IDENTITY,
    Plan,
    linear_of,
    parameter_of,
)
from vllm_module.wrapped.probe import Call


class Replacing:
    """Replaces modules of a transformers ``model`` by ours, for this rank.

    Args:
        model: the model, with parameters on meta.
        names: checkpoint names of its tensors.

    Raises ``UnsupportedModelError`` if the model has no plan and there are several ranks.

    """

    def __init__(self, model: Any, names: TransformersNames) -> None:
        self.model, self.names = model, names
        self.calls: Mapping[str, Sequence[Call]] = {}
        self.group = tensor_parallel_group()
        self.owner = type(model).__name__
        self.plan = Plan(model._tp_plan or {}, self.owner)
        spread = expert_parallel_group() is not None
        if self.group.size > 1 and not (self.plan.entries or spread):
            raise UnsupportedModelError(
                f"transformers' {self.owner} has no tensor-parallel plan: it runs on one rank, not "
                f"on {self.group.size}"
            )
        # Keyed by the parameter of transformers, so that tied parameters stay tied.
        self.holders: dict[torch.Tensor, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.holders.setdefault(parameter, []).append(name)

    def replace_experts(self) -> None:
        """Replace the experts, whose code fails on tensors without values.

        Raises ``UnsupportedModelError`` on several ranks for experts in another form.
        """
        for path, module in list(self.model.named_modules()):
            if is_experts(module):
                above, _, attr = path.rpartition(".")
                self.model.get_submodule(above)._modules[attr] = self._experts(path, module)
            elif is_routed(module):
                if self.group.size > 1:
                    raise UnsupportedModelError(
                        f"{path} of {self.owner} has experts in a form that is not known here: it "
                        f"runs on one rank, not on {self.group.size}"
                    )
                vars(module)["forward"] = RoutedOnMeta(module)

    def replace_others(self, calls: Mapping[str, Sequence[Call]]) -> None:
        """Replace linear layers, embeddings, norms, and parameters that the plan names.

        ``calls`` are the attention calls, by the module's path.

        Raises:
            UnsupportedModelError: the plan names a module that is not there, or asks for what is
                not supported.
            ShardingError: heads or features that the ranks cannot share.

        """
        self.calls = calls
        modules = dict(self.model.named_modules(remove_duplicate=False))
        replaced: dict[nn.Module, nn.Module] = {}
        for path, module in modules.items():
            if module not in replaced:
                replaced[module] = self._replaced(path, module)
            new = replaced[module]
            if new is not module:
                above, _, attr = path.rpartition(".")
                modules[above]._modules[attr] = new
        for path, module in modules.items():
            if replaced[module] is module and not loads_itself(module):
                self._cut_parameters(path, module)

    def _replaced(self, path: str, module: Any) -> nn.Module:
        """Return the replacement of ``module``, or ``module`` itself."""
        if type(module) is nn.Embedding and module is self.model.get_input_embeddings():
            size, features = module.num_embeddings, module.embedding_dim
            return VocabParallelEmbedding(size, features, module.weight.dtype)
        if type(module) is nn.Linear:
            return self._linear(path, module)
        style = self.plan.style(path)
        whole = style not in (IDENTITY, EXPERTS, ALL_REDUCE)
        if whole and self.plan.style(f"{path}.weight") is None and (norm := norm_of(module)):
            return norm
        if self.group.size > 1 and style == IDENTITY:
            raise UnsupportedModelError(
                f"the tensor-parallel plan of {self.owner} has the style {IDENTITY} for {path}, "
                "which is no part of experts whose form is known"
            )
        if self.group.size > 1 and style in (EXPERTS, ALL_REDUCE) and not loads_itself(module):
            vars(module)["tp_group"] = self.group
            module.register_forward_hook(_summed)
        return module

    def _experts(self, path: str, module: Any) -> nn.Module:
        packed = "gate_up_proj" if module.has_gate else "up_proj"
        stored = [self.names.stored(f"{path}.{name}") for name in (packed, "down_proj")]
        for name in (packed, "down_proj", "identity_expert"):
            self.plan.style(f"{path}.{name}")
        slots = [tuple(_expert_slot(path, name) for name in each) for each in stored]
        cut = self.plan.style(path) == EXPERTS and self.group.size > 1
        return WrappedExperts(module, path, slots[0], slots[1], cut)

    def _linear(self, path: str, module: nn.Linear) -> nn.Module:
        tied = [each for each in self.holders[module.weight] if each != f"{path}.weight"]
        style = self.plan.style(path)
        if tied:
            return self._tied(path, module, tied)
        if module is self.model.get_output_embeddings() and (style is None or style in GATHERED):
            return _head(module)
        stored = self.names.stored(f"{path}.weight")
        slots = _sibling_slots(path, stored)
        layer = linear_of(
            style, module, path, self.group.size, kv_heads=self._kv_heads(path, module, style),
            names=slots,
        )  # fmt: skip
        if style == ALL_REDUCE and self.group.size > 1:
            layer.register_forward_hook(_summed)
        return _like(layer, module)

    def _tied(self, path: str, module: nn.Linear, others: list[str]) -> nn.Module:
        """Return a head that shares its weight with the embedding, or the layer unchanged."""
        embedding = self.model.get_input_embeddings()
        head = module is self.model.get_output_embeddings()
        if head and isinstance(embedding, VocabParallelEmbedding):
            new = _head(module)
            new.tie_weights(embedding)
            return new
        return module

    def _kv_heads(self, path: str, linear: nn.Linear, style: str | None) -> int | None:
        """Return the number of heads in the output of ``linear``; None unless keys or values."""
        above = path.rpartition(".")[0]
        size = self.group.size
        for call in self.calls.get(above, ()) if style == COLUMN else ():
            if call.heads % size:
                raise ShardingError(
                    f"{above}: {call.heads} attention heads cannot be shared evenly by {size} "
                    "tensor-parallel ranks: choose a size that divides them"
                )
            if max(call.kv_heads, size) % min(call.kv_heads, size):
                raise ShardingError(
                    f"{above}: {call.kv_heads} key-value heads can neither be cut nor replicated "
                    f"evenly over {size} tensor-parallel ranks: one must divide the other"
                )
            sizes = call.kv_heads * call.head_size, call.kv_heads * call.value_size
            if call.kv_heads < size and linear.out_features in sizes:
                return call.kv_heads
        return None

    def _cut_parameters(self, path: str, module: nn.Module) -> None:
        """Replace parameters of ``module`` that the plan names."""
        for name, parameter in module._parameters.items():
            full = f"{path}.{name}".lstrip(".")
            style = self.plan.style(full) if parameter is not None else None
            if style is None or isinstance(parameter, BasevLLMParameter):
                continue
            assert parameter is not None
            group = self.group
            module._parameters[name] = parameter_of(style, parameter, full, group.rank, group.size)


def _head(linear: nn.Linear) -> ParallelLMHead:
    return ParallelLMHead(
        linear.out_features,
        linear.in_features,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
    )


def _summed(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Sum the output of ``module`` over its ranks; a hook after its forward pass."""
    summed: torch.Tensor = module.tp_group.all_reduce(output)
    return summed


def _like(layer: LinearBase, linear: nn.Linear) -> LinearBase:
    """Set on ``layer`` the sizes that a model may read from the layer it replaces."""
    sizes: Any = vars(layer)
    sizes.update(in_features=linear.in_features, out_features=linear.out_features)
    return layer


def _expert_slot(path: str, name: str) -> str:
    """Return the expert's layer name in ``name``, such as ``"x.experts.*.up_proj.weight"``."""
    slot = name.removeprefix(f"{path}.*.").removesuffix(".weight")
    if name != f"{path}.*.{slot}.weight":
        raise UnsupportedModelError(
            f"transformers merges {name} into {path}: expected {path}.*.NAME.weight"
        )
    return slot


def _sibling_slots(path: str, stored: Sequence[str]) -> tuple[str, ...]:
    """Return the names, beside ``path``, of the layers that are merged into the layer there."""
    above = path.rpartition(".")[0]
    slots = tuple(name.removeprefix(f"{above}.").removesuffix(".weight") for name in stored)
    for slot, name in zip(slots, stored, strict=True):
        if name != f"{above}.{slot}.weight":
            raise UnsupportedModelError(
                f"transformers merges {name} into {path}: expected {above}.NAME.weight"
            )
    return slots
