"""Linear layers, cut over the tensor-parallel ranks by output (column) or input (row) features.

Shapes: x ``[..., input]``, weight ``[output, input]``, bias ``[output]``; the cut and the layers'
names are Megatron-LM's (arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vllm_module.distributed import tensor_parallel_group
from vllm_module.errors import ShardingError
from vllm_module.parameters import ColumnvLLMParameter, Dim, Slot
from vllm_module.quantization import QuantizableLayer


class LinearBase(QuantizableLayer):
    """What the linear layers share: a weight and a bias, described by their feature dimensions.

    With ``skip_bias_add`` the bias is loaded but not added: the caller adds ``layer.bias`` where
    it can be fused with what follows.
    """

    def __init__(
        self,
        output: Dim,
        input: Dim,
        bias: bool,
        skip_bias_add: bool,
        params_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.tp_group = group = tensor_parallel_group()
        self.skip_bias_add = skip_bias_add
        self.create_weight(output, input, params_dtype or torch.get_default_dtype())
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = ColumnvLLMParameter(
                output, tp_rank=group.rank, tp_size=group.size, dtype=self.params_dtype
            )

    def extra_repr(self) -> str:
        group = self.tp_group
        return (
            f"weight={list(self.weight.shape)}, bias={self.bias is not None}, "
            f"rank={group.rank} of {group.size}"
        )


class ReplicatedLinear(LinearBase):
    """A linear layer that every rank holds whole."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            Dim.whole(output_size), Dim.whole(input_size), bias, skip_bias_add, params_dtype
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [..., input]`` to ``[..., output]``."""
        return self.quant_method.apply(self, x, None if self.skip_bias_add else self.bias)


class ColumnParallelLinear(LinearBase):
    """A linear layer whose output features are cut: each rank computes its own.

    Args:
        input_size, output_size: features of the unsharded layer.
        bias: whether there is one; it is cut like the output.
        gather_output: return all output features on every rank instead of the rank's own.

    Raises:
        ShardingError: the size does not divide ``output_size``.

    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        *,
        output: Dim | None = None,
    ) -> None:
        output = output or Dim.cut(output_size, tensor_parallel_group().size)
        super().__init__(output, Dim.whole(input_size), bias, skip_bias_add, params_dtype)
        self.gather_output = gather_output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [..., input]`` to ``[..., output / size]``, or ``[..., output]`` if gathered."""
        y = self.quant_method.apply(self, x, None if self.skip_bias_add else self.bias)
        if not self.gather_output or self.tp_group.size == 1:
            return y
        # Slot by slot: the ranks' outputs laid end to end would interleave the slots.
        parts = torch.split(y, [shard.room for shard in self.weight.shards[0]], dim=-1)
        return torch.cat([self.tp_group.all_gather(part) for part in parts], dim=-1)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input, fused into one matmul.

    Args:
        output_sizes: output features of each, unsharded.
        shard_names: the checkpoint's name of each, in the same order.

    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        *,
        shard_names: Sequence[str],
    ) -> None:
        size = tensor_parallel_group().size
        output = fused(shard_names, [(features, size) for features in output_sizes])
        super().__init__(
            input_size,
            output.size,
            bias,
            gather_output,
            skip_bias_add,
            params_dtype,
            output=output,
        )
        self.shard_names = tuple(shard_names)


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections, fused and cut by attention head.

    Where there are fewer key-value heads than ranks, neighbouring ranks hold copies of one.

    Args:
        hidden_size: input features.
        head_size: features of one head.
        total_num_heads: query heads of the unsharded layer.
        total_num_kv_heads: key-value heads of the unsharded layer; as many as query heads if None.
        shard_names: the checkpoint's names of the three projections.

    Attributes:
        num_heads, num_kv_heads: this rank's heads.
        output_sizes: this rank's output features of q, k and v: split the output by them.

    Raises:
        ShardingError: the heads cannot be shared evenly among the ranks.

    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        *,
        shard_names: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    ) -> None:
        size = tensor_parallel_group().size
        total_num_kv_heads = total_num_kv_heads or total_num_heads
        if total_num_heads % size:
            raise ShardingError(
                f"{total_num_heads} attention heads cannot be shared evenly by {size} "
                "tensor-parallel ranks: choose a size that divides them"
            )
        if total_num_heads % total_num_kv_heads:
            raise ShardingError(
                f"{total_num_heads} attention heads cannot share {total_num_kv_heads} key-value "
                "heads evenly: check num_attention_heads and num_key_value_heads"
            )
        if max(total_num_kv_heads, size) % min(total_num_kv_heads, size):
            raise ShardingError(
                f"{total_num_kv_heads} key-value heads can neither be cut nor replicated evenly "
                f"over {size} tensor-parallel ranks: one must divide the other"
            )
        kv_parts = min(total_num_kv_heads, size)
        self.num_heads = total_num_heads // size
        self.num_kv_heads = total_num_kv_heads // kv_parts
        self.output_sizes = [
            heads * head_size for heads in (self.num_heads, *[self.num_kv_heads] * 2)
        ]
        kv = (total_num_kv_heads * head_size, kv_parts)
        output = fused(shard_names, [(total_num_heads * head_size, size), kv, kv])
        super().__init__(
            hidden_size,
            output.size,
            bias,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            output=output,
        )
        self.shard_names = tuple(shard_names)


class RowParallelLinear(LinearBase):
    """A linear layer whose input features are cut: the ranks' partial outputs are summed.

    Args:
        input_size, output_size: features of the unsharded layer.
        bias: whether there is one; every rank holds it whole and it is added once.
        input_is_parallel: the input is already the rank's own part, as column-parallel layers
            leave it; else the rank takes its part of the whole input.
        reduce_results: sum over the ranks; else return the partial output.

    Raises:
        ShardingError: the size does not divide ``input_size``.

    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
    ) -> None:
        cut = Dim.cut(input_size, tensor_parallel_group().size)
        super().__init__(Dim.whole(output_size), cut, bias, skip_bias_add, params_dtype)
        self.input_is_parallel = input_is_parallel
        self.reduce_results = reduce_results

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [..., input / size]`` (``[..., input]`` unless parallel) to ``[..., output]``."""
        group = self.tp_group
        if not self.input_is_parallel:
            x = x.chunk(group.size, dim=-1)[group.rank]
        # One rank's partial sum carries the bias, so that the total has it once.
        bias = self.bias if group.rank == 0 and not self.skip_bias_add else None
        y = self.quant_method.apply(self, x, bias)
        return group.all_reduce(y) if self.reduce_results and group.size > 1 else y


def fused(shard_names: Sequence[str], sizes: Sequence[tuple[int, int]]) -> Dim:
    """Return the dimension of several slots, given each one's features and parts."""
    if isinstance(shard_names, str) or len(shard_names) != len(sizes):
        raise ValueError(
            f"shard_names must name each of the {len(sizes)} fused layers, got {shard_names!r}"
        )
    if len(set(shard_names)) != len(shard_names) or not all(shard_names):
        raise ValueError(f"shard_names must be distinct and not empty, got {shard_names!r}")
    slots = (Slot(name, *size) for name, size in zip(shard_names, sizes, strict=True))
    return Dim(tuple(slots))
