"""BERT: an encoder. It generates nothing; ``LLM.embed`` pools its hidden states to embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.errors import UnsupportedModelError
from vllm_module.hf_config import HFConfig, Positive, Size
from vllm_module.layers import (
    ColumnParallelLinear,
    EncoderAttention,
    LayerNorm,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_act,
)

Lengths = Sequence[int] | None
POOLER = "embeddings are pooled from the hidden states"
HEADS = "the heads of pretraining are not computed"
_ONLY = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}


class BertConfig(HFConfig):
    intermediate_size: Size
    hidden_act: str = "gelu"
    layer_norm_eps: Positive = 1e-12
    max_position_embeddings: Size = 512
    type_vocab_size: Size = 2
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    add_cross_attention: bool = False


class BertLayerNorm(LayerNorm):
    weight_aliases = {"gamma": "weight", "beta": "bias"}  # converted from TensorFlow


class BertEmbeddings(vLLMModule):
    skipped_weights = {"position_ids": "positions are counted, not stored"}

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word_embeddings = VocabParallelEmbedding(config.vocab_size, hidden)
        self.position_embeddings = VocabParallelEmbedding(config.max_position_embeddings, hidden)
        self.token_type_embeddings = VocabParallelEmbedding(config.type_vocab_size, hidden)
        self.LayerNorm = BertLayerNorm(hidden, config.layer_norm_eps)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, token_type_ids: torch.Tensor
    ) -> torch.Tensor:
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.LayerNorm(x + self.position_embeddings(positions))


class BertSelfAttention(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            shard_names=["query", "key", "value"],
        )
        self.attn = EncoderAttention(self.qkv_proj.num_heads, config.head_dim)

    def forward(self, x: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        qkv = self.qkv_proj(x).unflatten(-1, (3, -1, self.attn.head_size))
        return self.attn(*qkv.unbind(-3), lengths)


class BertOutput(vLLMModule):
    """Projects to the hidden size, adds the residual and normalizes."""

    def __init__(self, config: Any, input_size: int) -> None:
        super().__init__()
        self.dense = RowParallelLinear(input_size, config.hidden_size)
        self.LayerNorm = BertLayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class BertAttention(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertOutput(config, config.num_attention_heads * config.head_dim)

    def forward(self, x: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        return self.output(self.self(x, lengths), x)


class BertLayer(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        dense = ColumnParallelLinear(config.hidden_size, config.intermediate_size)
        self.intermediate = nn.ModuleDict({"dense": dense})
        self.act_fn = get_act(config.hidden_act)
        self.output = BertOutput(config, config.intermediate_size)

    def forward(self, x: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        x = self.attention(x, lengths)
        return self.output(self.act_fn(self.intermediate["dense"](x)), x)


class BertModel(vLLMModule):
    config_class: type[HFConfig] = BertConfig
    embeddings_class = BertEmbeddings
    weight_aliases = {"bert.embeddings": "embeddings", "bert.encoder": "encoder"}
    skipped_weights = {"pooler": POOLER, "bert.pooler": POOLER, "cls": HEADS}

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        for entry, only in _ONLY.items():
            if (value := getattr(config, entry)) != only:
                raise UnsupportedModelError(f"{entry} is {value!r}: BERT is built with {only!r}")
        self.embeddings = self.embeddings_class(config)
        layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.encoder: Any = nn.ModuleDict({"layer": layers})

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: Lengths = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map token ids and positions, ``[tokens]`` each, to hidden states.

        ``lengths`` are the tokens of each sequence; without, the tokens are one sequence. Token
        types are 0 unless given.
        """
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.embeddings(input_ids, positions, types)
        for layer in self.encoder["layer"]:
            x = layer(x, lengths)
        return x
