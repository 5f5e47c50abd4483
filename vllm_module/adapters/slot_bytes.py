"""The memory of slots of adapters, before it is allocated."""

from __future__ import annotations

from torch import nn

from vllm_module.layers import ParallelLMHead
from vllm_module.layers.linear import LinearBase
from vllm_module.layers.lora_slots import padded_rank


def slot_bytes(model: nn.Module, slots: int, rank: int) -> int:
    """Return the bytes of slots for A and B of this rank's linear layers, but not of the head.

    Args:
        model: the base model.
        slots: number of slots.
        rank: largest rank of an adapter.

    """
    total, padded = 0, padded_rank(rank)
    for layer in model.modules():
        if isinstance(layer, LinearBase) and not isinstance(layer, ParallelLMHead):
            common = layer.common(layer.params_dtype)
            place = common["tp_rank"], common["tp_size"]
            inputs, outputs = (
                sum(shard.padded for shard in dim.shards(*place))
                for dim in (layer.input, layer.output)
            )
            numbers = (len(layer.output.names) or 1) * inputs + outputs
            total += slots * padded * numbers * layer.params_dtype.itemsize
    return total
