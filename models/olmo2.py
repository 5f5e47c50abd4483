"""OLMo 2: norms after each block instead of before, and of all queries and keys together."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import Positive
from vllm_module.layers import AttentionMetadata, RMSNorm, RotaryEmbedding, ShardedRMSNorm
from vllm_module.layers.rotary import CosSin
from vllm_module.models.decoder import DecoderForCausalLM, DecoderModel
from vllm_module.models.llama import LlamaAttention, LlamaConfig, LlamaMLP


class Olmo2Config(LlamaConfig):
    rms_norm_eps: Positive = 1e-5


class Olmo2Attention(LlamaAttention):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        q, k, _ = self.qkv_proj.output.slots
        self.q_norm = ShardedRMSNorm(q, config.rms_norm_eps)
        self.k_norm = ShardedRMSNorm(k, config.rms_norm_eps)

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed_q, normed_k = self.q_norm(q.flatten(-2)), self.k_norm(k.flatten(-2))
        return super().rotate(normed_q.view(q.shape), normed_k.view(k.shape), cos_sin)


class Olmo2DecoderLayer(vLLMModule):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Olmo2Attention(config, rotary_emb, layer_idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cos_sin: CosSin,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + residual
        x = x + self.post_attention_layernorm(self.self_attn(x, cos_sin, metadata))
        return self.post_feedforward_layernorm(self.mlp(x)), x


class Olmo2Model(DecoderModel):
    layer_class = Olmo2DecoderLayer


class Olmo2ForCausalLM(DecoderForCausalLM):
    config_class = Olmo2Config
    model_class = Olmo2Model
