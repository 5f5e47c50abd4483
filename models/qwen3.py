"""Qwen3: grouped-query attention with normalized queries and keys, and a SwiGLU MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_module.layers import (
    Attention,
    AttentionMetadata,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_act_and_mul,
    layer_sliding_window,
)
from vllm_module.module import vLLMModule


class Qwen3Attention(vLLMModule):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer: int) -> None:
        super().__init__()
        heads, bias = config.num_attention_heads, config.attention_bias
        self.head_dim = rotary_emb.head_size
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.head_dim, heads, config.num_key_value_heads, bias=bias
        )
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.rotary_emb = rotary_emb
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.head_dim,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            sliding_window=layer_sliding_window(config, layer),
        )
        self.o_proj = RowParallelLinear(heads * self.head_dim, config.hidden_size, bias=bias)

    def forward(
        self, x: torch.Tensor, cos_sin: Any, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        qkv = self.qkv_proj(x).split(self.qkv_proj.output_sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv)
        q, k = self.rotary_emb(self.q_norm(q), self.k_norm(k), cos_sin)
        return self.o_proj(self.attn(q, k, v, metadata))


class Qwen3MLP(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [intermediate] * 2, bias=False, shard_names=["gate_proj", "up_proj"]
        )
        self.act_fn = get_act_and_mul(config.hidden_act)
        self.down_proj = RowParallelLinear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class Qwen3DecoderLayer(vLLMModule):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, rotary_emb, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cos_sin: Any,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, cos_sin, metadata)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Qwen3Model(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding.from_config(config)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, self.rotary_emb, layer)
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
        x = self.embed_tokens(input_ids)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual, cos_sin, metadata)
        x, _ = self.norm(x, residual)
        return x


class Qwen3ForCausalLM(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen3Model(config)
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
        return self.lm_head(hidden)
