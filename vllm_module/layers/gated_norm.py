"""Norms whose input or output is multiplied by a gate."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vllm_module.core.module import vLLMModule
from vllm_module.distributed import tensor_parallel_group
from vllm_module.errors import ShardingError
from vllm_module.kernels.rows.rms_norm import rms_norm
from vllm_module.layers.norm import RMSNorm
from vllm_module.parameters import ColumnvLLMParameter, Dim


class GatedRMSNorm(RMSNorm):
    """Root mean square normalization, times the SiLU of a gate (Qwen3-Next)."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        """Normalize ``x [..., hidden_size]``; ``gate`` has the same shape.

        The norm is rounded to the dtype of ``x`` first; the product is computed in float32.
        """
        normed = rms_norm(x, self.weight, self.eps, self.weight_offset)
        return (normed.float() * F.silu(gate.float())).to(x.dtype)


class GroupedGatedRMSNorm(vLLMModule):
    """Root mean square normalization of groups of features, with a gate (Mamba-2).

    The features are cut among the ranks. Ranks that keep whole groups need no traffic; those that
    share a group add up their sums of squares.

    Args:
        hidden_size: features on all ranks.
        groups: neighbouring features of each group are normalized together.
        eps: added to the mean square.
        norm_before_gate: multiply by the SiLU of the gate after the norm, not before it.

    Raises ``ShardingError`` if the groups cannot be shared evenly.

    """

    def __init__(
        self, hidden_size: int, groups: int, eps: float, norm_before_gate: bool = False
    ) -> None:
        super().__init__()
        self.tp_group = group = tensor_parallel_group()
        if hidden_size % groups or (groups % group.size and group.size % groups):
            raise ShardingError(
                f"a norm of {hidden_size} features in {groups} groups cannot be shared by "
                f"{group.size} tensor-parallel ranks: expected equal groups, and a number of them "
                "that divides the ranks or that the ranks divide"
            )
        self.groups, self.group_size = groups, hidden_size // groups
        self.eps = eps
        self.norm_before_gate = norm_before_gate
        self.weight = ColumnvLLMParameter(
            Dim.cut(hidden_size, group.size),
            tp_rank=group.rank,
            tp_size=group.size,
            dtype=torch.get_default_dtype(),
        )

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalize this rank's features ``x [..., features]``; the arithmetic is in float32."""
        wide, factor = x.float(), F.silu(gate.float())
        wide = wide if self.norm_before_gate else wide * factor
        # Of a group a rank may keep a part.
        size = min(self.group_size, wide.shape[-1])
        groups = wide.view(*wide.shape[:-1], wide.shape[-1] // size, size)
        total = groups.pow(2).sum(-1, keepdim=True)
        if groups.shape[-1] < self.group_size:
            total = self._over_ranks(total)
        normed = (groups * torch.rsqrt(total / self.group_size + self.eps)).flatten(-2)
        # Rounded before it is multiplied, as rms_norm does.
        y = self.weight * normed.to(x.dtype)
        return (y.float() * factor).to(x.dtype) if self.norm_before_gate else y

    def _over_ranks(self, total: torch.Tensor) -> torch.Tensor:
        """Add up the sums ``[..., 1, 1]`` of the ranks that keep parts of one group."""
        if self.groups == 1:
            return self.tp_group.all_reduce(total)
        # All ranks take part, each in the place of its group.
        own = self.tp_group.rank * self.groups // self.tp_group.size
        totals = total.new_zeros(*total.shape[:-1], self.groups)
        totals[..., own : own + 1] = total
        return self.tp_group.all_reduce(totals)[..., own : own + 1]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, group_size={self.group_size}, eps={self.eps}"
