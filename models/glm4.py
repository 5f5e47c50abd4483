"""GLM-4: interleaved rotation of half of each head; the later one has norms after each block."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.hf_config import Positive, Size
from vllm_module.layers import AttentionMetadata, RotaryEmbedding, rows_for
from vllm_module.layers.rotary import CosSin
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
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.post_self_attn_layernorm = self.norm_class(hidden, eps)
        self.post_mlp_layernorm = self.norm_class(hidden, eps)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cos_sin: CosSin,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = rows_for(self.self_attn, self.input_layernorm, x, residual)
        x = self.post_self_attn_layernorm(self.self_attn(x, cos_sin, metadata))
        x, residual = rows_for(self.mlp, self.post_attention_layernorm, x, residual)
        return self.post_mlp_layernorm(self.mlp(x)), residual


class Glm4Model(GlmModel):
    layer_class = Glm4DecoderLayer


class Glm4ForCausalLM(GlmForCausalLM):
    model_class = Glm4Model
