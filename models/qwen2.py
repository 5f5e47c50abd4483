"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optional sliding windows."""

from __future__ import annotations

from typing import Any

from vllm_module.layers import QKVParallelLinear, RotaryEmbedding
from vllm_module.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen2Attention(LlamaAttention):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer: int) -> None:
        super().__init__(config, rotary_emb, layer)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=True,
        )


class Qwen2ForCausalLM(LlamaForCausalLM):
    attention = Qwen2Attention
