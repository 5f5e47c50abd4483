"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optional sliding windows."""

from __future__ import annotations

from typing import Any

from vllm_module.layers import layer_sliding_window
from vllm_module.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
)


class Qwen2Attention(LlamaAttention):
    @staticmethod
    def qkv_bias(config: Any) -> bool:
        return True

    @staticmethod
    def sliding_window(config: Any, layer_idx: int) -> int | None:
        return layer_sliding_window(config, layer_idx)


class Qwen2DecoderLayer(LlamaDecoderLayer):
    attention_class = Qwen2Attention


class Qwen2Model(LlamaModel):
    layer_class = Qwen2DecoderLayer


class Qwen2ForCausalLM(LlamaForCausalLM):
    model_class = Qwen2Model
