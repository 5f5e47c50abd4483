"""LFM2: a gated convolution in most layers, and attention in the others."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.distributed import tensor_parallel_group
from vllm_module.errors import UnsupportedModelError
from vllm_module.hf_config import ConvKernel, Count, Positive, Size
from vllm_module.layers import (
    AttentionMetadata,
    CausalConv1d,
    ColumnParallelLinear,
    Positions,
    RecurrentLayer,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
)
from vllm_module.models.decoder import DecoderForCausalLM, DecoderModel
from vllm_module.models.llama import LlamaAttention, LlamaConfig, LlamaMLP
from vllm_module.parameters import Dim, Slot


class Lfm2Config(LlamaConfig):
    attribute_map: ClassVar = {
        "intermediate_size": "block_ff_dim", "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tie_embedding", "conv_kernel": "conv_L_cache",
    }  # fmt: skip
    kinds: ClassVar[tuple[str, ...]] = "conv", "full_attention"

    intermediate_size: Size = 12288
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 1e6
    max_position_embeddings: Size = 128000
    tie_word_embeddings: bool = True
    hidden_act: Literal["silu"] = "silu"
    conv_bias: bool = False
    conv_kernel: ConvKernel = 3
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: Positive | None = 1.0
    block_multiple_of: Size = 256
    full_attn_idxs: list[Count] | None = None

    @property
    def feed_forward_size(self) -> int:
        """The features of an MLP between its layers."""
        size = self.intermediate_size
        if self.block_auto_adjust_ff_dim:
            size = int(2 * size / 3)
            if self.block_ffn_dim_multiplier is not None:
                size = int(self.block_ffn_dim_multiplier * size)
                size = -(-size // self.block_multiple_of) * self.block_multiple_of
        return size

    def attends(self, layer: int) -> bool:
        """Tell whether a layer has attention. Raises ``UnsupportedModelError`` for other kinds."""
        if self.layer_types is None:
            return self.full_attn_idxs is None or layer in self.full_attn_idxs
        kind = self.layer_types[layer] if layer < len(self.layer_types) else None
        if kind not in self.kinds:
            raise UnsupportedModelError(
                f"layer_types has {kind!r} for layer {layer}: expected {' or '.join(self.kinds)} "
                f"for each of the {self.num_hidden_layers} layers"
            )
        return kind != "conv"


class Lfm2ShortConv(RecurrentLayer):
    sole_readers = {"x": "in_proj"}

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, bias, size = config.hidden_size, config.conv_bias, tensor_parallel_group().size
        # One group of slots: a checkpoint stores them together, one after the other.
        projected = Dim(tuple(Slot(name, hidden, size) for name in ("B", "C", "x")), groups=1)
        self.in_proj = ColumnParallelLinear(hidden, projected.size, bias, output=projected)
        self.conv = CausalConv1d(Dim.cut(hidden, size), config.conv_kernel, bias, silu=False)
        self.out_proj = RowParallelLinear(hidden, hidden, bias)
        self.state_shapes, self.state_dtypes = {"conv": self.conv.state_shape}, {"conv": None}

    def forward(self, x: torch.Tensor, metadata: AttentionMetadata | None) -> torch.Tensor:
        b, c, x = self.in_proj(x).chunk(3, dim=-1)
        return self.out_proj(c * self.over_sequences(self._convolve, metadata, b * x))

    def _convolve(self, x: torch.Tensor, metadata: AttentionMetadata | None) -> torch.Tensor:
        states, places = self.kept(metadata)
        return self.conv(x, states["conv"], places)


class Lfm2Attention(LlamaAttention):
    weight_aliases = {"out_proj": "o_proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm"}

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__(config, rotary_emb, layer_idx)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)


class Lfm2MLP(LlamaMLP):
    gate_up_names = "w1", "w3"
    weight_aliases = {"w2": "down_proj"}


class Lfm2DecoderLayer(vLLMModule):
    sole_readers = {"operator_norm": ("conv", "self_attn"), "ffn_norm": "feed_forward"}
    attention_class: Any = Lfm2Attention

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        self.operator_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn: nn.Module | None = None
        if config.attends(layer_idx):
            self.self_attn = self.attention_class(config, rotary_emb, layer_idx)
        else:
            self.conv = Lfm2ShortConv(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward = self.new_feed_forward(config, layer_idx)

    def new_feed_forward(self, config: Any, layer_idx: int) -> nn.Module:
        return Lfm2MLP(config, config.feed_forward_size)

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, residual = self.operator_norm(hidden_states, residual)
        if self.self_attn is None:
            hidden_states = self.conv(hidden_states, metadata)
        else:
            hidden_states = self.self_attn(positions, hidden_states, metadata)
        hidden_states, residual = self.ffn_norm(hidden_states, residual)
        return self.feed_forward(hidden_states), residual


class Lfm2Model(DecoderModel):
    layer_class: type[nn.Module] = Lfm2DecoderLayer
    final_norm = "embedding_norm"


class Lfm2ForCausalLM(DecoderForCausalLM):
    config_class: type[Lfm2Config] = Lfm2Config
    model_class: type[Lfm2Model] = Lfm2Model
