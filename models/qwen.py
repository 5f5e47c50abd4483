"""The first Qwen: fused q, k and v, and queries that grow with the logarithm of their position."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.errors import UnsupportedModelError
from vllm_module.hf_config import HFConfig, Positive, Size
from vllm_module.layers import (
    Attention,
    AttentionMetadata,
    MergedColumnParallelLinear,
    Positions,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    SiluAndMul,
    VocabParallelEmbedding,
)
from vllm_module.models.gpt2 import GPT2Block, GPT2LMHeadModel
from vllm_module.rope_parameters import rope_parameters


class QWenConfig(HFConfig):
    attribute_map = {"head_dim": "kv_channels"}

    intermediate_size: Size  # of gate and up together
    layer_norm_epsilon: Positive = 1e-6
    no_bias: bool = True
    seq_length: Annotated[int, Field(gt=1, lt=2**31)] = 2048  # its log divides
    use_dynamic_ntk: bool = True
    use_logn_attn: bool = True
    max_position_embeddings: Size = 8192

    @model_validator(mode="after")
    def _longer_by_request_only(self) -> QWenConfig:
        if "max_model_len" not in self.model_fields_set:  # longer changes all frequencies
            vars(self)["max_model_len"] = min(self.seq_length, self.max_position_embeddings)
        return self

    @property
    def context_length(self) -> int | None:
        limit = super().context_length
        return limit if limit is None or self.use_dynamic_ntk else min(limit, self.seq_length)


def rotary_embedding(config: Any) -> RotaryEmbedding:
    """Return Qwen's dynamic NTK. Qwen chooses the base in each step; here it is chosen once."""
    rope = rope_parameters(config)
    rotary_dim = int(config.head_dim * rope.partial_rotary_factor)
    base = rope.rope_theta
    longer = config.max_model_len / config.seq_length
    if config.use_dynamic_ntk and longer > 1:
        if rotary_dim == 2:
            raise UnsupportedModelError("kv_channels: expected more than 2 for dynamic NTK")
        alpha = 2 ** math.ceil(math.log2(longer) + 1) - 1
        base *= alpha ** (rotary_dim / (rotary_dim - 2))
    return RotaryEmbedding(
        config.head_dim,
        config.max_position_embeddings,
        base,
        rotary_dim=rotary_dim,
        max_model_len=config.max_model_len,
    )


class QWenAttention(vLLMModule):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.head_dim = config.head_dim
        self.c_attn = QKVParallelLinear(hidden, self.head_dim, heads, shard_names=None)
        self.rotary_emb = rotary_emb
        self.attn = Attention(self.c_attn.num_heads, self.head_dim)
        self.c_proj = RowParallelLinear(heads * self.head_dim, hidden, bias=not config.no_bias)

    def forward(
        self,
        x: torch.Tensor,
        positions: Positions,
        logn: torch.Tensor | None,
        metadata: AttentionMetadata | None,
    ) -> torch.Tensor:
        qkv = self.c_attn(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv)
        q, k = self.rotary_emb(positions, q, k)
        q = q if logn is None else q * logn
        return self.c_proj(self.attn(q, k, v, metadata))


class QWenMLP(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size // 2
        bias = not config.no_bias
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [intermediate] * 2, bias=bias, shard_names=["w2", "w1"]
        )
        self.act = SiluAndMul()
        self.c_proj = RowParallelLinear(intermediate, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.act(self.gate_up_proj(x)))


class QWenBlock(GPT2Block):
    norm_class = RMSNorm
    attention_class = QWenAttention
    mlp_class = QWenMLP


class QWenModel(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, layers = config.hidden_size, config.num_hidden_layers
        self.wte = VocabParallelEmbedding(config.vocab_size, hidden)
        self.rotary_emb = rotary_embedding(config)
        self.h = nn.ModuleList(QWenBlock(config, self.rotary_emb) for _ in range(layers))
        self.ln_f = RMSNorm(hidden, config.layer_norm_epsilon)
        # Beyond so many tokens, queries grow.
        longer = config.use_logn_attn and config.max_model_len > config.seq_length
        self.logn_length = config.seq_length if longer else None

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        x = self.wte(input_ids)
        residual = torch.zeros_like(x)
        shared, logn = Positions(positions), None
        if self.logn_length is not None:
            logn = (positions + 1).float().log() / math.log(self.logn_length)
            logn = logn.clamp(min=1).to(x.dtype).view(-1, 1, 1)
        for block in self.h:
            x, residual = block(x, residual, shared, logn, metadata)
        return self.ln_f(x, residual)[0]


class QWenLMHeadModel(GPT2LMHeadModel):
    config_class = QWenConfig
    model_class = QWenModel
    weight_aliases: dict[str, str] = {}
