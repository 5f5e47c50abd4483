"""LFM3: LFM2 with windows, a gate for each head of attention, and a norm behind each block, too."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import nn

from vllm_module.hf_config import ConvKernel, Size
from vllm_module.layers import (
    AttentionMetadata,
    ColumnParallelLinear,
    Positions,
    RMSNorm,
    RotaryEmbedding,
)
from vllm_module.models.lfm2 import Lfm2Config, Lfm2DecoderLayer, Lfm2ForCausalLM, Lfm2Model
from vllm_module.models.qwen3 import Qwen3Attention

_KINDS = "sliding_attention", "conv", "full_attention", "conv"  # of four layers; the first is conv
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5
    },
}  # fmt: skip


class Lfm3Config(Lfm2Config):
    attribute_map: ClassVar = {"rms_norm_eps": "norm_eps", "conv_kernel": "conv_L_cache"}
    kinds: ClassVar = "conv", "full_attention", "sliding_attention"

    head_dim: Size = 128
    intermediate_size: Size = 7680
    block_auto_adjust_ff_dim: Literal[False] = False
    conv_kernel: ConvKernel = 7
    sliding_window: Size | None = 256
    use_sliding_window: Literal[True] | None = None  # transformers' class does not read it
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True

    @model_validator(mode="before")
    @classmethod
    def _fill_kinds(cls, entries: Any) -> Any:
        """Give a file what transformers' class has by default, and conv layers unused rotations."""
        if not isinstance(entries, dict):
            return entries
        entries, layers = dict(entries), entries.get("num_hidden_layers")
        if entries.get("layer_types") is None and type(layers) is int:
            entries["layer_types"] = [_KINDS[i % 4] if i else "conv" for i in range(layers)]
        rope = entries.get("rope_parameters")
        rope = _ROPE if rope is None else rope
        if isinstance(rope, dict):
            by_kind = [rope[kind] for kind in cls.kinds if kind in rope]
            rope = {"conv": by_kind[0], **rope} if by_kind else rope
        return {**entries, "rope_parameters": rope}


class Lfm3Attention(Qwen3Attention):
    sole_readers = {"q_norm": "rotary_emb", "k_norm": "rotary_emb", "rotary_emb": "attn"}
    weight_aliases = {"gate_proj": "g_proj"}

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        self.g_proj = ColumnParallelLinear(
            config.hidden_size, config.num_attention_heads, bias=False
        )

    def forward(
        self, positions: Positions, hidden_states: torch.Tensor, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.qkv_proj.heads, dim=-2)
        q, k = self.rotary_emb(positions, self.q_norm(q), self.k_norm(k))
        o = self.attn(q, k, v, metadata).unflatten(-1, (-1, self.head_dim))
        gate = torch.sigmoid(self.g_proj(hidden_states)).unsqueeze(-1)
        return self.o_proj((o * gate).flatten(-2))


class Lfm3DecoderLayer(Lfm2DecoderLayer):
    sole_readers = {"operator_norm": "conv", "ffn_norm": "feed_forward"}

    @staticmethod
    def attention_class(config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> nn.Module:
        chosen = Lfm3Attention if config.use_attention_gate else Qwen3Attention
        return chosen(config, rotary_emb, layer_idx)

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        self.post_operator_norm: nn.Module = nn.Identity()
        self.post_ffn_norm: nn.Module = nn.Identity()
        if config.use_sandwich_norm:
            self.post_operator_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.post_ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, residual = self.operator_norm(hidden_states, residual)
        if self.self_attn is None:
            hidden_states = self.conv(hidden_states, metadata)
        else:
            hidden_states = self.self_attn(positions, hidden_states, metadata)
        hidden_states, residual = self.ffn_norm(self.post_operator_norm(hidden_states), residual)
        return self.post_ffn_norm(self.feed_forward(hidden_states)), residual


class Lfm3Model(Lfm2Model):
    layer_class = Lfm3DecoderLayer


class Lfm3ForCausalLM(Lfm2ForCausalLM):
    config_class = Lfm3Config
    model_class = Lfm3Model
