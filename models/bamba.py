"""Bamba: Mamba-2 in most layers, Llama's attention in some, and an MLP in all."""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator

from vllm_module.base.messages import shorten
from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import ConvKernel, Count, Positive, Size, TimeStepLimit
from vllm_module.layers import (
    AttentionMetadata,
    Mamba2Mixer,
    Positions,
    RMSNorm,
    RotaryEmbedding,
    layer_kind,
)
from vllm_module.models.decoder import DecoderForCausalLM, DecoderModel
from vllm_module.models.llama import LlamaAttention, LlamaConfig, LlamaMLP

_KINDS = {"attention": "full_attention", "mamba": "linear_attention"}  # older names


class BambaConfig(LlamaConfig):
    attribute_map: ClassVar = {"layer_types": "layers_block_type"}

    hidden_act: Literal["silu", "swish"] = "silu"  # of the convolutions too
    rms_norm_eps: Positive = 1e-5
    partial_rotary_factor: Positive = 0.5
    max_position_embeddings: Size = 262144
    attn_layer_indices: list[Count] | None = None
    mamba_n_heads: Size = 128
    mamba_d_head: Size | Literal["auto"] = "auto"
    mamba_n_groups: Size = 1
    mamba_d_state: Size = 256
    mamba_d_conv: ConvKernel = 4
    mamba_expand: Size = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: TimeStepLimit = (0.0, inf)

    @model_validator(mode="before")
    @classmethod
    def _rotate_half(cls, entries: Any) -> Any:
        """Have half of each head rotated, as transformers does whatever the file has here."""
        return {**entries, "partial_rotary_factor": 0.5} if isinstance(entries, dict) else entries

    @model_validator(mode="after")
    def _check_layers(self) -> BambaConfig:
        numbers = self.attn_layer_indices
        if numbers and max(numbers) >= self.num_hidden_layers:
            raise ValueError(
                f"attn_layer_indices has {max(numbers)}: expected numbers of layers, below "
                f"num_hidden_layers {self.num_hidden_layers}"
            )
        if self.layer_types is not None:
            types = [_KINDS.get(kind, kind) for kind in self.layer_types]
            attend = [at for at, kind in enumerate(types) if kind == "full_attention"]
            if numbers is not None and sorted(set(numbers)) != attend:
                raise ValueError(
                    f"layer_types has attention in layers {shorten(attend)}, and "
                    f"attn_layer_indices is {shorten(numbers)}: expected the same layers"
                )
            vars(self)["layer_types"] = types  # the fields are frozen
        return self

    @model_validator(mode="after")
    def _fill_head_dim(self) -> BambaConfig:
        features, heads = self.mamba_expand * self.hidden_size, self.mamba_n_heads
        if heads % self.mamba_n_groups:
            raise ValueError(
                f"mamba_n_heads {heads} should be a multiple of mamba_n_groups "
                f"{self.mamba_n_groups}"
            )
        if self.mamba_d_head == "auto":
            if features % heads:
                raise ValueError(
                    f"mamba_d_head is 'auto', and mamba_n_heads {heads} does not divide "
                    f"{features}, which is mamba_expand * hidden_size"
                )
            vars(self)["mamba_d_head"] = features // heads
        elif "mamba_expand" in self.model_fields_set and heads * self.mamba_d_head != features:
            raise ValueError(
                f"mamba_n_heads {heads} * mamba_d_head {self.mamba_d_head} should be mamba_expand "
                f"{self.mamba_expand} * hidden_size {self.hidden_size}"
            )
        return self


class BambaDecoderLayer(vLLMModule):
    sole_readers = {
        "input_layernorm": ("mamba", "self_attn"), "pre_ff_layernorm": "feed_forward",
    }  # fmt: skip

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn: LlamaAttention | None = None
        attends = layer_idx in (config.attn_layer_indices or ())
        if config.layer_types is not None:
            attends = layer_kind(config, layer_idx) == "full_attention"
        if attends:
            self.self_attn = LlamaAttention(config, rotary_emb, layer_idx)
        else:
            heads = config.mamba_n_heads
            self.mamba = Mamba2Mixer(
                hidden,
                heads,
                config.mamba_d_head,
                config.mamba_n_groups,
                config.mamba_d_state,
                config.mamba_d_conv,
                eps,
                config.mamba_proj_bias,
                config.mamba_conv_bias,
                time_step_limit=config.time_step_limit,
            )
        self.pre_ff_layernorm = RMSNorm(hidden, eps)
        self.feed_forward = LlamaMLP(config)

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
        hidden_states, residual = self.pre_ff_layernorm(hidden_states, residual)
        return self.feed_forward(hidden_states), residual


class BambaModel(DecoderModel):
    layer_class = BambaDecoderLayer
    final_norm = "final_layernorm"


class BambaForCausalLM(DecoderForCausalLM):
    config_class = BambaConfig
    model_class = BambaModel
