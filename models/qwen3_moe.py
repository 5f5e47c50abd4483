"""Qwen3-MoE: Qwen3 with experts instead of an MLP, in all layers or some."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm_module.hf_config import Count, NumExperts, Size
from vllm_module.models.decoder import DecoderForCausalLM, DecoderModel
from vllm_module.models.qwen2 import Qwen2Config
from vllm_module.models.qwen2_moe import Qwen2MoeDecoderLayer, SparseMoeBlock
from vllm_module.models.qwen3 import Qwen3Attention


class Qwen3MoeConfig(Qwen2Config):
    attribute_map: ClassVar = {"num_experts": "num_local_experts"}  # transformers 5 writes this

    moe_intermediate_size: Size = 768
    num_experts: NumExperts = 128
    num_experts_per_tok: Size = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[Count] | None = None


class Qwen3MoeAttention(Qwen3Attention):
    @staticmethod
    def sliding_window(config: Any, layer_idx: int) -> int | None:
        return config.sliding_window if config.use_sliding_window else None


class Qwen3MoeDecoderLayer(Qwen2MoeDecoderLayer):
    attention_class = Qwen3MoeAttention
    moe_class = SparseMoeBlock


class Qwen3MoeModel(DecoderModel):
    layer_class = Qwen3MoeDecoderLayer


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    config_class: type[Qwen2Config] = Qwen3MoeConfig
    model_class = Qwen3MoeModel
