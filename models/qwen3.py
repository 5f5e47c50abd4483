"""Qwen3: grouped-query attention with normalized queries and keys, and a SwiGLU MLP."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import Size
from vllm_module.layers import (
    Attention,
    AttentionMetadata,
    Positions,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    layer_sliding_window,
)
from vllm_module.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderModel
from vllm_module.models.llama import LlamaMLP
from vllm_module.models.qwen2 import Qwen2Config


class Qwen3Config(Qwen2Config):
    head_dim: Size = 128


class Qwen3Attention(vLLMModule):
    sole_readers = {
        "hidden_states": "qkv_proj", "q_norm": "rotary_emb", "k_norm": "rotary_emb",
        "rotary_emb": "attn",
    }  # fmt: skip

    sliding_window = staticmethod(layer_sliding_window)

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
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
            sliding_window=self.sliding_window(config, layer_idx),
        )
        self.o_proj = RowParallelLinear(heads * self.head_dim, config.hidden_size, bias=bias)

    def forward(
        self, positions: Positions, hidden_states: torch.Tensor, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.qkv_proj.heads, dim=-2)
        q, k = self.rotary_emb(positions, self.q_norm(q), self.k_norm(k))
        return self.o_proj(self.attn(q, k, v, metadata))


class Qwen3DecoderLayer(DecoderLayer):
    attention_class = Qwen3Attention
    mlp_class = LlamaMLP


class Qwen3Model(DecoderModel):
    layer_class = Qwen3DecoderLayer


class Qwen3ForCausalLM(DecoderForCausalLM):
    config_class: type[Qwen2Config] = Qwen3Config
    model_class = Qwen3Model
