"""LFM2-MoE: LFM2 with experts in all layers but the first."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import Count, NumExperts, Positive, Size
from vllm_module.layers import FusedMoE, Router
from vllm_module.models.lfm2 import (
    Lfm2Config,
    Lfm2DecoderLayer,
    Lfm2ForCausalLM,
    Lfm2MLP,
    Lfm2Model,
)


class Lfm2MoeConfig(Lfm2Config):
    attribute_map: ClassVar = {
        name: stored
        for name, stored in Lfm2Config.attribute_map.items()
        if name != "intermediate_size"
    }

    intermediate_size: Size = 7168
    block_auto_adjust_ff_dim: Literal[False] = False
    num_dense_layers: Count = 2
    num_experts: NumExperts = 32
    num_experts_per_tok: Size = 4
    moe_intermediate_size: Size = 1792
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0
    use_expert_bias: bool = True


class Lfm2MoeSparseMoeBlock(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.use_expert_bias:
            self.weight_aliases = {"expert_bias": "gate.e_score_correction_bias"}
        hidden, experts = config.hidden_size, config.num_experts
        self.gate = Router(hidden, experts, e_score_correction_bias=config.use_expert_bias)
        self.experts = FusedMoE(
            experts,
            config.num_experts_per_tok,
            hidden,
            config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            scoring_func="sigmoid",
            e_score_correction_bias=self.gate.e_score_correction_bias,
            routed_scaling_factor=config.routed_scaling_factor,
            shard_names=("w1", "w3", "w2"),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x))


class Lfm2MoeDecoderLayer(Lfm2DecoderLayer):
    def new_feed_forward(self, config: Any, layer_idx: int) -> nn.Module:
        if layer_idx < config.num_dense_layers:
            return Lfm2MLP(config)
        return Lfm2MoeSparseMoeBlock(config)


class Lfm2MoeModel(Lfm2Model):
    layer_class = Lfm2MoeDecoderLayer


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    config_class = Lfm2MoeConfig
    model_class = Lfm2MoeModel
