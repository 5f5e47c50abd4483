"""What decoder-only language models share: embedding, decoder layers, final norm and head.

A model's file subclasses these and sets the class of each part: ``attention_class``, ``mlp_class``,
``layer_class`` and ``model_class``, and ``norm_class`` if it is not ``RMSNorm``. ``qwen3.py`` is an
example. ``olmo2.py`` and ``cohere.py`` have decoder layers of their own.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.errors import UnsupportedModelError
from vllm_module.layers import (
    AttentionMetadata,
    ParallelLMHead,
    Positions,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    VocabParallelEmbedding,
)
from vllm_module.layers.stages import OtherStage, Passed


class DecoderLayer(vLLMModule):
    """Attention and an MLP, with a norm before each.

    ``hidden_states`` and ``residual`` are ``[tokens, hidden_size]``. The next norm adds them, so
    that one kernel adds and normalizes.
    """

    sole_readers = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}
    norm_class: type[nn.Module] = RMSNorm  # built from (hidden_size, eps), called like RMSNorm
    attention_class: type[nn.Module]  # built from (config, rotary_emb, layer_idx)
    mlp_class: type[nn.Module]  # built from (config)

    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self.attention_class(config, rotary_emb, layer_idx)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.mlp = self.new_mlp(config, layer_idx)

    def new_mlp(self, config: Any, layer_idx: int) -> nn.Module:
        """Return the layer's MLP; an override may choose its class by the layer's number."""
        return self.mlp_class(config)

    def forward(
        self,
        positions: Positions,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states, metadata)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class DecoderModel(vLLMModule):
    """The embedding, the decoder layers and the final norm."""

    norm_class: type[nn.Module] = RMSNorm  # as in DecoderLayer
    is_neox_style = True  # as in RotaryEmbedding
    layer_class: type[nn.Module]  # built and called like DecoderLayer
    final_norm = "norm"  # what a checkpoint calls the final norm

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        # One that all layers share, or one for each layer type.
        rotary_embs = RotaryEmbedding.of_layers(config, self.is_neox_style)
        self.rotary_emb = next(rotary_embs)  # where a checkpoint may have its frequencies
        self.layers = nn.ModuleList(
            self.layer_class(config, rotary_emb, layer_idx)
            for layer_idx, rotary_emb in enumerate(chain((self.rotary_emb,), rotary_embs))
        )
        norm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.add_module(self.final_norm, norm)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | Passed,
        positions: torch.Tensor,
        metadata: AttentionMetadata | None = None,
    ) -> Any:
        if isinstance(input_ids, tuple):  # by the pipeline stage before this one
            hidden_states, residual = input_ids
        else:
            hidden_states = self.embed_input_ids(input_ids)
            residual = torch.zeros_like(hidden_states)
        shared = Positions(positions)
        for layer in self.layers:
            hidden_states, residual = layer(shared, hidden_states, residual, metadata)
        norm = getattr(self, self.final_norm)
        if isinstance(norm, OtherStage):
            return hidden_states, residual
        hidden_states, _ = norm(hidden_states, residual)
        return hidden_states


class DecoderForCausalLM(vLLMModule):
    """A decoder model and the head that computes logits."""

    model_class: type[DecoderModel]
    divided_layers = "model.layers"  # among pipeline stages

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = self.model_class(config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        projections = [each for each in self.modules() if isinstance(each, QKVParallelLinear)]
        if config.stored_rotary_pairs and not all(
            any(slot.pairs for slot in each.output.slots) for each in projections
        ):
            raise UnsupportedModelError(
                f"{type(self).__name__} does not read heads whose halves are stored in turns, as "
                "stored_rotary_pairs of config.json says they are: expected a model with Llama's "
                "attention"
            )
        if config.tie_word_embeddings:
            self.lm_head.tie_weights(self.model.embed_tokens)

    def forward(
        self,
        input_ids: torch.Tensor | Passed,
        positions: torch.Tensor,
        metadata: AttentionMetadata | None = None,
    ) -> Any:
        """Map token ids and positions, ``[tokens]`` each, to hidden states.

        Without ``metadata`` the tokens are one whole sequence. A pipeline stage takes what the
        stage before it returned in place of token ids; the last one returns hidden states.
        """
        return self.model(input_ids, positions, metadata)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states ``[..., hidden_size]`` to logits ``[..., vocab_size]``."""
        return self.lm_head(hidden)
