"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, one of which every token goes to, by a gate."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import Count, NumExperts, Size
from vllm_module.layers import FusedMoE, Router, layer_sliding_window
from vllm_module.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderModel
from vllm_module.models.llama import LlamaMLP
from vllm_module.models.qwen2 import Qwen2Attention, Qwen2Config


class Qwen2MoeConfig(Qwen2Config):
    moe_intermediate_size: Size = 1408
    shared_expert_intermediate_size: Size = 5632
    num_experts: NumExperts = 60
    num_experts_per_tok: Size = 4
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[Count] | None = None
    qkv_bias: bool = True
    sliding_window: Count | None = 4096  # transformers writes 0 if it is not used


class Qwen2MoeAttention(Qwen2Attention):
    @staticmethod
    def qkv_bias(config: Any) -> bool:
        return config.qkv_bias

    @staticmethod
    def sliding_window(config: Any, layer_idx: int) -> int | None:
        if config.layer_types is None and config.use_sliding_window:
            used = layer_idx % 2 == 0 and layer_idx < config.max_window_layers
            return config.sliding_window if used else None
        return layer_sliding_window(config, layer_idx)


class SparseMoeBlock(vLLMModule):
    layout: Mapping[str, Any] = MappingProxyType({})  # how the experts are stored, for FusedMoE

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = Router(config.hidden_size, config.num_experts)
        self.experts = FusedMoE(
            config.num_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            activation=config.hidden_act,
            **self.layout,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x))


class Qwen2MoeSparseMoeBlock(SparseMoeBlock):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        shared = config.shared_expert_intermediate_size
        self.shared_expert = LlamaMLP(config, shared, reduce_results=False)
        self.shared_expert_gate = Router(config.hidden_size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return self.experts(x, self.gate(x), shared)


class Qwen2MoeDecoderLayer(DecoderLayer):
    attention_class: type[nn.Module] = Qwen2MoeAttention
    mlp_class = LlamaMLP
    moe_class: type[nn.Module] = Qwen2MoeSparseMoeBlock

    def new_mlp(self, config: Any, layer_idx: int) -> nn.Module:
        sparse = (layer_idx + 1) % config.decoder_sparse_step == 0
        if layer_idx in (config.mlp_only_layers or ()) or not sparse:
            return self.mlp_class(config)
        return self.moe_class(config)


class Qwen2MoeModel(DecoderModel):
    layer_class = Qwen2MoeDecoderLayer


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    config_class = Qwen2MoeConfig
    model_class = Qwen2MoeModel
