"""Llama 2, 3 and 3.1, and Mistral, which adds a sliding window."""

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
)
from vllm_module.module import vLLMModule


class LlamaAttention(vLLMModule):
    @staticmethod
    def qkv_bias(config: Any) -> bool:
        return getattr(config, "attention_bias", False)

    @staticmethod
    def sliding_window(config: Any, layer: int) -> int | None:
        return None

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer: int) -> None:
        super().__init__()
        heads = config.num_attention_heads
        self.head_dim = rotary_emb.head_size
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.head_dim, heads, kv_heads, bias=self.qkv_bias(config)
        )
        bias = getattr(config, "attention_bias", False)
        self.o_proj = RowParallelLinear(heads * self.head_dim, config.hidden_size, bias=bias)
        self.rotary_emb = rotary_emb
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.head_dim,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            sliding_window=self.sliding_window(config, layer),
        )

    def forward(
        self, x: torch.Tensor, cos_sin: Any, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        qkv = self.qkv_proj(x).split(self.qkv_proj.output_sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv)
        q, k = self.rotary_emb(q, k, cos_sin)
        return self.o_proj(self.attn(q, k, v, metadata))


class LlamaMLP(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [intermediate] * 2, bias=bias, shard_names=["gate_proj", "up_proj"]
        )
        self.act_fn = get_act_and_mul(config.hidden_act)
        self.down_proj = RowParallelLinear(intermediate, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class LlamaDecoderLayer(vLLMModule):
    def __init__(
        self, config: Any, rotary_emb: RotaryEmbedding, layer: int, attention: type[LlamaAttention]
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention(config, rotary_emb, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

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


class LlamaModel(vLLMModule):
    def __init__(self, config: Any, attention: type[LlamaAttention] = LlamaAttention) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding.from_config(config)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, self.rotary_emb, layer, attention)
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


class LlamaForCausalLM(vLLMModule):
    attention: type[LlamaAttention] = LlamaAttention

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, self.attention)
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


class MistralAttention(LlamaAttention):
    @staticmethod
    def sliding_window(config: Any, layer: int) -> int | None:
        return getattr(config, "sliding_window", 4096)


class MistralForCausalLM(LlamaForCausalLM):
    attention = MistralAttention
