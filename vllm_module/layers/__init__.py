"""The layers models are wired from."""

from vllm_module.layers.activation import (
    GeluAndMul,
    SiluAndMul,
    SwigluOAIAndMul,
    get_act,
    get_act_and_mul,
)
from vllm_module.layers.attention import (
    Attention,
    AttentionMetadata,
    EncoderAttention,
    layer_sliding_window,
)
from vllm_module.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm_module.layers.fused_moe import FusedMoE, Router
from vllm_module.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    MergedReplicatedLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm_module.layers.mla import MLAAttention, MLAUpProjection
from vllm_module.layers.norm import LayerNorm, PerHeadLayerNorm, RMSNorm, ShardedRMSNorm
from vllm_module.layers.recurrent import RecurrentLayer
from vllm_module.layers.rotary import RotaryEmbedding
from vllm_module.layers.rotation import LatentRotation, Rotation
from vllm_module.layers.rows import read_by, rows_for

__all__ = [
    "Attention",
    "AttentionMetadata",
    "ColumnParallelLinear",
    "EncoderAttention",
    "FusedMoE",
    "GeluAndMul",
    "LatentRotation",
    "LayerNorm",
    "MLAAttention",
    "MLAUpProjection",
    "MergedColumnParallelLinear",
    "MergedReplicatedLinear",
    "ParallelLMHead",
    "PerHeadLayerNorm",
    "QKVParallelLinear",
    "RMSNorm",
    "RecurrentLayer",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "Rotation",
    "Router",
    "RowParallelLinear",
    "ShardedRMSNorm",
    "SiluAndMul",
    "SwigluOAIAndMul",
    "VocabParallelEmbedding",
    "get_act",
    "get_act_and_mul",
    "layer_sliding_window",
    "read_by",
    "rows_for",
]
