"""GPT-2: learned positions, and linear layers that are stored as ``[input, output]``."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import HFConfig, Positive, Size
from vllm_module.layers import (
    Attention,
    AttentionMetadata,
    ColumnParallelLinear,
    LayerNorm,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_act,
)


class GPT2Config(HFConfig):
    attribute_map = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "max_position_embeddings": "n_positions",
    }

    intermediate_size: Size | None = None
    hidden_act: str = "gelu_new"
    layer_norm_epsilon: Positive = 1e-5
    max_position_embeddings: Size = 1024
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: bool = True


class QKVConv1D(QKVParallelLinear):
    transposed = True


class ColumnConv1D(ColumnParallelLinear):
    transposed = True


class RowConv1D(RowParallelLinear):
    transposed = True


class GPT2Attention(vLLMModule):
    skipped_weights = dict.fromkeys(("bias", "masked_bias"), "causal masks are not stored")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.head_dim = config.head_dim
        self.c_attn = QKVConv1D(hidden, self.head_dim, heads, shard_names=None)
        scale = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        scale /= layer_idx + 1 if config.scale_attn_by_inverse_layer_idx else 1
        self.attn = Attention(self.c_attn.num_heads, self.head_dim, scale)
        self.c_proj = RowConv1D(heads * self.head_dim, hidden)

    def forward(self, x: torch.Tensor, metadata: AttentionMetadata | None) -> torch.Tensor:
        qkv = self.c_attn(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv)
        return self.c_proj(self.attn(q, k, v, metadata))


class GPT2MLP(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        intermediate = config.intermediate_size or 4 * config.hidden_size
        self.c_fc = ColumnConv1D(config.hidden_size, intermediate)
        self.act = get_act(config.hidden_act)
        self.c_proj = RowConv1D(intermediate, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class GPT2Block(vLLMModule):
    norm_class: type[nn.Module] = LayerNorm  # built from (hidden_size, eps)
    attention_class: type[nn.Module] = GPT2Attention  # built from (config, what the model gives)
    mlp_class: type[nn.Module] = GPT2MLP  # built from (config)

    def __init__(self, config: Any, given: Any) -> None:
        super().__init__()
        self.ln_1 = self.norm_class(config.hidden_size, config.layer_norm_epsilon)
        self.attn = self.attention_class(config, given)
        self.ln_2 = self.norm_class(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = self.mlp_class(config)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, *given: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.ln_1(x, residual)
        x, residual = self.ln_2(self.attn(x, *given), residual)
        return self.mlp(x), residual


class GPT2Model(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, layers = config.hidden_size, config.num_hidden_layers
        self.wte = VocabParallelEmbedding(config.vocab_size, hidden)
        self.wpe = VocabParallelEmbedding(config.max_position_embeddings, hidden)
        self.h = nn.ModuleList(GPT2Block(config, layer_idx) for layer_idx in range(layers))
        self.ln_f = LayerNorm(hidden, config.layer_norm_epsilon)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        x = self.wte(input_ids) + self.wpe(positions)
        residual = torch.zeros_like(x)
        for block in self.h:
            x, residual = block(x, residual, metadata)
        return self.ln_f(x, residual)[0]


class GPT2LMHeadModel(vLLMModule):
    config_class: type[HFConfig] = GPT2Config
    model_class: type[Any] = GPT2Model  # built from (config), with an embedding wte
    # Files of the model without a head lack the prefix.
    weight_aliases = {name: f"transformer.{name}" for name in ("wte", "wpe", "h", "ln_f")}

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.transformer = self.model_class(config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.tie_weights(self.transformer.wte)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        return self.transformer(input_ids, positions, metadata)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)
