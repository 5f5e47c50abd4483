"""OLMo 2: norms after each block instead of before, and of all queries and keys together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import Positive
from vllm_module.layers import (
    AttentionMetadata,
    Positions,
    RMSNorm,
    RotaryEmbedding,
    ShardedRMSNorm,
)
from vllm_module.models.decoder import DecoderForCausalLM, DecoderModel
from vllm_module.models.llama import LlamaAttention, LlamaConfig, LlamaMLP


class Olmo2Config(LlamaConfig):
    rms_norm_eps: Positive = 1e-5


class Olmo2RMSNorm(RMSNorm):
    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps, weight_offset=0.0)  # rounds once


class Olmo2Attention(LlamaAttention):
    sole_readers = {"hidden_states": "qkv_proj", "rotary_emb": "attn"}
    weight_offset: float | None = 0.0  # as in Olmo2RMSNorm

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        q, k, _ = self.qkv_proj.output.slots
        self.q_norm = ShardedRMSNorm(q, config.rms_norm_eps, weight_offset=self.weight_offset)
        self.k_norm = ShardedRMSNorm(k, config.rms_norm_eps, weight_offset=self.weight_offset)

    def forward(
        self, positions: Positions, hidden_states: torch.Tensor, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden_states).split(self.qkv_proj.output_sizes, dim=-1)
        parts = self.q_norm(q), self.k_norm(k), v
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.rotates:
            q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v, metadata))


class Olmo2DecoderLayer(vLLMModule):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Olmo2Attention(config, rotary_emb, layer_idx)
        self.post_attention_layernorm = Olmo2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)
        self.post_feedforward_layernorm = Olmo2RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden_states + residual
        hidden_states = self.self_attn(positions, residual, metadata)
        residual = residual + self.post_attention_layernorm(hidden_states)
        return self.post_feedforward_layernorm(self.mlp(residual)), residual


class Olmo2Model(DecoderModel):
    norm_class = Olmo2RMSNorm
    layer_class: type[nn.Module] = Olmo2DecoderLayer


class Olmo2ForCausalLM(DecoderForCausalLM):
    config_class = Olmo2Config
    model_class = Olmo2Model
