"""Gemma 3, text only: Gemma 2 with normalized queries and keys, and without soft caps."""

from __future__ import annotations

from typing import Any

from vllm_module.hf_config import HFConfig, Positive, Size
from vllm_module.layers import RotaryEmbedding
from vllm_module.models.gemma2 import (
    Gemma2Attention,
    Gemma2Config,
    Gemma2DecoderLayer,
    Gemma2ForCausalLM,
    Gemma2Model,
    Gemma2RMSNorm,
)
from vllm_module.models.language_model_only import LanguageModelOnly, LanguageModelOnlyConfig


class Gemma3Config(Gemma2Config):
    attn_logit_softcapping: None = None
    final_logit_softcapping: Positive | None = None
    rope_theta: Positive = 1000000.0
    rope_local_base_freq: Positive = 10000.0
    sliding_window_pattern: Size = 6
    max_position_embeddings: Size = 131072


class Gemma3Attention(Gemma2Attention):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        self.q_norm = Gemma2RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Gemma2RMSNorm(self.head_dim, config.rms_norm_eps)


class Gemma3DecoderLayer(Gemma2DecoderLayer):
    attention_class = Gemma3Attention


class Gemma3Model(Gemma2Model):
    layer_class = Gemma3DecoderLayer


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    config_class: type[HFConfig] = Gemma3Config
    model_class = Gemma3Model


class Gemma3LanguageModelOnlyConfig(Gemma3Config, LanguageModelOnlyConfig):
    # Published files leave out what transformers' class has by default.
    vocab_size: Size = 262208
    num_attention_heads: Size = 8
    num_key_value_heads: Size = 4
    final_logit_softcapping: None = None  # transformers computes without it


class Gemma3ForConditionalGeneration(LanguageModelOnly, Gemma3ForCausalLM):
    config_class = Gemma3LanguageModelOnlyConfig
