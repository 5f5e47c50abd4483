"""OLMoE (arXiv:2409.02060): experts, and norms of all queries and keys together."""

from __future__ import annotations

from vllm_module.hf_config import NumExperts, Positive, Size
from vllm_module.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderModel
from vllm_module.models.llama import LlamaConfig
from vllm_module.models.olmo2 import Olmo2Attention
from vllm_module.models.qwen2_moe import SparseMoeBlock


class OlmoeConfig(LlamaConfig):
    num_experts: NumExperts = 64
    num_experts_per_tok: Size = 8
    norm_topk_prob: bool = False
    rms_norm_eps: Positive = 1e-5
    max_position_embeddings: Size = 4096
    clip_qkv: None = None  # no published checkpoint clips

    @property
    def moe_intermediate_size(self) -> int:
        return self.intermediate_size


class OlmoeAttention(Olmo2Attention):
    weight_offset = None


class OlmoeDecoderLayer(DecoderLayer):
    attention_class = OlmoeAttention
    mlp_class = SparseMoeBlock


class OlmoeModel(DecoderModel):
    layer_class = OlmoeDecoderLayer


class OlmoeForCausalLM(DecoderForCausalLM):
    config_class = OlmoeConfig
    model_class = OlmoeModel
