"""A mixture of experts: each token goes to some of the experts, which are gated MLPs.

Shapes: hidden states ``[tokens, hidden]``, logits of the router ``[tokens, experts]``. The weights
of all experts are two parameters: ``w13 [experts, 2 intermediate, hidden]``, gate and up, and
``w2 [experts, hidden, intermediate]``, down. A checkpoint stores them per expert
(``3.gate_proj.weight``) or packed (``gate_up_proj``); either form is loaded.

Without expert parallelism, each rank keeps its tensor-parallel part of all experts. With it, a rank
keeps some experts whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from vllm_module.core.module import vLLMModule
from vllm_module.core.tensors import without_casts
from vllm_module.distributed import OwnTokens, TensorParallelGroup
from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.experts.combine_experts import combine_experts
from vllm_module.kernels.experts.topk_routing import topk_routing
from vllm_module.kernels.matmul.linear import linear
from vllm_module.layers.activation import get_act, get_act_and_mul
from vllm_module.layers.lora import LayerAdapters
from vllm_module.layers.placed_experts import PlacedExperts
from vllm_module.parameters import (
    ColumnvLLMParameter,
    Dim,
    Experts,
    ModelWeightParameter,
    Slot,
)
from vllm_module.quantization import QuantizableLayer, QuantizeMethod
from vllm_module.quantization.rows import ExpertRows


class Router(vLLMModule):
    """The linear layer that scores experts, whole on every rank and never quantized.

    It also serves as the gate of a shared expert, which has one output. It computes logits;
    :class:`FusedMoE` turns them into scores and chooses experts.

    Args:
        hidden_size, num_experts: input and output features.
        bias: whether there is one.
        e_score_correction_bias: whether there is a bias, float32 ``[experts]``, that experts are
            chosen by (DeepSeek-V3); pass the parameter to :class:`FusedMoE`.
        params_dtype: of weight and bias; torch's default dtype unless given.

    Attributes:
        adapters: what LoRA adapters add to the logits; ``None`` while none adapts the layer.

    """

    adapters: LayerAdapters | None = None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        *,
        e_score_correction_bias: bool = False,
    ) -> None:
        super().__init__()
        dtype = params_dtype or torch.get_default_dtype()
        experts, hidden = Dim.whole(num_experts), Dim.whole(hidden_size)
        self.weight = ModelWeightParameter(experts, hidden, tp_rank=0, tp_size=1, dtype=dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = ColumnvLLMParameter(experts, tp_rank=0, tp_size=1, dtype=dtype)
        self.e_score_correction_bias: nn.Parameter | None = None
        if e_score_correction_bias:
            self.e_score_correction_bias = ColumnvLLMParameter(
                experts, tp_rank=0, tp_size=1, dtype=torch.float32
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move the parameters, but never cast them where experts are chosen in float32."""
        kept = set() if self.e_score_correction_bias is None else {*self._parameters.values()}
        # PyTorch gives _apply no types.
        return super()._apply(without_casts(fn, kept), recurse)  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [..., hidden]`` to logits ``[..., experts]``, in the dtype of the weight."""
        x = x.to(self.weight.dtype)
        y = linear(x, self.weight, self.bias)
        return y if self.adapters is None else self.adapters.add(x, y)


class ExpertsLinear(QuantizableLayer):
    """A linear layer for each expert, ``[experts, output, input]`` in one parameter.

    Args:
        experts: all of them, and which ones this rank keeps.
        output, input: the dimensions of an expert's weight.
        group: the ranks that each expert is cut over.
        packed: what a checkpoint calls the weight of all experts, one level higher; ``None`` if
            it never stores them as one tensor.
        bias: whether there is one for each expert.
        params_dtype: of weight and bias.
        transposed: a checkpoint stores the weights as ``[input, output]``.

    Attributes:
        adapters: what LoRA adapters add to the products; ``None`` while none adapts the layer.

    """

    adapters: LayerAdapters | None = None

    def __init__(
        self,
        experts: Experts,
        output: Dim,
        input: Dim,
        group: TensorParallelGroup,
        *,
        packed: str | None,
        bias: bool,
        params_dtype: torch.dtype,
        transposed: bool,
    ) -> None:
        super().__init__()
        self.experts, self.tp_group = experts, group
        self.packed, self.transposed = packed, transposed
        self.create_weight(output, input, params_dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = ColumnvLLMParameter(output, **self.common(params_dtype))
        # Bias and scales are stored in the same slots.
        self.shard_names = tuple(slot for slot in self.weight.slots if slot)
        self._name_packed()

    def quantize(self, method: QuantizeMethod) -> None:
        super().quantize(method)
        self._name_packed()

    def _name_packed(self) -> None:
        """Declare the names of all parameters where a checkpoint stores all experts as one."""
        if self.packed is not None:
            self.stored_beside = {
                name: f"{self.packed}_{name}".replace("_weight", "", 1)
                for name in (*self._parameters, *self.weight_aliases)
            }

    def forward(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        rows: torch.Tensor | None = None,
        top_k: int = 1,
        *,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply rows, sorted by expert, by the weights of their experts.

        See :func:`~vllm_module.kernels.experts.grouped_matmul.grouped_matmul`. If the input is cut
        over ranks, this rank's product is a part of the sum. ``tokens`` has the token of each row,
        which adapters need.
        """
        summed = any(slot.parts > 1 for slot in self.input.slots)
        bias = None if summed and self.tp_group.rank else self.bias  # so that the sum has it once
        y = self.quant_method.apply_experts(self, ExpertRows(x, offsets, bias, rows, top_k))
        if self.adapters is None:
            return y
        sources = None if rows is None else rows // top_k
        return self.adapters.add_experts(x, sources, tokens, offsets, y)

    def extra_repr(self) -> str:
        assert self.experts is not None
        weight = self.get_parameter(self.parameter_names[0])
        kept = self.experts.kept
        named = kept if isinstance(kept, range) else list(kept)
        return f"weight={list(weight.shape)}, experts={named} of {self.experts.count}"


class FusedMoE(PlacedExperts):
    """The experts of a layer, and which of them a token goes to.

    Args:
        num_experts: all experts, on all ranks.
        top_k: experts of a token.
        hidden_size, intermediate_size: features of a token and of an expert's hidden layer.
        params_dtype: of the weights; torch's default dtype unless given.
        renormalize: whether to divide a token's weights by their sum. With softmax, the weights are
            then the softmax of the logits of the chosen experts.
        use_grouped_topk: whether a token's experts are chosen from the best groups of experts.
        num_expert_group, topk_group: how many groups there are, and from how many of them a token's
            experts are chosen.
        scoring_func: ``"softmax"`` or ``"sigmoid"`` of the logits of all experts.
        e_score_correction_bias: the parameter of the router, float32 ``[experts]`` or, as ERNIE 4.5
            stores it, ``[1, experts]``, that experts are chosen by; the two modules share it.
        routed_scaling_factor: by which weights are multiplied.
        activation: the name of a gated activation, or a module that computes it; of one without a
            gate if the experts have none.
        bias: whether the experts have biases.
        apply_router_weight_on_input: multiply what an expert is given by its weight, not what it
            returns; for one expert a token.
        shard_names: what a checkpoint calls gate, up and down of an expert, or up and down if the
            experts have no gate; None if it stores all experts as one tensor only.
        block: features of the intermediate size that are never cut, such as those that share a
            scale; the parts of the last ranks are padded with zeros.
        transposed: packed weights are stored as ``[experts, input, output]``.
        interleaved: packed gate and up alternate, feature by feature.
        packed: whether a checkpoint may store all experts as one tensor.

    Attributes:
        w13, w2: the layers of gate and up, and of down, with the weights of all experts. A
            checkpoint stores a weight for each expert (``3.up_proj.weight``), or all as one:
            ``gate_up_proj`` ``[experts, 2 * intermediate, hidden]`` and ``down_proj``
            ``[experts, hidden, intermediate]``, without ``.weight``; without gates ``up_proj`` in
            place of ``gate_up_proj``. For other packed names, an
            alias of the module above leads to the layer: ``{"input_linear": "experts.w13"}``.
        routed: int16 ``[most tokens, top_k]`` to write the experts of each token into, if set.

    Raises:
        ShardingError: the size does not divide ``intermediate_size``, without expert parallelism
            and without ``block``.
        UnsupportedModelError: experts that cannot be chosen so.

    """

    routed: torch.Tensor | None = None

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        scoring_func: str = "softmax",
        e_score_correction_bias: nn.Parameter | None = None,
        routed_scaling_factor: float = 1.0,
        activation: str | nn.Module = "silu",
        bias: bool = False,
        apply_router_weight_on_input: bool = False,
        *,
        shard_names: Sequence[str] | None = ("gate_proj", "up_proj", "down_proj"),
        block: int | None = None,
        transposed: bool = False,
        interleaved: bool = False,
        packed: bool = True,
    ) -> None:
        together = shard_names is None
        super().__init__(num_experts, together)
        self.num_experts, self.top_k = num_experts, top_k
        self.renormalize, self.scoring_func = renormalize, scoring_func
        self.num_expert_group = num_expert_group if use_grouped_topk else None
        self.topk_group = topk_group if use_grouped_topk else None
        self.e_score_correction_bias = e_score_correction_bias
        self.routed_scaling_factor = routed_scaling_factor
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self._check_choice()
        group = self.cut_group
        if shard_names is not None and (interleaved or len(shard_names) not in (2, 3)):
            raise ValueError(
                f"shard_names must name gate, up and down, or up and down of experts without a "
                f"gate, got {shard_names!r}; None is for experts that are stored as one tensor "
                "only, whose gate and up may be interleaved"
            )
        *inner, down = shard_names or ("gate", "up", "")
        gated = len(inner) == 2
        alternate = 1 if together else None
        if interleaved:
            alternate = intermediate_size
        size = group.size
        padded = intermediate_size
        if block is not None:
            padded = -(-intermediate_size // (block * size)) * block * size
        gate_up = tuple(Slot(name, intermediate_size, size, padded) for name in inner)
        dtype = params_dtype or torch.get_default_dtype()
        self.w13 = ExpertsLinear(
            self.experts,
            Dim(gate_up, alternate),
            Dim.whole(hidden_size),
            group,
            packed=("gate_up_proj" if gated else "up_proj") if packed else None,
            bias=bias,
            params_dtype=dtype,
            transposed=transposed,
        )
        if isinstance(activation, str):
            activation = get_act_and_mul(activation) if gated else get_act(activation)
        self.act_fn = activation
        self.w2 = ExpertsLinear(
            self.experts,
            Dim((Slot(down, hidden_size),)),
            Dim.cut(intermediate_size, size, padded=padded),
            group,
            packed="down_proj" if packed else None,
            bias=bias,
            params_dtype=dtype,
            transposed=transposed,
        )

    def _check_choice(self) -> None:
        if self.scoring_func not in ("softmax", "sigmoid"):
            raise UnsupportedModelError(
                f"scoring_func {self.scoring_func!r}: expected 'softmax' or 'sigmoid'"
            )
        experts, groups, kept = self.num_experts, self.num_expert_group, self.topk_group
        groups = groups or 1
        if groups == 1 and kept is None:
            kept = 1
        if experts % groups or kept is None or not 1 <= kept <= groups:
            raise UnsupportedModelError(
                f"{experts} experts in {groups} groups, of which {kept} are chosen: expected "
                "groups that divide the experts (n_group), and a number of them that are chosen, "
                "at most all (topk_group)"
            )
        if not 1 <= self.top_k <= experts // groups * kept:
            raise UnsupportedModelError(
                f"{self.top_k} experts a token cannot be chosen from {experts // groups * kept}: "
                "check num_experts_per_tok"
            )
        if self.apply_router_weight_on_input and self.top_k > 1:
            raise UnsupportedModelError(
                f"the weights of {self.top_k} experts a token cannot be applied to the input: "
                "expected one expert"
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move the correction bias, which the router has too, but never cast it."""
        kept = {self.e_score_correction_bias}
        # PyTorch gives _apply no types.
        return super()._apply(without_casts(fn, kept), recurse)  # type: ignore[no-untyped-call]

    def forward(
        self,
        hidden: torch.Tensor,
        router_logits: torch.Tensor,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of what each token's experts compute, ``[tokens, hidden]``.

        ``hidden`` is ``[tokens, hidden]``, and ``router_logits`` is ``[tokens, experts]``.

        ``shared`` is added to it: this rank's part, not yet summed over the tensor-parallel ranks,
        of what shared experts compute. Both are then summed at once.
        """
        bias = self.e_score_correction_bias
        weights, experts = topk_routing(
            router_logits,
            self.top_k,
            scoring_func=self.scoring_func,
            renormalize=self.renormalize,
            correction_bias=None if bias is None else bias.flatten(),
            num_expert_group=self.num_expert_group,
            topk_group=self.topk_group,
            routed_scaling_factor=self.routed_scaling_factor,
        )
        if self.routed is not None:
            self.routed[: len(experts)].copy_(experts)
        group = self.expert_group
        if group is not None and group.own_tokens is not None:
            routed = self._with_tokens_of(group.own_tokens, hidden, weights, experts)
            return routed if shared is None else routed + self._sum(shared)
        partial = self._compute(hidden, weights, experts)
        return self._sum(partial if shared is None else partial + shared)

    def _sum(self, partial: torch.Tensor) -> torch.Tensor:
        return self.tp_group.all_reduce(partial) if self.tp_group.size > 1 else partial

    def _compute(
        self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return what this rank's part of the experts contributes."""
        if self.apply_router_weight_on_input:
            hidden, weights = hidden * weights.to(hidden.dtype), torch.ones_like(weights)
        order, offsets = self.sorted_rows(experts)
        adapted = self.w13.adapters is not None or self.w2.adapters is not None
        tokens = order // self.top_k if adapted else None
        y = self.act_fn(self.w13(hidden, offsets, order, self.top_k, tokens=tokens))
        return combine_experts(self.w2(y, offsets, tokens=tokens), order, offsets, weights)

    def _with_tokens_of(
        self,
        own_tokens: OwnTokens,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
    ) -> torch.Tensor:
        """Gather the tokens of other ranks, compute this rank's experts, and sum over all ranks.

        If the ranks do not know yet how many tokens each has, the host waits for that, and no CUDA
        graph can capture it.
        """
        assert self.expert_group is not None
        sources, own, most = own_tokens.ranks, len(hidden), own_tokens.most
        if self.expert_group.ranks.size == 1:
            return self._compute(hidden, weights, experts)
        if self.w13.adapters is not None or self.w2.adapters is not None:
            raise UnsupportedModelError(
                "adapters of experts are not computed where ranks have tokens of their own: leave "
                "out own_tokens or data_parallel_size, or merge the adapter into its base model "
                "with PEFT's merge_and_unload()"
            )
        if most is None:
            counts = sources.all_gather(torch.tensor([own], device=hidden.device), 0)
            most = int(counts.max())
        if most == 0:  # on all ranks
            return torch.zeros_like(hidden)

        def gathered(tensor: torch.Tensor, padding: int) -> torch.Tensor:
            return sources.all_gather(F.pad(tensor, (0, 0, 0, most - own), value=padding), 0)

        # -1 is no expert, so nothing is computed for padding.
        partial = self._compute(gathered(hidden, 0), gathered(weights, 0), gathered(experts, -1))
        summed = self.expert_group.ranks.all_reduce(partial)
        return summed.narrow(0, sources.rank * most, own)
