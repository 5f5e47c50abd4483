"""DeepSeek-V2 (arXiv:2405.04434): experts, and attention that caches one latent for each token."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import Count, HFConfig, NumExperts, NumNamed, Positive, Size
from vllm_module.layers import (
    AttentionMetadata,
    ColumnParallelLinear,
    FusedMoE,
    MergedReplicatedLinear,
    MLAAttention,
    Positions,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    Router,
    RowParallelLinear,
    add_up_projections,
)
from vllm_module.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderModel
from vllm_module.models.llama import LlamaConfig, LlamaMLP


class DeepseekV2Config(LlamaConfig):
    attribute_map = {"head_dim": "qk_rope_head_dim"}  # the features that are rotated

    qk_rope_head_dim: Size
    qk_nope_head_dim: Size = 128
    v_head_dim: Size = 128
    kv_lora_rank: Size = 512
    q_lora_rank: Size | None = 1536
    moe_intermediate_size: Size = 1407
    first_k_dense_replace: Count = 0
    moe_layer_freq: Size = 1
    n_routed_experts: NumExperts = 64
    n_shared_experts: Count | None = 2
    num_experts_per_tok: Size | None = None
    n_group: Size | None = None
    topk_group: Size | None = None
    norm_topk_prob: bool = False
    routed_scaling_factor: Positive = 1.0
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "greedy"
    num_nextn_predict_layers: NumNamed = 0
    stored_kv_b_apart: bool = False  # as in GGUF files: k_b_proj and v_b_proj


class DeepseekV2Attention(vLLMModule):
    sole_readers = {  # without qkv_a_proj, two projections read hidden_states
        "hidden_states": "qkv_a_proj", "q_a_layernorm": "q_b_proj", "kv_a_layernorm": "attn",
        "rotary_emb": "attn",
    }  # fmt: skip

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        latent, q_latent, v = config.kv_lora_rank, config.q_lora_rank, config.v_head_dim
        self.q_sizes = nope, rope = [config.qk_nope_head_dim, config.qk_rope_head_dim]
        self.kv_sizes = [latent, rope]
        q_features = heads * sum(self.q_sizes)
        self.q_a_layernorm: RMSNorm | None = None
        if q_latent is None:
            self.q_proj = ColumnParallelLinear(hidden, q_features, bias=False)
            self.kv_a_proj_with_mqa = ReplicatedLinear(hidden, latent + rope, bias=bias)
        else:
            names, sizes = ["q_a_proj", "kv_a_proj_with_mqa"], [q_latent, latent + rope]
            self.qkv_a_proj = MergedReplicatedLinear(hidden, sizes, bias=bias, shard_names=names)
            self.q_a_layernorm = RMSNorm(q_latent)
            self.q_b_proj = ColumnParallelLinear(q_latent, q_features, bias=False)
        self.kv_a_layernorm = RMSNorm(latent)
        self.up = add_up_projections(self, latent, heads, nope, v, apart=config.stored_kv_b_apart)
        self.rotary_emb = rotary_emb
        self.attn = MLAAttention(self.up[0].num_heads, latent, nope, rope)
        self.attn.scale *= rotary_emb.score_scaling
        self.o_proj = RowParallelLinear(heads * v, hidden, bias=bias)

    def forward(
        self, positions: Positions, hidden_states: torch.Tensor, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        if self.q_a_layernorm is None:
            q, kv = self.q_proj(hidden_states), self.kv_a_proj_with_mqa(hidden_states)
        else:
            q, kv = self.qkv_a_proj(hidden_states).split(self.qkv_a_proj.output_sizes, dim=-1)
            q = self.q_b_proj(self.q_a_layernorm(q))
        q_nope, q_pe = q.unflatten(-1, (-1, sum(self.q_sizes))).split(self.q_sizes, dim=-1)
        kv_c, k_pe = kv.split(self.kv_sizes, dim=-1)
        q_pe, k_pe = self.rotary_emb(positions, q_pe, k_pe.unsqueeze(1))
        absorbed = (part for up in self.up for part in up.absorbed())
        kv_c = self.kv_a_layernorm(kv_c)
        return self.o_proj(self.attn(q_nope, q_pe, kv_c, k_pe, *absorbed, metadata))


class DeepseekV2MoE(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        experts, corrected = config.n_routed_experts, config.topk_method == "noaux_tc"
        self.gate = Router(
            hidden, experts, params_dtype=torch.float32, e_score_correction_bias=corrected
        )
        self.experts = FusedMoE(
            experts, config.num_experts_per_tok or 0, hidden, inner,
            renormalize=config.norm_topk_prob,
            use_grouped_topk=config.topk_method != "greedy",
            num_expert_group=config.n_group,
            topk_group=config.topk_group,
            scoring_func=config.scoring_func,
            e_score_correction_bias=self.gate.e_score_correction_bias,
            routed_scaling_factor=config.routed_scaling_factor,
            activation=config.hidden_act,
        )  # fmt: skip
        shared = inner * (config.n_shared_experts or 0)
        self.shared_experts = LlamaMLP(config, shared, reduce_results=False) if shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = None if self.shared_experts is None else self.shared_experts(x)
        return self.experts(x, self.gate(x), shared)


class DeepseekV2DecoderLayer(DecoderLayer):
    attention_class = DeepseekV2Attention
    mlp_class = LlamaMLP

    def new_mlp(self, config: Any, layer_idx: int) -> nn.Module:
        dense = layer_idx < config.first_k_dense_replace or layer_idx % config.moe_layer_freq != 0
        return self.mlp_class(config) if dense else DeepseekV2MoE(config)


class DeepseekV2Model(DecoderModel):
    layer_class = DeepseekV2DecoderLayer
    is_neox_style = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        first = config.num_hidden_layers
        self.skipped_weights = dict.fromkeys(
            (f"layers.{first + index}" for index in range(config.num_nextn_predict_layers)),
            "layers that predict further tokens are for speculative decoding",
        )


class DeepseekV2ForCausalLM(DecoderForCausalLM):
    config_class: type[HFConfig] = DeepseekV2Config
    model_class = DeepseekV2Model
