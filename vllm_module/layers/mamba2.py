"""The Mamba-2 mixer: projections, convolution, state space scan, gated norm."""

from __future__ import annotations

from math import inf

import torch
from torch.nn import functional as F

from vllm_module.distributed import tensor_parallel_group
from vllm_module.errors import ShardingError
from vllm_module.kernels.recurrent.mamba2_scan import mamba2_scan
from vllm_module.layers.attention import AttentionMetadata
from vllm_module.layers.gated_norm import GroupedGatedRMSNorm
from vllm_module.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm_module.layers.recurrent import CausalConv1d, DecayingLayer
from vllm_module.parameters import ColumnvLLMParameter, Dim, Slot


class Mamba2Mixer(DecayingLayer):
    """Mamba-2's layer (arXiv:2405.21060): a convolution, a recurrence and a gated norm.

    The heads are cut among the ranks, and so are the groups. Where there are fewer groups than
    ranks, those that share the heads of a group each have a copy of its ``B`` and ``C``.

    Args:
        hidden_size: features of input and output.
        num_heads, head_dim: heads of the recurrence, and features of each.
        n_groups: a group of neighbouring heads has its own ``B`` and ``C``.
        state_size: numbers that the state has for each feature.
        conv_kernel: inputs of the convolution, 2 to 8.
        eps: of the norm.
        bias: whether ``in_proj`` and ``out_proj`` have one.
        conv_bias: whether the convolution has one.
        norm: whether there is one; without, the output is multiplied by the SiLU of the gate only.
        norm_before_gate: as in :class:`GroupedGatedRMSNorm`.
        time_step_limit: least and greatest step.

    Attributes:
        num_heads, n_groups: those of this rank.

    Raises ``ShardingError`` if the heads or groups cannot be divided.

    """

    sole_readers = {"x": "in_proj"}

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        n_groups: int,
        state_size: int,
        conv_kernel: int = 4,
        eps: float = 1e-5,
        bias: bool = False,
        conv_bias: bool = True,
        norm: bool = True,
        norm_before_gate: bool = False,
        time_step_limit: tuple[float, float] = (0.0, inf),
    ) -> None:
        size = tensor_parallel_group().size
        group_parts = _group_parts(num_heads, n_groups, size)
        super().__init__(Dim.cut(num_heads, size))
        inner, shared = num_heads * head_dim, n_groups * state_size
        x, b, c = (
            Slot("x", inner, size),
            Slot("B", shared, group_parts),
            Slot("C", shared, group_parts),
        )
        z, dt = Slot("z", inner, size), Slot("dt", num_heads, size)
        # One group of slots: a checkpoint stores them together, one after the other.
        projected = Dim((z, x, b, c, dt), groups=1)
        self.head_dim, self.state_size = head_dim, state_size
        self.num_heads, self.n_groups = num_heads // size, n_groups // group_parts
        self.time_step_limit = time_step_limit
        self.in_proj = ColumnParallelLinear(hidden_size, projected.size, bias, output=projected)
        self.conv1d = CausalConv1d(Dim((x, b, c), groups=1), conv_kernel, conv_bias)
        self.D = ColumnvLLMParameter(
            Dim.cut(num_heads, size),
            tp_rank=self.tp_group.rank,
            tp_size=size,
            dtype=torch.float32,
        )
        self.norm: GroupedGatedRMSNorm | None = None
        if norm:
            self.norm = GroupedGatedRMSNorm(inner, n_groups, eps, norm_before_gate)
        self.out_proj = RowParallelLinear(inner, hidden_size, bias)
        recurrence = self.num_heads, head_dim, state_size
        self.state_shapes = {"conv": self.conv1d.state_shape, "recurrence": recurrence}
        self.state_dtypes = {"conv": None, "recurrence": torch.float32}

    def forward(self, x: torch.Tensor, metadata: AttentionMetadata | None = None) -> torch.Tensor:
        """Map ``x [tokens, hidden_size]`` to the same shape.

        Without ``metadata`` the tokens are one whole sequence, and no state is kept. With
        ``metadata``, torch.compile breaks the graph here.
        """
        inner, channels = self.num_heads * self.head_dim, len(self.conv1d.weight)
        sizes = [inner, channels, self.num_heads]
        gate, xbc, dt = torch.split(self.project(x), sizes, dim=-1)
        y = self.over_sequences(self._recur, metadata, xbc, dt)
        if self.norm is None:
            return self.out_proj((y.float() * F.silu(gate.float())).to(y.dtype))
        return self.out_proj(self.norm(y, gate))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return gates, ``x``, ``B``, ``C`` and steps of this rank; a subclass may scale them."""
        return self.in_proj(x)

    def _recur(
        self, xbc: torch.Tensor, dt: torch.Tensor, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        states, places = self.kept(metadata)
        xbc = self.conv1d(xbc, states["conv"], places)
        shared = self.n_groups * self.state_size
        x, b, c = torch.split(xbc, [self.num_heads * self.head_dim, shared, shared], dim=-1)
        b, c = (part.view(-1, self.n_groups, self.state_size) for part in (b, c))
        x = x.view(-1, self.num_heads, self.head_dim)
        kept = states["recurrence"], *places
        low, high = self.time_step_limit
        decay, bias = self.decay(), self.dt_bias
        y = mamba2_scan(x, dt, decay, b, c, self.D, bias, *kept, dt_min=low, dt_max=high)
        return y.flatten(-2)


def _group_parts(heads: int, groups: int, size: int) -> int:
    """Return the number of parts that groups are cut into: one a rank, or one a group."""
    if heads % size:
        raise ShardingError(
            f"{heads} heads of a recurrence cannot be shared evenly by {size} tensor-parallel "
            "ranks: choose a size that divides them"
        )
    if heads % groups:
        raise ShardingError(
            f"{heads} heads of a recurrence cannot share {groups} groups evenly: check the numbers "
            "of heads and groups"
        )
    if groups % size and size % groups:
        raise ShardingError(
            f"{groups} groups of a recurrence cannot be shared evenly by {size} tensor-parallel "
            "ranks: choose a size that divides them, or that they divide"
        )
    return min(groups, size)
