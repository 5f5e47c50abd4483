"""Gemma 2: norms before and after each block, soft caps, and a window in every other layer."""

from __future__ import annotations

from typing import Any, Literal

import torch

from vllm_module.hf_config import HFConfig, Positive, Size
from vllm_module.layers import (
    AttentionMetadata,
    Positions,
    RMSNorm,
    RotaryEmbedding,
    layer_sliding_window,
)
from vllm_module.models.llama import (
    LlamaAttention,
    LlamaConfig,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
)


class Gemma2Config(LlamaConfig):
    attribute_map = {"hidden_act": "hidden_activation"}

    head_dim: Size = 256
    hidden_act: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: Positive = 256.0
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0
    sliding_window: Size | None = 4096
    sliding_window_pattern: Size = 2
    use_bidirectional_attention: Literal[False] | None = None
    max_position_embeddings: Size = 8192
    tie_word_embeddings: bool = True


class Gemma2RMSNorm(RMSNorm):
    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps, weight_offset=1.0)


class Gemma2Attention(LlamaAttention):
    sliding_window = staticmethod(layer_sliding_window)

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        self.attn.scale = config.query_pre_attn_scalar**-0.5
        self.attn.softcap = config.attn_logit_softcapping


class Gemma2DecoderLayer(LlamaDecoderLayer):
    norm_class = Gemma2RMSNorm
    attention_class = Gemma2Attention
    sole_readers = {"input_layernorm": "self_attn", "pre_feedforward_layernorm": "mlp"}

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.pre_feedforward_layernorm = self.norm_class(hidden, eps)
        self.post_feedforward_layernorm = self.norm_class(hidden, eps)

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states, metadata)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states, residual = self.pre_feedforward_layernorm(hidden_states, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden_states)), residual


class Gemma2Model(LlamaModel):
    norm_class = Gemma2RMSNorm
    layer_class = Gemma2DecoderLayer

    def __init__(self, config: Gemma2Config) -> None:
        super().__init__(config)
        # Rounded to the embeddings' dtype, as in training. Numbers: a CUDA graph captures no tensor
        # of the host.
        factor = torch.tensor(config.hidden_size**0.5, dtype=torch.float64, device="cpu")
        self.embedding_factors: dict[torch.dtype, float] = {
            dtype: factor.to(dtype).item()
            for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        }

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = super().embed_input_ids(input_ids)
        return x * self.embedding_factors[x.dtype]


class Gemma2ForCausalLM(LlamaForCausalLM):
    config_class: type[HFConfig] = Gemma2Config
    model_class = Gemma2Model

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap
