"""Cohere's Command R: attention and MLP in parallel after one norm, and interleaved rotation."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import HFConfig, Positive, Size
from vllm_module.layers import (
    AttentionMetadata,
    LayerNorm,
    PerHeadLayerNorm,
    Positions,
    RotaryEmbedding,
    layer_sliding_window,
)
from vllm_module.models.decoder import DecoderForCausalLM, DecoderModel
from vllm_module.models.llama import LlamaAttention, LlamaConfig, LlamaMLP


class CohereConfig(LlamaConfig):
    attribute_map = {"rms_norm_eps": "layer_norm_eps"}

    rms_norm_eps: Positive = 1e-5
    logit_scale: Positive = 0.0625
    use_qk_norm: bool = False
    rope_theta: Positive = 500000.0
    max_position_embeddings: Size = 8192
    model_max_length: Size | None = None
    tie_word_embeddings: bool = True

    @property
    def context_length(self) -> int | None:
        """Command R's files have 131,072 tokens there, and 8,192 as max_position_embeddings."""
        return self.model_max_length or super().context_length


class CohereLayerNorm(LayerNorm):
    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps, bias=False)


class CohereAttention(LlamaAttention):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        if config.use_qk_norm:
            q, k, _ = self.qkv_proj.output.slots
            self.q_norm = PerHeadLayerNorm(q, self.head_dim, config.rms_norm_eps)
            self.k_norm = PerHeadLayerNorm(k, self.head_dim, config.rms_norm_eps)


class CohereDecoderLayer(vLLMModule):
    attention_class: type[LlamaAttention] = CohereAttention

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = CohereLayerNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self.attention_class(config, rotary_emb, layer_idx)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(hidden_states, residual)
        return self.self_attn(positions, x, metadata) + self.mlp(x), residual


class CohereModel(DecoderModel):
    norm_class = CohereLayerNorm
    is_neox_style = False
    layer_class: type[CohereDecoderLayer] = CohereDecoderLayer


class CohereForCausalLM(DecoderForCausalLM):
    config_class: type[HFConfig] = CohereConfig
    model_class: type[CohereModel] = CohereModel

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) * self.config.logit_scale


class Cohere2Config(CohereConfig):
    rope_theta: Positive = 10000.0
    sliding_window: Size | None = 4096
    sliding_window_pattern: Size = 4


class Cohere2Attention(CohereAttention):
    sliding_window = staticmethod(layer_sliding_window)

    def forward(
        self, positions: Positions, hidden_states: torch.Tensor, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        if self.attn.sliding_window is not None:
            return super().forward(positions, hidden_states, metadata)
        # A layer that attends to all tokens has no positions.
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.qkv_proj.heads, dim=-2)
        return self.o_proj(self.attn(q, k, v, metadata))


class Cohere2DecoderLayer(CohereDecoderLayer):
    attention_class = Cohere2Attention


class Cohere2Model(CohereModel):
    layer_class = Cohere2DecoderLayer


class Cohere2ForCausalLM(CohereForCausalLM):
    config_class = Cohere2Config
    model_class = Cohere2Model
