"""Granite 3: Llama with multipliers on the embedding, the residuals, the scores and the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_module.hf_config import Positive
from vllm_module.layers import AttentionMetadata, Positions, RotaryEmbedding
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
    sole_readers = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        self.residual_multiplier = config.residual_multiplier

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states, metadata)
        hidden_states = hidden_states * self.residual_multiplier
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states) * self.residual_multiplier, residual


class GraniteModel(LlamaModel):
    layer_class: type[nn.Module] = GraniteDecoderLayer

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed_input_ids(input_ids) * self.config.embedding_multiplier


class GraniteForCausalLM(LlamaForCausalLM):
    config_class: type[LlamaConfig] = GraniteConfig
    model_class = GraniteModel

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) / self.config.logits_scaling
