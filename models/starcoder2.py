"""StarCoder2: layer normalization, biases, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import Positive, Size
from vllm_module.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear, get_act
from vllm_module.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderModel
from vllm_module.models.llama import LlamaConfig, MistralAttention


class Starcoder2Config(LlamaConfig):
    attribute_map = {"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias"}

    hidden_act: str = "gelu_pytorch_tanh"
    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = True
    sliding_window: Size | None = None
    max_position_embeddings: Size = 4096
    tie_word_embeddings: bool = True


class Starcoder2MLP(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.c_fc = ColumnParallelLinear(hidden, intermediate, bias=config.attention_bias)
        self.act = get_act(config.hidden_act)
        self.c_proj = RowParallelLinear(intermediate, hidden, bias=config.attention_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class Starcoder2DecoderLayer(DecoderLayer):
    norm_class = LayerNorm
    attention_class = MistralAttention
    mlp_class = Starcoder2MLP


class Starcoder2Model(DecoderModel):
    norm_class = LayerNorm
    layer_class = Starcoder2DecoderLayer


class Starcoder2ForCausalLM(DecoderForCausalLM):
    config_class = Starcoder2Config
    model_class = Starcoder2Model
