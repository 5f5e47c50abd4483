"""OLMo Hybrid: OLMo 2's layers, and gated delta nets with a norm before each block in most."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import model_validator

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import ConvKernel, Positive, Size
from vllm_module.layers import (
    AttentionMetadata,
    GatedDeltaNet,
    Positions,
    RotaryEmbedding,
    layer_kind,
)
from vllm_module.models.decoder import DecoderForCausalLM
from vllm_module.models.llama import LlamaConfig, LlamaMLP
from vllm_module.models.olmo2 import Olmo2Attention, Olmo2Model, Olmo2RMSNorm


class OlmoHybridConfig(LlamaConfig):
    hidden_act: Literal["silu", "swish"] = "silu"
    max_position_embeddings: Size = 65536
    rope_theta: Positive | None = 10000.0
    rope_parameters: dict[str, Any] | None = None
    linear_num_key_heads: Size | None = None
    linear_num_value_heads: Size | None = None
    linear_key_head_dim: Size | None = None
    linear_value_head_dim: Size | None = None
    linear_conv_kernel_dim: ConvKernel = 4
    linear_allow_neg_eigval: bool = True

    @model_validator(mode="after")
    def _fill_heads(self) -> OlmoHybridConfig:
        """Fill in what transformers computes of other entries."""
        filled: dict[str, Any] = vars(self)  # because the fields are frozen
        for name in "linear_num_key_heads", "linear_num_value_heads":
            filled[name] = filled[name] or self.num_attention_heads
        if self.linear_key_head_dim is None:
            filled["linear_key_head_dim"] = (
                3 * self.hidden_size // (4 * filled["linear_num_key_heads"])
            )
        if self.linear_value_head_dim is None:
            filled["linear_value_head_dim"] = 2 * filled["linear_key_head_dim"]
        return self

    @property
    def full_attention_interval(self) -> int:
        """Of ``layer_kind``, for a file without ``layer_types``; some layer has attention."""
        return min(4, self.num_hidden_layers)


class OlmoHybridAttention(Olmo2Attention):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        # null, as in the files of the 7B, is not absent here: no layer knows positions.
        given = config.rope_parameters or {}
        self.rotates = given.get("rope_theta", config.rope_theta) is not None


class OlmoHybridGatedDeltaNet(GatedDeltaNet):
    def __init__(self, config: Any) -> None:
        super().__init__(
            config.hidden_size,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
            eps=1e-5,  # whatever rms_norm_eps is
            stored="apart",
            negative_eigenvalues=config.linear_allow_neg_eigval,
        )


class OlmoHybridDecoderLayer(vLLMModule):
    sole_readers = {"input_layernorm": "linear_attn"}

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.weight_aliases = {"feedforward_layer_norm": "post_attention_layernorm"}
        self.self_attn: OlmoHybridAttention | None = None
        if layer_kind(config, layer_idx) == "full_attention":
            self.self_attn = OlmoHybridAttention(config, rotary_emb, layer_idx)
            self.post_feedforward_layernorm = Olmo2RMSNorm(hidden, eps)
        else:
            self.weight_aliases["attention_layer_norm"] = "input_layernorm"
            self.input_layernorm = Olmo2RMSNorm(hidden, eps)
            self.linear_attn = OlmoHybridGatedDeltaNet(config)
        self.post_attention_layernorm = Olmo2RMSNorm(hidden, eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.self_attn is None:  # a norm before each block
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
            hidden_states = self.linear_attn(hidden_states, metadata)
            hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
            return self.mlp(hidden_states), residual
        residual = hidden_states + residual
        hidden_states = self.self_attn(positions, residual, metadata)
        residual = residual + self.post_attention_layernorm(hidden_states)
        return self.post_feedforward_layernorm(self.mlp(residual)), residual


class OlmoHybridModel(Olmo2Model):
    layer_class = OlmoHybridDecoderLayer


class OlmoHybridForCausalLM(DecoderForCausalLM):
    config_class = OlmoHybridConfig
    model_class = OlmoHybridModel
    skipped_weights = {"mtp": "layers that predict further tokens are for speculative decoding"}
