"""Qwen3-Next: linear attention in most layers, gated attention in the others, and experts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.errors import ShardingError
from vllm_module.hf_config import ConvKernel, NumExperts, Positive, Size
from vllm_module.layers import (
    Attention,
    AttentionMetadata,
    GatedDeltaNet,
    Positions,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    layer_kind,
)
from vllm_module.models.decoder import DecoderForCausalLM, DecoderModel
from vllm_module.models.llama import LlamaMLP
from vllm_module.models.qwen2_moe import Qwen2MoeSparseMoeBlock
from vllm_module.models.qwen3_moe import Qwen3MoeConfig


class Qwen3NextConfig(Qwen3MoeConfig):
    attribute_map: ClassVar = {}  # these files say num_experts

    head_dim: Size = 256
    num_experts: NumExperts | Literal[0] = 512
    num_experts_per_tok: Size = 10
    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: Size = 512
    norm_topk_prob: bool = True
    partial_rotary_factor: Positive = 0.25
    full_attention_interval: Size = 4
    hidden_act: Literal["silu", "swish"] = "silu"
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_conv_kernel_dim: ConvKernel = 4


class Qwen3NextRMSNorm(RMSNorm):
    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps, weight_offset=1.0)


class Qwen3NextAttention(vLLMModule):
    sole_readers = {
        "hidden_states": "qkv_proj", "q_norm": "rotary_emb", "k_norm": "rotary_emb",
        "rotary_emb": "attn",
    }  # fmt: skip

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = rotary_emb.head_size
        # A head of q_proj has a query and then a gate, each of the size of a head.
        self.qkv_proj = QKVParallelLinear(hidden, self.head_dim, 2 * heads, kv_heads, bias=bias)
        if self.qkv_proj.num_heads % (2 * self.qkv_proj.num_kv_heads):
            raise ShardingError(
                f"{heads} attention heads with gates cannot share {kv_heads} key-value heads "
                f"evenly on {self.qkv_proj.tp_group.size} tensor-parallel ranks: each rank needs "
                "whole heads, and as many for each of its key-value heads"
            )
        self.q_norm = Qwen3NextRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Qwen3NextRMSNorm(self.head_dim, config.rms_norm_eps)
        self.rotary_emb = rotary_emb
        self.attn = Attention(
            self.qkv_proj.num_heads // 2, self.head_dim, num_kv_heads=self.qkv_proj.num_kv_heads
        )
        self.o_proj = RowParallelLinear(heads * self.head_dim, hidden, bias=bias)

    def forward(
        self, positions: Positions, hidden_states: torch.Tensor, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.qkv_proj.heads, dim=-2)
        q, gate = q.unflatten(-2, (-1, 2)).unbind(-2)
        q, k = self.rotary_emb(positions, self.q_norm(q), self.k_norm(k))
        o = self.attn(q, k, v, metadata)
        return self.o_proj(o * torch.sigmoid(gate.flatten(-2)))


class Qwen3NextDecoderLayer(vLLMModule):
    stored_projections: Literal["by_head", "by_kind"] = "by_head"  # as in GatedDeltaNet
    sole_readers = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Qwen3NextRMSNorm(hidden, eps)
        self.self_attn: Qwen3NextAttention | None = None
        if layer_kind(config, layer_idx) == "full_attention":
            self.self_attn = Qwen3NextAttention(config, rotary_emb)
        else:
            self.linear_attn = GatedDeltaNet(
                hidden,
                config.linear_num_key_heads,
                config.linear_num_value_heads,
                config.linear_key_head_dim,
                config.linear_value_head_dim,
                config.linear_conv_kernel_dim,
                eps,
                self.stored_projections,
            )
        self.post_attention_layernorm = Qwen3NextRMSNorm(hidden, eps)
        sparse = (layer_idx + 1) % config.decoder_sparse_step == 0
        dense = layer_idx in (config.mlp_only_layers or ()) or not (sparse and config.num_experts)
        self.mlp = LlamaMLP(config) if dense else Qwen2MoeSparseMoeBlock(config)

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        if self.self_attn is None:
            hidden_states = self.linear_attn(hidden_states, metadata)
        else:
            hidden_states = self.self_attn(positions, hidden_states, metadata)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Qwen3NextModel(DecoderModel):
    norm_class = Qwen3NextRMSNorm
    layer_class = Qwen3NextDecoderLayer


class Qwen3NextForCausalLM(DecoderForCausalLM):
    config_class = Qwen3NextConfig
    model_class = Qwen3NextModel
    skipped_weights = {"mtp": "layers that predict further tokens are for speculative decoding"}
