"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, text only: the decoders of Qwen2 and Qwen3.

Experts are stored with inputs first, as in published files. transformers 5 writes outputs first;
such a file is refused by its shapes.
"""

from __future__ import annotations

from typing import Literal

from vllm_module.hf_config import Count, NumExperts, Positive, Size
from vllm_module.models.language_model_only import LanguageModelOnly, LanguageModelOnlyConfig
from vllm_module.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from vllm_module.models.qwen2_moe import SparseMoeBlock
from vllm_module.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from vllm_module.models.qwen3_moe import (
    Qwen3MoeConfig,
    Qwen3MoeDecoderLayer,
    Qwen3MoeForCausalLM,
    Qwen3MoeModel,
)


class Qwen2VLConfig(Qwen2Config, LanguageModelOnlyConfig):
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 1000000.0
    num_key_value_heads: Size = 8
    max_window_layers: Count = 80


class Qwen2VLForConditionalGeneration(LanguageModelOnly, Qwen2ForCausalLM):
    config_class = Qwen2VLConfig


class Qwen3VLConfig(Qwen3Config, LanguageModelOnlyConfig):
    rope_theta: Positive = 500000.0
    max_position_embeddings: Size = 128000
    use_sliding_window: Literal[False] = False


class Qwen3VLForConditionalGeneration(LanguageModelOnly, Qwen3ForCausalLM):
    config_class = Qwen3VLConfig


class Qwen3VLMoeConfig(Qwen3MoeConfig, LanguageModelOnlyConfig):
    # Transformers makes weights add up to one, whatever a file says.
    norm_topk_prob: Literal[True] = True
    num_experts: NumExperts = 60
    num_experts_per_tok: Size = 4
    moe_intermediate_size: Size = 1408
    rope_theta: Positive = 500000.0
    max_position_embeddings: Size = 128000
    use_sliding_window: Literal[False] = False


class Qwen3VLMoeSparseMoeBlock(SparseMoeBlock):
    layout = {"shard_names": None, "transposed": True}


class Qwen3VLMoeDecoderLayer(Qwen3MoeDecoderLayer):
    moe_class = Qwen3VLMoeSparseMoeBlock


class Qwen3VLMoeModel(Qwen3MoeModel):
    layer_class = Qwen3VLMoeDecoderLayer


class Qwen3VLMoeForConditionalGeneration(LanguageModelOnly, Qwen3MoeForCausalLM):
    config_class = Qwen3VLMoeConfig
    model_class = Qwen3VLMoeModel
