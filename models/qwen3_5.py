"""Qwen3.5, text only: Qwen3-Next with other projections, dense or with experts in all layers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from vllm_module.hf_config import Count, NumExperts, Size
from vllm_module.models.qwen3_next import (
    Qwen3NextConfig,
    Qwen3NextDecoderLayer,
    Qwen3NextForCausalLM,
    Qwen3NextModel,
)


class Qwen3_5Config(Qwen3NextConfig):
    nested_config: ClassVar[str | None] = "text_config"

    num_experts: NumExperts | Literal[0] = 0


class Qwen3_5MoeConfig(Qwen3_5Config):
    # Transformers has experts in every layer, and weights that add up to one, whatever a file says.
    norm_topk_prob: Literal[True] = True
    decoder_sparse_step: Literal[1] = 1
    mlp_only_layers: Annotated[list[Count], Field(max_length=0)] | None = None
    num_experts: NumExperts | Literal[0] = 256
    num_experts_per_tok: Size = 8
    intermediate_size: Size = 1  # of no layer: files lack it


class Qwen3_5DecoderLayer(Qwen3NextDecoderLayer):
    stored_projections = "by_kind"


class Qwen3_5Model(Qwen3NextModel):
    layer_class = Qwen3_5DecoderLayer


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    config_class: type[Qwen3NextConfig] = Qwen3_5Config
    model_class = Qwen3_5Model
    weight_aliases = {"model.language_model": "model"}  # in files of text and images
    skipped_weights = {
        **Qwen3NextForCausalLM.skipped_weights,
        "model.visual": "the layers for images are not built",
    }


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    config_class = Qwen3_5MoeConfig
