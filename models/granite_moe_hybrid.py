"""Granite 4: Granite with Mamba-2 in most layers, and a dense MLP beside experts, if it has any."""

from __future__ import annotations

from typing import Any, Literal

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import Count, NumExperts, Size
from vllm_module.layers import (
    AttentionMetadata,
    FusedMoE,
    MergedColumnParallelLinear,
    Positions,
    RMSNorm,
    RotaryEmbedding,
    Router,
    RowParallelLinear,
    get_act_and_mul,
    layer_kind,
)
from vllm_module.models.granite import (
    GraniteAttention,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteModel,
)
from vllm_module.models.mamba2_hybrid import HybridMamba2Mixer, Mamba2HybridConfig


class GraniteMoeHybridConfig(Mamba2HybridConfig, GraniteConfig):
    shared_intermediate_size: Size = 1024
    num_local_experts: NumExperts | Literal[0] = 8
    num_experts_per_tok: Count = 2
    position_embedding_type: str | None = None


class GraniteMoeHybridAttention(GraniteAttention):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        self.rotates = config.position_embedding_type == "rope"


class GraniteMoeHybridMLP(vLLMModule):
    sole_readers = {"x": "input_linear", "act_fn": "output_linear"}

    def __init__(self, config: Any, reduce_results: bool) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.shared_intermediate_size
        self.input_linear = MergedColumnParallelLinear(
            hidden, [inner] * 2, bias=False, shard_names=None
        )
        self.act_fn = get_act_and_mul(config.hidden_act)
        self.output_linear = RowParallelLinear(
            inner, hidden, bias=False, reduce_results=reduce_results
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_linear(self.act_fn(self.input_linear(x)))


class GraniteMoeHybridMoE(vLLMModule):
    weight_aliases = {
        "router.layer": "router", "input_linear": "experts.w13", "output_linear": "experts.w2",
    }  # fmt: skip

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router = Router(config.hidden_size, config.num_local_experts)
        self.experts = FusedMoE(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            shard_names=None,
        )

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.router(x), shared)


class GraniteMoeHybridDecoderLayer(vLLMModule):
    sole_readers = {"input_layernorm": ("mamba", "self_attn")}

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.residual_multiplier = config.residual_multiplier
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn: GraniteMoeHybridAttention | None = None
        types = config.layer_types  # without them, no layer attends
        if types is not None and layer_kind(config, layer_idx) == "full_attention":
            self.self_attn = GraniteMoeHybridAttention(config, rotary_emb, layer_idx)
        else:
            self.mamba = HybridMamba2Mixer(config)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.block_sparse_moe: GraniteMoeHybridMoE | None = None
        if config.num_local_experts:
            self.block_sparse_moe = GraniteMoeHybridMoE(config)
        self.shared_mlp = GraniteMoeHybridMLP(config, reduce_results=not config.num_local_experts)

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        if self.self_attn is None:
            hidden_states = self.mamba(hidden_states, metadata)
        else:
            hidden_states = self.self_attn(positions, hidden_states, metadata)
        hidden_states = hidden_states * self.residual_multiplier
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        output = self.shared_mlp(hidden_states)
        if self.block_sparse_moe is not None:
            output = self.block_sparse_moe(hidden_states, output)
        return output * self.residual_multiplier, residual


class GraniteMoeHybridModel(GraniteModel):
    layer_class = GraniteMoeHybridDecoderLayer


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    config_class = GraniteMoeHybridConfig
    model_class = GraniteMoeHybridModel
