"""Granite 3: Llama with multipliers on the embedding, the residuals, the scores and the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_module.layers import (
    AttentionMetadata,
    ParallelLMHead,
    RMSNorm,
    RotaryEmbedding,
    VocabParallelEmbedding,
)
from vllm_module.models.llama import LlamaAttention, LlamaMLP
from vllm_module.module import vLLMModule


class GraniteDecoderLayer(vLLMModule):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer: int) -> None:
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, rotary_emb, layer)
        self.self_attn.attn.scale = config.attention_multiplier
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, x: torch.Tensor, cos_sin: Any, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos_sin, metadata)
        x = x + attended * self.residual_multiplier
        return x + self.mlp(self.post_attention_layernorm(x)) * self.residual_multiplier


class GraniteModel(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embedding_multiplier = config.embedding_multiplier
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding.from_config(config)
        self.layers = nn.ModuleList(
            GraniteDecoderLayer(config, self.rotary_emb, layer)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        cos_sin = self.rotary_emb.cos_sin(positions, metadata)
        x = self.embed_tokens(input_ids) * self.embedding_multiplier
        for layer in self.layers:
            x = layer(x, cos_sin, metadata)
        return self.norm(x)


class GraniteForCausalLM(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = GraniteModel(config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.tie_weights(self.model.embed_tokens)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        return self.model(input_ids, positions, metadata)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden) / self.config.logits_scaling
