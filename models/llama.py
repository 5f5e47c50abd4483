"""Llama 2, 3 and 3.1, and Mistral, which adds a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import HFConfig, Positive, Size
from vllm_module.layers import (
    Attention,
    AttentionMetadata,
    MergedColumnParallelLinear,
    Positions,
    QKVParallelLinear,
    RotaryEmbedding,
    RowParallelLinear,
    get_act_and_mul,
)
from vllm_module.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderModel


class LlamaConfig(HFConfig):
    intermediate_size: Size
    hidden_act: str = "silu"
    rms_norm_eps: Positive = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: Size = 2048


class LlamaAttention(vLLMModule):
    sole_readers = {
        "hidden_states": "qkv_proj", "q_norm": "rotary_emb", "k_norm": "rotary_emb",
        "rotary_emb": "attn",
    }  # fmt: skip
    qkv_names: Sequence[str] | None = ("q_proj", "k_proj", "v_proj")  # None: stored as one tensor
    rotates = True

    @staticmethod
    def qkv_bias(config: Any) -> bool:
        return config.attention_bias

    @staticmethod
    def output_bias(config: Any) -> bool:
        return config.attention_bias

    @staticmethod
    def sliding_window(config: Any, layer_idx: int, /) -> int | None:
        return None

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = rotary_emb.head_size
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.head_dim, heads, kv_heads, self.qkv_bias(config),
            shard_names=self.qkv_names, stored_rotary_pairs=config.stored_rotary_pairs,
        )  # fmt: skip
        self.q_norm: Any = None  # of each head of q; a subclass sets both norms
        self.k_norm: Any = None
        self.sinks: nn.Parameter | None = None  # as of Attention
        self.rotary_emb = rotary_emb
        self.attn = Attention(
            self.qkv_proj.num_heads, self.head_dim, num_kv_heads=self.qkv_proj.num_kv_heads,
            sliding_window=self.sliding_window(config, layer_idx),
        )  # fmt: skip
        bias = self.output_bias(config)
        self.o_proj = RowParallelLinear(heads * self.head_dim, config.hidden_size, bias)

    def forward(
        self, positions: Positions, hidden_states: torch.Tensor, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.qkv_proj.heads, dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v, metadata, self.sinks))


class LlamaMLP(vLLMModule):
    sole_readers = {"x": "gate_up_proj", "act_fn": "down_proj"}
    gate_up_names: Sequence[str] | None = ("gate_proj", "up_proj")  # None: stored as one tensor

    def __init__(
        self, config: Any, intermediate_size: int | None = None, reduce_results: bool = True
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, intermediate_size or config.intermediate_size
        bias = config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner] * 2, bias=bias, shard_names=self.gate_up_names
        )
        self.act_fn = get_act_and_mul(config.hidden_act)
        self.down_proj = RowParallelLinear(inner, hidden, bias, reduce_results=reduce_results)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class LlamaDecoderLayer(DecoderLayer):
    attention_class = LlamaAttention
    mlp_class = LlamaMLP


class LlamaModel(DecoderModel):
    layer_class: type[nn.Module] = LlamaDecoderLayer


class LlamaForCausalLM(DecoderForCausalLM):
    config_class: type[HFConfig] = LlamaConfig
    model_class = LlamaModel


class MistralConfig(LlamaConfig):
    sliding_window: Size | None = 4096
    max_position_embeddings: Size = 131072


class MistralAttention(LlamaAttention):
    @staticmethod
    def sliding_window(config: Any, layer_idx: int) -> int | None:
        return config.sliding_window


class MistralDecoderLayer(LlamaDecoderLayer):
    attention_class = MistralAttention


class MistralModel(LlamaModel):
    layer_class = MistralDecoderLayer


class MistralForCausalLM(LlamaForCausalLM):
    config_class = MistralConfig
    model_class = MistralModel
