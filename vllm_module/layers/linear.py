"""Linear layers, cut over the tensor-parallel ranks by output (column) or input (row) features.

Shapes: x ``[..., input]``, weight ``[output, input]``, bias ``[output]``. The cut and the layers'
names are Megatron-LM's (arXiv:1909.08053, section 3).

A fused layer computes several layers of a checkpoint in one matmul. Its weight has one *slot* for
each of them: ``qkv_proj`` has the slots ``q_proj``, ``k_proj`` and ``v_proj``. ``shard_names``
names the slots. The argument is called that in vLLM; everywhere else a shard is one rank's part of
a checkpoint tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vllm_module.distributed import tensor_parallel_group
from vllm_module.errors import ShardingError
from vllm_module.layers.lora import LayerAdapters
from vllm_module.parameters import ColumnvLLMParameter, Dim, Slot
from vllm_module.quantization import EightBitMethod, QuantizableLayer
from vllm_module.quantization.rows import QuantizedRows, RowScheme


class LinearBase(QuantizableLayer):
    """Base of the linear layers: creates the weight and the bias.

    Args:
        output, input: the weight's dimensions, described for all ranks.
        bias: whether there is one; it is cut like the output.
        skip_bias_add: load the bias but do not add it. The caller adds ``layer.bias``, for example
            in a fused kernel.
        params_dtype: of weight and bias; torch's default dtype unless given.

    Attributes:
        adapters: what LoRA adapters add to the product; ``None`` while none adapts the layer.
        called_elsewhere: True if another pipeline stage calls the layer, and this one holds it for
            a tensor that it shares.

    """

    adapters: LayerAdapters | None = None
    called_elsewhere = False

    def __init__(
        self,
        output: Dim,
        input: Dim,
        bias: bool,
        skip_bias_add: bool,
        params_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.tp_group = tensor_parallel_group()
        self.skip_bias_add = skip_bias_add
        if output.names:
            self.shard_names = output.names
        self.create_weight(output, input, params_dtype or torch.get_default_dtype())
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = ColumnvLLMParameter(output, **self.common(self.params_dtype))

    def row_scheme(self) -> RowScheme | None:
        """Return how the product quantizes the rows that ``forward`` is given, if it does."""
        method = self.quant_method
        if self.adapters is not None:  # which are given the rows as they are
            return None
        return method.row_scheme(self) if isinstance(method, EightBitMethod) else None

    def _multiply(self, x: torch.Tensor | QuantizedRows, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply by the weight: ``x [..., input]``, or its rows quantized by ``row_scheme``."""
        method = self.quant_method
        if isinstance(x, QuantizedRows):
            assert isinstance(method, EightBitMethod)
            return method.apply_rows(self, x, bias)
        y = method.apply(self, x, bias)
        return y if self.adapters is None else self.adapters.add(x, y)

    def extra_repr(self) -> str:
        group = self.tp_group
        weight = self.get_parameter(self.parameter_names[0])
        return (
            f"weight={list(weight.shape)}, bias={self.bias is not None}, "
            f"rank={group.rank} of {group.size}"
        )


class ReplicatedLinear(LinearBase):
    """A linear layer of which every rank holds a whole copy.

    Args:
        input_size, output_size: features.
        bias: whether there is one.
        output: the output dimension of a fused layer, with its slots; ``output_size`` is its size.

    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        *,
        output: Dim | None = None,
    ) -> None:
        output = output or Dim.whole(output_size)
        super().__init__(output, Dim.whole(input_size), bias, skip_bias_add, params_dtype)

    def forward(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        """Map ``x [..., input]`` to ``[..., output]``."""
        return self._multiply(x, None if self.skip_bias_add else self.bias)


class MergedReplicatedLinear(ReplicatedLinear):
    """Several linear layers with the same input, fused into one matmul and whole on every rank.

    Args:
        output_sizes: output features of each layer.
        shard_names: each layer's name in the checkpoint, in the same order; None if a checkpoint
            stores them as one tensor only.

    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        *,
        shard_names: Sequence[str] | None,
    ) -> None:
        output = fused(shard_names, [(features, 1) for features in output_sizes])
        super().__init__(input_size, output.size, bias, skip_bias_add, params_dtype, output=output)
        self.output_sizes = list(output_sizes)


class ColumnParallelLinear(LinearBase):
    """A linear layer whose output features are cut: each rank computes its own part of them.

    Args:
        input_size, output_size: features of the unsharded layer.
        bias: whether there is one; it is cut like the output.
        gather_output: return all output features on every rank, not only the rank's own.
        output: the output dimension of a fused layer, with its slots; ``output_size`` is its size.

    Attributes:
        transposed: whether a checkpoint stores the weight as ``[input, output]``; ``False``. A
            subclass sets it, of any linear layer.

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

    def forward(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        """Map ``x [..., input]`` to ``[..., output / size]``, or ``[..., output]`` if gathered."""
        y = self._multiply(x, None if self.skip_bias_add else self.bias)
        if not self.gather_output or self.tp_group.size == 1:
            return y
        # Slot by slot: one gather of all slots would return them interleaved by rank.
        shards = self.output.shards(self.tp_group.rank, self.tp_group.size)
        parts = torch.split(y, [shard.padded for shard in shards], dim=-1)
        whole: list[torch.Tensor] = []
        for part, slot in zip(parts, self.output.slots, strict=True):
            of_ranks = self.tp_group.all_gather(part).chunk(self.tp_group.size, dim=-1)
            whole += of_ranks[:: self.tp_group.size // slot.parts]  # neighbours may share a part
        return torch.cat(whole, dim=-1)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers with the same input, fused into one matmul.

    Args:
        output_sizes: output features of each layer, unsharded.
        shard_names: each layer's name in the checkpoint, in the same order; None if a checkpoint
            stores them as one tensor only.

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
        shard_names: Sequence[str] | None,
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


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections, fused and cut by attention head.

    With fewer key-value heads than ranks, neighbouring ranks hold copies of the same head.

    Args:
        hidden_size: input features.
        head_size: features of one head.
        total_num_heads: query heads of the unsharded layer.
        total_num_kv_heads: key-value heads of the unsharded layer; ``total_num_heads`` if None.
        shard_names: the names of the three projections in the checkpoint; None if it stores them
            as one tensor only.
        stored_rotary_pairs: the checkpoint stores the two halves of each head of q and of k in
            turns, feature by feature, as rotary embeddings that rotate neighbours want them. Names
            tell the orders apart: the first two of ``shard_names`` end with ``_pairs`` then.
        groups: the checkpoint stores one tensor in so many equal groups, each of which has its
            share of the heads of q, k and v, in this order: as Falcon does for each key-value head.

    Attributes:
        num_heads, num_kv_heads: number of heads on this rank.
        heads: number of heads of q, k and v on this rank; split the output's heads by them.
        output_sizes: output features of q, k and v on this rank; split the output by them.

    Raises:
        ShardingError: the heads cannot be divided evenly among the ranks.

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
        shard_names: Sequence[str] | None = ("q_proj", "k_proj", "v_proj"),
        stored_rotary_pairs: bool = False,
        groups: int | None = None,
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
        q = (total_num_heads * head_size, size)
        kv = (total_num_kv_heads * head_size, kv_parts)
        pairs = head_size if stored_rotary_pairs else 0
        if pairs and shard_names is not None:
            query, key, value = shard_names
            shard_names = (f"{query}_pairs", f"{key}_pairs", value)
        if groups is not None and total_num_kv_heads % groups:
            raise ShardingError(
                f"{total_num_kv_heads} key-value heads cannot be stored in {groups} equal groups"
            )
        shard_names = None if groups is not None else shard_names
        output = fused(shard_names, [q, kv, kv], [pairs, pairs, 0], groups or 1)
        super().__init__(
            hidden_size,
            output.size,
            bias,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            output=output,
        )
        self.num_heads = total_num_heads // size
        self.num_kv_heads = total_num_kv_heads // kv_parts
        self.heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        self.output_sizes = [heads * head_size for heads in self.heads]


class RowParallelLinear(LinearBase):
    """A linear layer whose input features are cut: the ranks' partial outputs are summed.

    Args:
        input_size, output_size: features of the unsharded layer.
        bias: whether there is one; every rank holds all of it, and it is added once.
        input_is_parallel: the input is the rank's own part, such as the output of a
            column-parallel layer; else the rank takes its part of the whole input.
        reduce_results: sum the outputs of all ranks; else return this rank's partial output.

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

    def row_scheme(self) -> RowScheme | None:
        return super().row_scheme() if self.input_is_parallel else None

    def forward(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        """Map ``x`` to ``[..., output]``.

        ``x`` is ``[..., input / size]``, or ``[..., input]`` without ``input_is_parallel``.
        """
        group = self.tp_group
        if not self.input_is_parallel:
            assert isinstance(x, torch.Tensor)  # rows of the whole input are never quantized
            x = x.chunk(group.size, dim=-1)[group.rank]
        # Only rank 0 adds the bias, so that the sum has it once.
        bias = self.bias if group.rank == 0 and not self.skip_bias_add else None
        y = self._multiply(x, bias)
        return group.all_reduce(y) if self.reduce_results and group.size > 1 else y


def fused(
    shard_names: Sequence[str] | None,
    sizes: Sequence[tuple[int, int]],
    pairs: Sequence[int] | None = None,
    groups: int = 1,
) -> Dim:
    """Return a dimension with the slots ``shard_names``, or of slots that are stored together only.

    ``sizes`` has the features of each slot and the number of parts that the slot is cut into;
    ``pairs`` is that of each :class:`Slot`, and ``groups`` how they are stored together.
    """
    together = None
    if shard_names is None:
        shard_names, together = [str(slot) for slot in range(len(sizes))], groups
    if isinstance(shard_names, str) or len(shard_names) != len(sizes):
        raise ValueError(
            f"shard_names must name each of the {len(sizes)} fused layers, got {shard_names!r}"
        )
    if len(set(shard_names)) != len(shard_names) or not all(shard_names):
        raise ValueError(f"shard_names must be distinct and not empty, got {shard_names!r}")
    slots = (
        Slot(name, features, parts, pairs=run)
        for name, (features, parts), run in zip(
            shard_names, sizes, pairs or [0] * len(sizes), strict=True
        )
    )
    return Dim(tuple(slots), together)
