"""Mixtral (arXiv:2401.04088): Mistral with experts instead of an MLP."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import NumExperts, Positive, Size
from vllm_module.layers import (
    AttentionMetadata,
    FusedMoE,
    Positions,
    RMSNorm,
    RotaryEmbedding,
    Router,
)
from vllm_module.models.decoder import DecoderForCausalLM, DecoderModel
from vllm_module.models.llama import MistralAttention, MistralConfig


class MixtralConfig(MistralConfig):
    num_local_experts: NumExperts = 8
    num_experts_per_tok: Size = 2
    sliding_window: Size | None = None
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 1e6


class MixtralSparseMoeBlock(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = Router(config.hidden_size, config.num_local_experts)
        self.experts = FusedMoE(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            shard_names=("w1", "w3", "w2"),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x))


class MixtralDecoderLayer(vLLMModule):
    sole_readers = {"input_layernorm": "self_attn"}
    weight_aliases = {"mlp": "block_sparse_moe"}  # where transformers 5 saves packed experts

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MistralAttention(config, rotary_emb, layer_idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = MixtralSparseMoeBlock(config)

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states, metadata)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.block_sparse_moe(hidden_states), residual


class MixtralModel(DecoderModel):
    layer_class = MixtralDecoderLayer


class MixtralForCausalLM(DecoderForCausalLM):
    config_class = MixtralConfig
    model_class = MixtralModel
