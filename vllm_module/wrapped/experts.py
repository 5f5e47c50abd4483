"""Experts of a transformers model, with its routing and activation and our weights and kernels."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn

from vllm_module.base.outside import NO_FAILURES
from vllm_module.distributed import SimulatedGroup
from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.experts.combine_experts import combine_experts
from vllm_module.layers.fused_moe import ExpertsLinear
from vllm_module.layers.placed_experts import PlacedExperts
from vllm_module.parameters import Dim, Slot

# Shapes of three small experts, for a test.
_SMALL = {"gate_up_proj": (3, 4, 3), "down_proj": (2, 3, 2)}


def is_experts(module: nn.Module) -> bool:
    """Return whether ``module`` holds experts in the form that transformers' interface expects.

    LongCat's experts do not declare that form, and some of them are the identity. They are accepted
    if a test shows that they compute the expected values.
    """
    if isinstance(getattr(module, "identity_expert", None), nn.Identity):
        return has_identity_experts(module)
    return hasattr(module, "is_transposed") and hasattr(module, "has_post_expert_norm")


@torch.no_grad()
def has_identity_experts(module: Any) -> bool:
    """Return whether the last experts of ``module`` are identities, and the others are gated.

    Three small experts are computed for this. If they are, the attributes of transformers'
    interface are set on ``module``.
    """

    def made_up(*shape: int) -> torch.Tensor:
        numbers = torch.arange(math.prod(shape), dtype=torch.float32, device="cpu") * 5 % 7
        return (numbers / 3 - 1).view(shape)

    weights = {name: made_up(*shape) for name, shape in _SMALL.items()}
    small = object.__new__(type(module))
    vars(small).update(vars(module))
    vars(small).update(_parameters=weights, num_routed_experts=2, total_experts=3)
    hidden, shares = made_up(2, 3), made_up(2, 2) + 2
    index = torch.tensor([[0, 2], [1, 0]], device="cpu")
    expected = torch.zeros_like(hidden)
    try:
        for token, chosen in enumerate(index.tolist()):
            for expert, share in zip(chosen, shares[token], strict=True):
                x = hidden[token]
                if expert < 2:
                    gate, up = (weights["gate_up_proj"][expert] @ x).chunk(2)
                    x = weights["down_proj"][expert] @ (module.act_fn(gate) * up)
                expected[token] += share * x
        if not torch.allclose(small.forward(hidden, index, shares), expected, atol=1e-5):
            return False
    except BaseException as error:  # code from outside
        if isinstance(error, NO_FAILURES):
            raise
        return False
    vars(module).update(
        has_gate=True, has_bias=False, is_transposed=False, is_concatenated=True,
        has_post_expert_norm=False,
    )  # fmt: skip
    vars(module)["_apply_gate"] = lambda y: module.act_fn(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1]
    return True


class RoutedOnMeta:
    """Forward pass of ``module``, experts in another form; on meta it returns only a shape."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return ``[tokens, hidden]``, uninitialized on meta."""
        if hidden_states.is_meta:
            return torch.empty_like(hidden_states)
        return type(self.module).forward(self.module, hidden_states, *args, **kwargs)


def is_routed(module: nn.Module) -> bool:
    """Return whether ``module.forward`` takes a token's experts and their weights."""
    given = list(inspect.signature(type(module).forward).parameters)
    return given == ["self", "hidden_states", "top_k_index", "top_k_weights"]


class WrappedExperts(PlacedExperts):
    """The experts of one layer.

    Args:
        experts: transformers' module, on meta; its activation is used.
        path: the module's path, for messages.
        gate_up, down: checkpoint names of an expert's gate and up (or up alone), and of its down;
            empty if all experts are stored only as one tensor.
        cut: True if each expert is cut over the tensor-parallel ranks.

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
        packed = "gate_up_proj" if experts.has_gate else "up_proj"
        first, second = getattr(experts, packed), experts.down_proj
        if first is None or second is None:
            raise UnsupportedModelError(f"{path} has no experts with weights")
        # Experts after those with weights are identities.
        count = second.shape[0]
        together = not (gate_up and down)
        super().__init__(count, together)
        if experts.has_post_expert_norm:
            raise UnsupportedModelError(f"{path} normalizes what each expert returns")
        group = self.cut_group if cut else SimulatedGroup(0, 1)
        self.skipped_weights = {
            f"{expert}.{slot}.weight": "an expert that returns what it is given has no weights"
            for expert in range(count, len(first))
            for slot in gate_up
        }
        if self.expert_group is not None and self.expert_group.own_tokens is not None:
            raise UnsupportedModelError(f"{path}: ranks with tokens of their own")
        self.summed = self.tp_group.size > 1 and (cut or self.expert_group is not None)
        features = first.shape[2] if experts.is_transposed else first.shape[1]
        hidden = first.shape[1] if experts.is_transposed else first.shape[2]
        size, groups = group.size, 1 if together else None
        if experts.has_gate and experts.is_concatenated:
            names = gate_up if not together else ("gate", "up")
            slots = tuple(Slot(name, features // 2, size) for name in names)
        else:  # gate and up alternate, so each rank has whole pairs
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
        self._library = (experts,)  # a tuple, so that it is no child: it has no weights any more

    def _activated(self, y: torch.Tensor) -> torch.Tensor:
        (experts,) = self._library
        return experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, ``[tokens, hidden]``.

        ``top_k_index`` and ``top_k_weights`` are ``[tokens, top_k]``.
        """
        if hidden.is_meta:
            return torch.empty_like(hidden)
        (experts,) = self._library
        # Numbers after the last are of identities, which no rank keeps.
        order, offsets = self.sorted_rows(top_k_index.int().clamp(max=self.experts.count))
        top_k = top_k_index.shape[-1]
        adapted = self.w13.adapters is not None or self.w2.adapters is not None
        tokens = order // top_k if adapted else None
        y = self._activated(self.w13(hidden, offsets, order, top_k, tokens=tokens))
        down = self.w2(y, offsets, tokens=tokens)
        output = combine_experts(down, order, offsets, top_k_weights.float())
        output = self.tp_group.all_reduce(output) if self.summed else output
        if hasattr(experts, "identity_expert"):
            weights = top_k_weights.masked_fill(top_k_index < self.experts.count, 0.0)
            output = output + (hidden * weights.sum(-1, keepdim=True)).to(output.dtype)
        return output
