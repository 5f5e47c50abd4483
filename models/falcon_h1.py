"""Falcon-H1: Mamba-2 and attention side by side in every layer, with multipliers (muP)."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import Finite, Positive, Size
from vllm_module.layers import AttentionMetadata, Positions, RMSNorm, RotaryEmbedding
from vllm_module.models.decoder import DecoderForCausalLM, DecoderModel
from vllm_module.models.llama import LlamaAttention, LlamaMLP
from vllm_module.models.mamba2_hybrid import HybridMamba2Mixer, Mamba2HybridConfig


class FalconH1Config(Mamba2HybridConfig):
    rms_norm_eps: Positive = 1e-5
    max_position_embeddings: Size = 8192
    mamba_d_ssm: Size | None = 1024
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    embedding_multiplier: Finite = 1.0
    lm_head_multiplier: Finite = 1.0
    key_multiplier: Finite = 1.0
    attention_in_multiplier: Finite = 1.0
    attention_out_multiplier: Finite = 1.0
    ssm_in_multiplier: Finite = 1.0
    ssm_out_multiplier: Finite = 1.0
    ssm_multipliers: Annotated[list[Finite], Field(min_length=5, max_length=5)] = [1.0] * 5
    mlp_multipliers: Annotated[list[Finite], Field(min_length=2, max_length=2)] = [1.0] * 2

    @field_validator("ssm_multipliers", "mlp_multipliers", mode="before")
    @classmethod
    def _fill_multipliers(cls, value: Any, info: ValidationInfo) -> Any:
        return cls.model_fields[str(info.field_name)].default if value is None else value

    @property
    def mamba_features(self) -> tuple[int, str]:
        if self.mamba_d_ssm is None:
            features, entries = super().mamba_features
            return features, f"{entries} without a mamba_d_ssm"
        return self.mamba_d_ssm, f"mamba_d_ssm {self.mamba_d_ssm}"

    @model_validator(mode="after")
    def _check_biases(self) -> FalconH1Config:
        if self.projectors_bias != self.mamba_proj_bias:
            raise ValueError(
                "projectors_bias and mamba_proj_bias differ: expected biases on both of a mixer's "
                "projections, or on none"
            )
        return self


class FalconH1Mixer(HybridMamba2Mixer):
    def __init__(self, config: Any) -> None:
        super().__init__(
            config, norm=config.mamba_rms_norm, norm_before_gate=config.mamba_norm_before_gate
        )
        self.input_multiplier = config.ssm_in_multiplier
        self.multipliers = config.ssm_multipliers

    def project(self, x: torch.Tensor) -> torch.Tensor:
        inner, shared = self.num_heads * self.head_dim, self.n_groups * self.state_size
        sizes = [inner, inner, shared, shared, self.num_heads]
        parts = torch.split(super().project(x * self.input_multiplier), sizes, dim=-1)
        scaled = [part * by for part, by in zip(parts, self.multipliers, strict=True)]
        return torch.cat(scaled, dim=-1)


class FalconH1Attention(LlamaAttention):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        self.attn.scale *= config.key_multiplier


class FalconH1MLP(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.multipliers: list[float] = config.mlp_multipliers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        y = self.act_fn(torch.cat([gate * self.multipliers[0], up], dim=-1))
        return self.down_proj(y) * self.multipliers[1]


class FalconH1DecoderLayer(vLLMModule):
    sole_readers = {"pre_ff_layernorm": "feed_forward"}

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mamba = FalconH1Mixer(config)
        self.self_attn = FalconH1Attention(config, rotary_emb, layer_idx)
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward = FalconH1MLP(config)

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        x, residual = self.input_layernorm(hidden_states, residual)
        attended = self.self_attn(positions, x * config.attention_in_multiplier, metadata)
        hidden_states = self.mamba(x, metadata) * config.ssm_out_multiplier
        hidden_states = hidden_states + attended * config.attention_out_multiplier
        hidden_states, residual = self.pre_ff_layernorm(hidden_states, residual)
        return self.feed_forward(hidden_states), residual


class FalconH1Model(DecoderModel):
    layer_class = FalconH1DecoderLayer
    final_norm = "final_layernorm"

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed_input_ids(input_ids) * self.config.embedding_multiplier


class FalconH1ForCausalLM(DecoderForCausalLM):
    config_class = FalconH1Config
    model_class = FalconH1Model

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) * self.config.lm_head_multiplier
