"""Nemotron-H (arXiv:2504.03624) and Nemotron 3: layers of Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from math import inf
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import nn

from vllm_module.base.messages import shorten
from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import ConvKernel, NumExperts, Positive, Size, TimeStepLimit
from vllm_module.layers import (
    AttentionMetadata,
    Mamba2Mixer,
    Positions,
    RotaryEmbedding,
)
from vllm_module.models.decoder import DecoderForCausalLM, DecoderModel
from vllm_module.models.llama import LlamaAttention, LlamaConfig
from vllm_module.models.nemotron_h_mlp import NemotronHMLP, NemotronHMoE
from vllm_module.models.olmo2 import Olmo2RMSNorm

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


class NemotronHConfig(LlamaConfig):
    attribute_map = {
        "layer_types": "layers_block_type", "rms_norm_eps": "layer_norm_epsilon",
    }  # fmt: skip

    layer_types: list[str]
    intermediate_size: Size = 21504
    mlp_hidden_act: str = "relu2"
    rms_norm_eps: Positive = 1e-5
    head_dim: Size = 128
    max_position_embeddings: Size = 4096
    residual_in_fp32: Literal[False] = False
    mamba_num_heads: Size = 128
    mamba_head_dim: Size = 64
    mamba_hidden_act: Literal["silu", "swish"] = "silu"
    n_groups: Size = 8
    ssm_state_size: Size = 128
    conv_kernel: ConvKernel = 4
    use_conv_bias: bool = True
    use_bias: bool = False
    time_step_limit: TimeStepLimit = (0.0, inf)
    n_routed_experts: NumExperts = 8
    num_experts_per_tok: Size = 2
    moe_intermediate_size: Size = 7688
    moe_latent_size: Size | None = None
    n_shared_experts: Literal[1] = 1
    moe_shared_expert_intermediate_size: Size = 7688
    n_group: Size = 1
    topk_group: Size = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0

    @model_validator(mode="before")
    @classmethod
    def _list_layers(cls, entries: Any) -> Any:
        """List what each layer has, also of a file with a letter for each; count them."""
        if not isinstance(entries, dict):
            return entries
        pattern, types = entries.get("hybrid_override_pattern"), entries.get("layers_block_type")
        types = entries.get("layer_types") if types is None else types
        if types is None and isinstance(pattern, str):
            types = list(pattern)
        if not isinstance(types, list) or not types or not all(isinstance(k, str) for k in types):
            raise ValueError(
                "layers_block_type should be a list with what each layer has, or "
                f"hybrid_override_pattern a letter for each, got {shorten(types)}"
            )
        types = [_LETTERS.get(kind, _OLDER.get(kind, kind)) for kind in types]
        if unknown := set(types) - set(_LETTERS.values()):
            kinds = ", ".join(_LETTERS.values())
            raise ValueError(f"layers_block_type has {shorten(min(unknown))}: expected {kinds}")
        layers = entries.get("num_hidden_layers", len(types))
        if isinstance(layers, int) and layers > len(types):
            raise ValueError(f"num_hidden_layers is {layers}, and {len(types)} are listed")
        named = {"layers_block_type": types, "layer_types": types}
        return {**entries, **named, "num_hidden_layers": layers}


class NemotronHAttention(LlamaAttention):
    rotates = False


class NemotronHDecoderLayer(vLLMModule):
    sole_readers = {"norm": "mixer"}

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        self.norm = Olmo2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.kind = config.layer_types[layer_idx]
        self.mixer: nn.Module
        if self.kind == "full_attention":
            self.mixer = NemotronHAttention(config, rotary_emb, layer_idx)
        elif self.kind == "linear_attention":
            self.mixer = Mamba2Mixer(
                config.hidden_size, config.mamba_num_heads, config.mamba_head_dim,
                config.n_groups, config.ssm_state_size, config.conv_kernel, config.rms_norm_eps,
                config.use_bias, config.use_conv_bias, time_step_limit=config.time_step_limit,
            )  # fmt: skip
        elif self.kind == "moe":
            self.mixer = NemotronHMoE(config)
        else:
            self.mixer = NemotronHMLP(config, config.intermediate_size)

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, residual = self.norm(hidden_states, residual)
        if self.kind == "full_attention":
            return self.mixer(positions, hidden_states, metadata), residual
        if self.kind == "linear_attention":
            return self.mixer(hidden_states, metadata), residual
        return self.mixer(hidden_states), residual


class NemotronHModel(DecoderModel):
    weight_aliases = {"embeddings": "embed_tokens"}
    norm_class = Olmo2RMSNorm
    layer_class = NemotronHDecoderLayer
    final_norm = "norm_f"


class NemotronHForCausalLM(DecoderForCausalLM):
    weight_aliases = {"backbone": "model"}
    skipped_weights = {"mtp": "layers that predict further tokens are for speculative decoding"}
    config_class = NemotronHConfig
    model_class = NemotronHModel
