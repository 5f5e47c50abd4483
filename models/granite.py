"""Granite 3: Llama with multipliers on the embedding, the residuals, the scores and the logits."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.hf_config import Positive
from vllm_module.layers import AttentionMetadata, RotaryEmbedding, rows_for
from vllm_module.layers.rotary import CosSin
from vllm_module.models.llama import (
    LlamaAttention,
    LlamaConfig,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
)


class GraniteConfig(LlamaConfig):
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0


class GraniteAttention(LlamaAttention):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        self.attn.scale = config.attention_multiplier


class GraniteDecoderLayer(LlamaDecoderLayer):
    attention_class = GraniteAttention

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        self.residual_multiplier = config.residual_multiplier

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cos_sin: CosSin,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = rows_for(self.self_attn, self.input_layernorm, x, residual)
        x = self.self_attn(x, cos_sin, metadata) * self.residual_multiplier
        x, residual = rows_for(self.mlp, self.post_attention_layernorm, x, residual)
        return self.mlp(x) * self.residual_multiplier, residual


class GraniteModel(LlamaModel):
    layer_class = GraniteDecoderLayer

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed_input_ids(input_ids) * self.config.embedding_multiplier


class GraniteForCausalLM(LlamaForCausalLM):
    config_class = GraniteConfig
    model_class = GraniteModel

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) / self.config.logits_scaling
