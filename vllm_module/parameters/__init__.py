"""Typed parameters: each cuts its own rank's shard out of checkpoint tensors.

``dim.py`` divides a dimension among ranks, ``parameter.py`` has the base class of all parameters,
and ``classes.py`` has the classes, which count the features of their layer in different units.
"""

from vllm_module.parameters.classes import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ColumnvLLMParameter,
    Common,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedModelWeightParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
    RowvLLMParameter,
)
from vllm_module.parameters.dim import Dim, Experts, Shard, Slot, places_of
from vllm_module.parameters.flattened import FlattenedParameter, PerTensorTableParameter
from vllm_module.parameters.parameter import BasevLLMParameter, Piece
from vllm_module.parameters.per_slot import PerSlotVectorParameter
from vllm_module.parameters.ranked import RankedColumnParameter
from vllm_module.parameters.stored_order import Reordered, StoredOrder

__all__ = [
    "BasevLLMParameter",
    "BlockQuantScaleParameter",
    "ChannelQuantScaleParameter",
    "ColumnvLLMParameter",
    "Common",
    "Dim",
    "Experts",
    "FlattenedParameter",
    "GroupQuantScaleParameter",
    "ModelWeightParameter",
    "PackedColumnParameter",
    "PackedModelWeightParameter",
    "PackedvLLMParameter",
    "PerSlotVectorParameter",
    "PerTensorScaleParameter",
    "PerTensorTableParameter",
    "Piece",
    "RankedColumnParameter",
    "Reordered",
    "RowvLLMParameter",
    "Shard",
    "Slot",
    "StoredOrder",
    "places_of",
]
