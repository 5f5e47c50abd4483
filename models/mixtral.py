"""Mixtral (arXiv:2401.04088): Mistral with experts instead of an MLP."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import NumExperts, Positive, Size
from vllm_module.layers import FusedMoE, Router
from vllm_module.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderModel
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


class MixtralDecoderLayer(DecoderLayer):
    attention_class = MistralAttention
    mlp_class = MixtralSparseMoeBlock
    mlp_name = "block_sparse_moe"
    sole_readers = {"input_layernorm": "self_attn"}
    weight_aliases = {"mlp": "block_sparse_moe"}  # where transformers 5 saves packed experts


class MixtralModel(DecoderModel):
    layer_class = MixtralDecoderLayer


class MixtralForCausalLM(DecoderForCausalLM):
    config_class = MixtralConfig
    model_class = MixtralModel
