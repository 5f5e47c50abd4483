"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, text only: the decoders of Qwen2 and Qwen3.

Experts are stored with inputs first, as in published files. transformers 5 writes outputs first;
such a file is refused by its shapes.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from vllm_module.hf_config import HFConfig, Positive
from vllm_module.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from vllm_module.models.qwen2_moe import SparseMoeBlock
from vllm_module.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from vllm_module.models.qwen3_moe import (
    Qwen3MoeConfig,
    Qwen3MoeDecoderLayer,
    Qwen3MoeForCausalLM,
    Qwen3MoeModel,
)

_ALIASES = {"model.language_model": "model"}
_SKIPPED = dict.fromkeys(("visual", "model.visual"), "the layers for images are not built")


class TextOfImagesConfig(HFConfig):
    nested_config: ClassVar[str | None] = "text_config"

    @model_validator(mode="before")
    @classmethod
    def _rotate_text(cls, entries: Any) -> Any:
        """Take ``mrope`` as ``default``: the three positions of a token of text are one number."""
        outer = dict(entries) if isinstance(entries, dict) else {}
        if isinstance(nested := outer.get("text_config"), dict):
            outer["text_config"] = _with_one_position(nested)
        return _with_one_position(outer) if outer else entries


def _with_one_position(entries: dict[str, Any]) -> dict[str, Any]:
    rope = entries.get("rope_scaling")
    if isinstance(rope, dict) and "mrope" in (rope.get("rope_type"), rope.get("type")):
        kept = {name: value for name, value in rope.items() if name != "type"}
        return {**entries, "rope_scaling": {**kept, "rope_type": "default"}}
    return entries


class Qwen2VLConfig(TextOfImagesConfig, Qwen2Config):
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 1000000.0


class Qwen2VLForConditionalGeneration(Qwen2ForCausalLM):
    config_class = Qwen2VLConfig
    weight_aliases = _ALIASES
    skipped_weights = _SKIPPED


class Qwen3VLConfig(TextOfImagesConfig, Qwen3Config):
    rope_theta: Positive = 500000.0
    use_sliding_window: Literal[False] = False


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    config_class = Qwen3VLConfig
    weight_aliases = _ALIASES
    skipped_weights = _SKIPPED


class Qwen3VLMoeConfig(TextOfImagesConfig, Qwen3MoeConfig):
    # Transformers makes weights add up to one, whatever a file says.
    norm_topk_prob: Literal[True] = True
    rope_theta: Positive = 500000.0
    use_sliding_window: Literal[False] = False


class Qwen3VLMoeSparseMoeBlock(SparseMoeBlock):
    layout = {"shard_names": None, "transposed": True}


class Qwen3VLMoeDecoderLayer(Qwen3MoeDecoderLayer):
    moe_class = Qwen3VLMoeSparseMoeBlock


class Qwen3VLMoeModel(Qwen3MoeModel):
    layer_class = Qwen3VLMoeDecoderLayer


class Qwen3VLMoeForConditionalGeneration(Qwen3MoeForCausalLM):
    config_class = Qwen3VLMoeConfig
    model_class = Qwen3VLMoeModel
    weight_aliases = _ALIASES
    skipped_weights = _SKIPPED
