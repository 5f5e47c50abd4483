"""Bamba: Mamba-2 in most layers, Llama's attention in some, and an MLP in all."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import model_validator

from vllm_module.base.messages import shorten
from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import Count, Positive, Size
from vllm_module.layers import (
    AttentionMetadata,
    Positions,
    RMSNorm,
    RotaryEmbedding,
    layer_kind,
)
from vllm_module.models.decoder import DecoderForCausalLM, DecoderModel
from vllm_module.models.llama import LlamaAttention, LlamaMLP
from vllm_module.models.mamba2_hybrid import HybridMamba2Mixer, Mamba2HybridConfig


class BambaConfig(Mamba2HybridConfig):
    rms_norm_eps: Positive = 1e-5
    partial_rotary_factor: Positive = 0.5
    max_position_embeddings: Size = 262144
    attn_layer_indices: list[Count] | None = None

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
        if self.layer_types is not None and numbers is not None:
            attend = [at for at, kind in enumerate(self.layer_types) if kind == "full_attention"]
            if sorted(set(numbers)) != attend:
                raise ValueError(
                    f"layer_types has attention in layers {shorten(attend)}, and "
                    f"attn_layer_indices is {shorten(numbers)}: expected the same layers"
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
            self.mamba = HybridMamba2Mixer(config)
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
