"""The gated delta net: a linear attention with a recurrent state."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch.nn import functional as F

from vllm_module.distributed import tensor_parallel_group
from vllm_module.errors import ShardingError
from vllm_module.kernels.recurrent.gated_delta_rule import gated_delta_rule
from vllm_module.layers.attention import AttentionMetadata
from vllm_module.layers.gated_norm import GatedRMSNorm
from vllm_module.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm_module.layers.recurrent import CausalConv1d, DecayingLayer
from vllm_module.parameters import Dim, Slot


class GatedDeltaNet(DecayingLayer):
    """A linear attention: a convolution and the gated delta rule (arXiv:2412.06464).

    The heads are cut among the ranks. Where there are fewer key heads than ranks, those that share
    the value heads of a key head each have a copy of it.

    Args:
        hidden_size: features of input and output.
        num_key_heads, num_value_heads: a key head serves neighbouring value heads.
        key_dim, value_dim: features of a head of each kind.
        conv_kernel: inputs of the convolution, 2 to 8.
        eps: of the norm of each head.
        stored: what a checkpoint stores. ``"by_head"``, as of Qwen3-Next: ``in_proj_qkvz`` has of
            each key head its query, its key, and values and gates of its value heads, and
            ``in_proj_ba`` is in the same order. ``"by_kind"``, as of Qwen3.5: ``in_proj_qkv`` has
            all queries, then all keys, then all values, beside ``in_proj_z``, ``in_proj_b`` and
            ``in_proj_a``. ``"apart"``, as of OLMo Hybrid: ``q_proj``, ``k_proj``, ``v_proj``,
            ``g_proj``, ``b_proj`` and ``a_proj``, ``q_conv1d``, ``k_conv1d`` and ``v_conv1d``,
            ``o_norm`` and ``o_proj``.
        negative_eigenvalues: values are written with up to twice their weight, so that a step can
            turn the sign of a part of the state (arXiv:2411.12537).

    Attributes:
        num_key_heads, num_value_heads: those of this rank.

    Raises ``ShardingError`` if the heads cannot be divided.

    """

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_kernel: int = 4,
        eps: float = 1e-6,
        stored: Literal["by_head", "by_kind", "apart"] = "by_head",
        negative_eigenvalues: bool = False,
    ) -> None:
        size = tensor_parallel_group().size
        if num_value_heads % num_key_heads:
            raise ShardingError(
                f"{num_value_heads} value heads of linear attention cannot share {num_key_heads} "
                "key heads evenly: check linear_num_value_heads and linear_num_key_heads"
            )
        if (num_key_heads % size and size % num_key_heads) or num_value_heads % size:
            raise ShardingError(
                f"{num_key_heads} key heads and {num_value_heads} value heads of linear attention "
                f"cannot be shared evenly by {size} tensor-parallel ranks: choose a size that "
                "divides them, or that divides the value heads and that the key heads divide"
            )
        super().__init__(Dim.cut(num_value_heads, size))
        keys, values = num_key_heads * key_dim, num_value_heads * value_dim
        key_parts = min(num_key_heads, size)
        self.num_key_heads = num_key_heads // key_parts
        self.num_value_heads = num_value_heads // size
        self.key_dim, self.value_dim = key_dim, value_dim
        self.negative_eigenvalues = negative_eigenvalues
        self.in_proj_z: ColumnParallelLinear | None = None
        self.in_proj_ba: ColumnParallelLinear
        q, k, v = Slot("q", keys, key_parts), Slot("k", keys, key_parts), Slot("v", values, size)
        qkv = convolved = Dim((q, k, v), groups=1)
        if stored == "by_head":
            qkvz = Dim((q, k, v, Slot("z", values, size)), groups=num_key_heads)
            b, a = Slot("b", num_value_heads, size), Slot("a", num_value_heads, size)
            ba = Dim((b, a), groups=num_key_heads)
            self.in_proj_qkvz = ColumnParallelLinear(
                hidden_size, qkvz.size, bias=False, output=qkvz
            )
            self.in_proj_ba = ColumnParallelLinear(hidden_size, ba.size, bias=False, output=ba)
        else:
            ba_names = "in_proj_b", "in_proj_a"
            if stored == "apart":
                self.weight_aliases = {
                    "g_proj": "in_proj_z", "o_norm": "norm", "o_proj": "out_proj"
                }  # fmt: skip
                qkv, convolved = _apart(qkv, "proj"), _apart(qkv, "conv1d")
                ba_names = "b_proj", "a_proj"
            self.in_proj_qkv = ColumnParallelLinear(hidden_size, qkv.size, bias=False, output=qkv)
            self.in_proj_z = ColumnParallelLinear(hidden_size, values, bias=False)
            self.in_proj_ba = MergedColumnParallelLinear(
                hidden_size, [num_value_heads] * 2, False, shard_names=ba_names
            )
        self.conv1d = CausalConv1d(convolved, conv_kernel, bias=False)
        self.norm = GatedRMSNorm(value_dim, eps)
        self.out_proj = RowParallelLinear(values, hidden_size, bias=False)
        recurrence = self.num_value_heads, key_dim, value_dim
        self.state_shapes = {"conv": self.conv1d.state_shape, "recurrence": recurrence}
        self.state_dtypes = {"conv": None, "recurrence": torch.float32}

    def forward(self, x: torch.Tensor, metadata: AttentionMetadata | None = None) -> torch.Tensor:
        """Map ``x [tokens, hidden_size]`` to the same shape.

        Without ``metadata`` the tokens are one whole sequence, and no state is kept. With
        ``metadata``, torch.compile breaks the graph here.
        """
        if self.in_proj_z is None:
            sizes = [len(self.conv1d.weight), self.value_features]
            qkv, z = self.in_proj_qkvz(x).split(sizes, dim=-1)
        else:
            qkv, z = self.in_proj_qkv(x), self.in_proj_z(x)
        b, a = self.in_proj_ba(x).split(self.num_value_heads, dim=-1)
        beta = b.sigmoid() * 2 if self.negative_eigenvalues else b.sigmoid()
        log_decay = self.decay() * F.softplus(a.float() + self.dt_bias)
        y = self.over_sequences(self._recur, metadata, qkv, log_decay, beta)
        return self.out_proj(self.norm(y, z.unflatten(-1, (-1, self.value_dim))).flatten(-2))

    @property
    def value_features(self) -> int:
        """Features of this rank's value heads."""
        return self.num_value_heads * self.value_dim

    def _recur(
        self,
        qkv: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> torch.Tensor:
        states, places = self.kept(metadata)
        qkv = self.conv1d(qkv, states["conv"], places)
        keys = self.num_key_heads * self.key_dim
        q, k, v = torch.split(qkv, [keys, keys, self.value_features], dim=-1)
        q, k = (part.view(-1, self.num_key_heads, self.key_dim) for part in (q, k))
        v = v.view(-1, self.num_value_heads, self.value_dim)
        return gated_delta_rule(q, k, v, log_decay, beta, states["recurrence"], *places)


def _apart(qkv: Dim, kind: str) -> Dim:
    """Return the same slots, each of which a checkpoint may store as a tensor of its own."""
    return Dim(tuple(replace(slot, name=f"{slot.name}_{kind}") for slot in qkv.slots))
