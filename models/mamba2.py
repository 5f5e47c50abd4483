"""Mamba-2 (arXiv:2405.21060): layers of one recurrence each, and no attention."""

from __future__ import annotations

from math import inf
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import nn

from vllm_module.base.messages import shorten
from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import ConvKernel, HFConfig, Positive, Size, TimeStepLimit
from vllm_module.layers import (
    AttentionMetadata,
    Mamba2Mixer,
    ParallelLMHead,
    RMSNorm,
    VocabParallelEmbedding,
)
from vllm_module.layers.stages import OtherStage, Passed


class Mamba2Config(HFConfig):
    attribute_map = {"num_attention_heads": "num_heads"}

    expand: Size = 2
    num_attention_heads: Size = 128
    head_dim: Size = 64
    state_size: Size = 128
    n_groups: Size = 8
    conv_kernel: ConvKernel = 4
    hidden_act: Literal["silu", "swish"] = "silu"
    layer_norm_epsilon: Positive = 1e-5
    use_bias: bool = False
    use_conv_bias: bool = True
    residual_in_fp32: bool = True
    time_step_limit: TimeStepLimit = (0.0, inf)

    @model_validator(mode="after")
    def _check_layer_types(self) -> Mamba2Config:
        others = set(self.layer_types or ()) - {"linear_attention", "mamba"}
        if others:
            raise ValueError(
                f"layer_types has {shorten(min(others))}: expected linear_attention for each layer"
            )
        return self

    @model_validator(mode="after")
    def _check_heads(self) -> Mamba2Config:
        heads, head_dim = self.num_attention_heads, self.head_dim
        given = "expand" in self.model_fields_set
        if given and heads * head_dim != self.expand * self.hidden_size:
            raise ValueError(
                f"num_heads {heads} * head_dim {head_dim} should be expand {self.expand} * "
                f"hidden_size {self.hidden_size}"
            )
        if heads % self.n_groups:
            raise ValueError(f"num_heads {heads} should be a multiple of n_groups {self.n_groups}")
        return self


class Mamba2Block(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = Mamba2Mixer(
            config.hidden_size,
            config.num_attention_heads,
            config.head_dim,
            config.n_groups,
            config.state_size,
            config.conv_kernel,
            config.layer_norm_epsilon,
            config.use_bias,
            config.use_conv_bias,
            time_step_limit=config.time_step_limit,
        )

    def forward(self, residual: torch.Tensor, metadata: AttentionMetadata | None) -> torch.Tensor:
        return residual + self.mixer(self.norm(residual.to(self.norm.weight.dtype)), metadata)


class Mamba2Model(vLLMModule):
    weight_aliases = {"embedding": "embeddings"}  # as in the authors' own files

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Mamba2Block(config) for _ in range(config.num_hidden_layers))
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(
        self, input_ids: torch.Tensor | Passed, metadata: AttentionMetadata | None = None
    ) -> Any:
        if isinstance(input_ids, tuple):  # by the pipeline stage before this one
            (residual,) = input_ids
        else:
            residual = self.embeddings(input_ids)
            if self.residual_in_fp32:
                residual = residual.float()
        for layer in self.layers:
            residual = layer(residual, metadata)
        if isinstance(self.norm_f, OtherStage):
            return (residual,)
        return self.norm_f(residual.to(self.norm_f.weight.dtype))


class Mamba2ForCausalLM(vLLMModule):
    config_class = Mamba2Config
    divided_layers = "backbone.layers"  # among pipeline stages

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.backbone = Mamba2Model(config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.tie_weights(self.backbone.embeddings)

    def forward(
        self,
        input_ids: torch.Tensor | Passed,
        positions: torch.Tensor,
        metadata: AttentionMetadata | None = None,
    ) -> Any:
        """Map token ids, ``[tokens]``, to hidden states; ``positions`` are not read.

        Without ``metadata`` the tokens are one whole sequence.
        """
        return self.backbone(input_ids, metadata)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states ``[..., hidden_size]`` to logits ``[..., vocab_size]``."""
        return self.lm_head(hidden)
