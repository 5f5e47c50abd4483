"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optional sliding windows."""

from __future__ import annotations

from typing import Any

from vllm_module.layers import layer_sliding_window
from vllm_module.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen2Attention(LlamaAttention):
    sliding_window = staticmethod(layer_sliding_window)

    @staticmethod
    def qkv_bias(config: Any) -> bool:
        return True


class Qwen2ForCausalLM(LlamaForCausalLM):
    attention = Qwen2Attention
