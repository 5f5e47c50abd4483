"""gpt-oss: experts with biases and a clamped gate, attention sinks, alternating windows."""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import model_validator

from vllm_module.core.module import vLLMModule
from vllm_module.distributed import tensor_parallel_group
from vllm_module.hf_config import NumExperts, Positive, Size
from vllm_module.layers import (
    FusedMoE,
    RotaryEmbedding,
    Router,
    SwigluOAIAndMul,
    layer_sliding_window,
)
from vllm_module.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderModel
from vllm_module.models.llama import LlamaAttention, LlamaConfig
from vllm_module.models.olmo2 import Olmo2RMSNorm
from vllm_module.parameters import ColumnvLLMParameter, Dim

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
    "truncate": False,
}  # fmt: skip


class GptOssConfig(LlamaConfig):
    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = True
    head_dim: Size = 64
    num_local_experts: NumExperts = 128
    num_experts_per_tok: Size = 4
    swiglu_alpha: Positive = 1.702
    swiglu_limit: Positive = 7.0
    stored_experts_apart: bool = False  # as in GGUF files: gate, up and down of each expert
    sliding_window: Size | None = 128
    sliding_window_pattern: Size = 2  # unless there are layer_types
    rope_theta: Positive = 150000.0
    max_position_embeddings: Size = 131072

    @model_validator(mode="before")
    @classmethod
    def _scale_rotations(cls, entries: Any) -> Any:
        """Give a file without rope settings those of transformers' class."""
        given = isinstance(entries, dict) and (
            entries.get("rope_scaling") or entries.get("rope_parameters")
        )
        return entries if given is not None else {**entries, "rope_parameters": _YARN}


class GptOssAttention(LlamaAttention):
    sliding_window = staticmethod(layer_sliding_window)

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        group = tensor_parallel_group()
        self.sinks = ColumnvLLMParameter(
            Dim.cut(config.num_attention_heads, group.size),
            tp_rank=group.rank,
            tp_size=group.size,
            dtype=torch.get_default_dtype(),
        )


class GptOssMLP(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router = Router(config.hidden_size, config.num_local_experts, bias=True)
        apart = config.stored_experts_apart
        self.experts = FusedMoE(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.intermediate_size,
            activation=SwigluOAIAndMul(config.swiglu_alpha, config.swiglu_limit),
            bias=True,
            shard_names=("gate_proj", "up_proj", "down_proj") if apart else None,
            block=math.gcd(32, config.intermediate_size),  # of MXFP4
            transposed=not apart,
            interleaved=not apart,
            packed=not apart,  # Hugging Face's tensor of all experts is in another order
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.router(x))


class GptOssDecoderLayer(DecoderLayer):
    norm_class = Olmo2RMSNorm
    attention_class = GptOssAttention
    mlp_class = GptOssMLP


class GptOssModel(DecoderModel):
    norm_class = Olmo2RMSNorm
    layer_class = GptOssDecoderLayer


class GptOssForCausalLM(DecoderForCausalLM):
    config_class = GptOssConfig
    model_class = GptOssModel
