"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optional sliding windows."""

from __future__ import annotations

from typing import Any

from vllm_module.hf_config import Count, Size
from vllm_module.layers import layer_sliding_window
from vllm_module.models.llama import (
    LlamaAttention,
    LlamaConfig,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
)


class Qwen2Config(LlamaConfig):
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: Count = 28
    max_position_embeddings: Size = 32768


class Qwen2Attention(LlamaAttention):
    @staticmethod
    def qkv_bias(config: Any) -> bool:
        return True

    @staticmethod
    def output_bias(config: Any) -> bool:
        return False  # whatever attention_bias is: some files mean that of q, k and v by it

    sliding_window = staticmethod(layer_sliding_window)


class Qwen2DecoderLayer(LlamaDecoderLayer):
    attention_class = Qwen2Attention


class Qwen2Model(LlamaModel):
    layer_class = Qwen2DecoderLayer


class Qwen2ForCausalLM(LlamaForCausalLM):
    config_class: type[LlamaConfig] = Qwen2Config
    model_class = Qwen2Model
