"""The experts of a transformers' model: its routing and activation, our weights and products."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_module.distributed import SimulatedGroup, expert_parallel_group, tensor_parallel_group
from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.combine_experts import combine_experts
from vllm_module.kernels.sort_by_expert import sort_by_expert
from vllm_module.layers.fused_moe import ExpertsLinear
from vllm_module.module import vLLMModule
from vllm_module.parameters import Dim, Experts, Slot


def is_experts(module: nn.Module) -> bool:
    """Tell whether ``module`` holds experts in the form that transformers' interface expects."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_post_expert_norm")


class WrappedExperts(vLLMModule):
    """The experts of one layer.

    Args:
        experts: transformers' module, on meta; its activation is used.
        path: of the module, for messages.
        gate_up, down: what a checkpoint calls gate and up (or up alone), and down, of an expert;
            empty if it stores all experts as one tensor only.
        cut: whether each expert is cut over the tensor-parallel ranks.

    Attributes:
        w13, w2: the layers of gate and up, and of down.

    """

    def __init__(
        self,
        experts: Any,
        path: str,
        gate_up: tuple[str, ...],
        down: tuple[str, ...],
        cut: bool,
    ) -> None:
        super().__init__()
        if experts.has_post_expert_norm:
            raise UnsupportedModelError(f"{path} normalizes what each expert returns")
        self.tp_group = group = tensor_parallel_group()
        if not cut:
            group = SimulatedGroup(0, 1)
        self.expert_group = expert_parallel_group()
        packed = "gate_up_proj" if experts.has_gate else "up_proj"
        first, second = getattr(experts, packed), experts.down_proj
        count = first.shape[0]
        together = not (gate_up and down)
        self.experts = Experts(count, 0, 1, together)
        if self.expert_group is not None:
            if self.expert_group.own_tokens:
                raise UnsupportedModelError(f"{path}: ranks with tokens of their own")
            ranks, group = self.expert_group.ranks, SimulatedGroup(0, 1)
            self.experts = Experts(count, ranks.rank, ranks.size, together)
        self.summed = self.tp_group.size > 1 and (cut or self.expert_group is not None)
        features = first.shape[2] if experts.is_transposed else first.shape[1]
        hidden = first.shape[1] if experts.is_transposed else first.shape[2]
        size, groups = group.size, 1 if together else None
        if experts.has_gate and experts.is_concatenated:
            names = gate_up if not together else ("gate", "up")
            slots = tuple(Slot(name, features // 2, size) for name in names)
        else:  # of gate and up that alternate, each rank has whole pairs
            slots = (Slot("" if together else gate_up[0], features, size),)
        inner = second.shape[1] if experts.is_transposed else second.shape[2]
        common: dict[str, Any] = {
            "bias": experts.has_bias,
            "params_dtype": first.dtype,
            "transposed": experts.is_transposed,
        }
        self.w13 = ExpertsLinear(
            self.experts, Dim(slots, groups), Dim.whole(hidden), group, packed=packed, **common
        )
        self.w2 = ExpertsLinear(
            self.experts,
            Dim((Slot("" if together else down[0], hidden),)),
            Dim.cut(inner, size),
            group,
            packed="down_proj",
            **common,
        )
        for name in list(experts._parameters):
            setattr(experts, name, None)
        if any(True for _ in experts.parameters()):
            raise UnsupportedModelError(f"{path}: the activation of experts has parameters")
        self._library = (experts,)  # no child: it holds no weights any more

    def _activated(self, y: torch.Tensor) -> torch.Tensor:
        (experts,) = self._library
        return experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of what each token's experts compute, ``[tokens, hidden]``.

        ``top_k_index`` and ``top_k_weights`` are ``[tokens, top_k]``.
        """
        if hidden.is_meta:
            return torch.empty_like(hidden)
        kept = self.experts.kept
        order, offsets = sort_by_expert(top_k_index.int(), kept.start, len(kept))
        y = self._activated(self.w13(hidden, offsets, order, top_k_index.shape[-1]))
        output = combine_experts(self.w2(y, offsets), order, offsets, top_k_weights.float())
        return self.tp_group.all_reduce(output) if self.summed else output
