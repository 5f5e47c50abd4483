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
from vllm_module.layers.fusion import fuse
from vllm_module.layers.gated_delta_net import GatedDeltaNet
from vllm_module.layers.gated_norm import GatedRMSNorm, GroupedGatedRMSNorm
from vllm_module.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    MergedReplicatedLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm_module.layers.mamba2 import Mamba2Mixer
from vllm_module.layers.mla import MLAAttention
from vllm_module.layers.mla_projections import (
    MLAHeadProjection,
    MLAUpProjection,
    add_up_projections,
)
from vllm_module.layers.norm import LayerNorm, PerHeadLayerNorm, RMSNorm, ShardedRMSNorm
from vllm_module.layers.recurrent import CausalConv1d, DecayingLayer, RecurrentLayer, layer_kind
from vllm_module.layers.rotary import Positions, RotaryEmbedding

__all__ = [
    "Attention",
    "AttentionMetadata",
    "CausalConv1d",
    "ColumnParallelLinear",
    "DecayingLayer",
    "EncoderAttention",
    "FusedMoE",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "GeluAndMul",
    "GroupedGatedRMSNorm",
    "LayerNorm",
    "MLAAttention",
    "MLAHeadProjection",
    "MLAUpProjection",
    "Mamba2Mixer",
    "MergedColumnParallelLinear",
    "MergedReplicatedLinear",
    "ParallelLMHead",
    "PerHeadLayerNorm",
    "Positions",
    "QKVParallelLinear",
    "RMSNorm",
    "RecurrentLayer",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "Router",
    "RowParallelLinear",
    "ShardedRMSNorm",
    "SiluAndMul",
    "SwigluOAIAndMul",
    "VocabParallelEmbedding",
    "add_up_projections",
    "fuse",
    "get_act",
    "get_act_and_mul",
    "layer_kind",
    "layer_sliding_window",
]
