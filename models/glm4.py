"""GLM-4: interleaved rotation of half of each head; the later one has norms after each block."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.hf_config import Positive, Size
from vllm_module.layers import AttentionMetadata, Positions, RotaryEmbedding
from vllm_module.models.llama import (
    LlamaAttention,
    LlamaConfig,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
)


class GlmConfig(LlamaConfig):
    head_dim: Size = 128
    rms_norm_eps: Positive = 1.5625e-07
    attention_bias: bool = True
    partial_rotary_factor: Positive = 0.5
    max_position_embeddings: Size = 131072


class GlmAttention(LlamaAttention):
    @staticmethod
    def output_bias(config: Any) -> bool:
        return False


class GlmMLP(LlamaMLP):
    gate_up_names = None


class GlmDecoderLayer(LlamaDecoderLayer):
    attention_class = GlmAttention
    mlp_class = GlmMLP


class GlmModel(LlamaModel):
    is_neox_style = False
    layer_class: type[GlmDecoderLayer] = GlmDecoderLayer


class GlmForCausalLM(LlamaForCausalLM):
    config_class = GlmConfig
    model_class: type[GlmModel] = GlmModel


class Glm4DecoderLayer(GlmDecoderLayer):
    sole_readers = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.post_self_attn_layernorm = self.norm_class(hidden, eps)
        self.post_mlp_layernorm = self.norm_class(hidden, eps)

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states, metadata)
        hidden_states = self.post_self_attn_layernorm(hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.post_mlp_layernorm(self.mlp(hidden_states)), residual


class Glm4Model(GlmModel):
    layer_class = Glm4DecoderLayer


class Glm4ForCausalLM(GlmForCausalLM):
    model_class = Glm4Model
