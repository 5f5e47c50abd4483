"""What files of text and images share, of which only the language model is built."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import model_validator

from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import HFConfig

# As transformers 5 and 4 name the modules for images.
_IMAGES = "visual", "vision_tower", "multi_modal_projector"


class LanguageModelOnlyConfig(HFConfig):  # the last base class: its fields are those of all
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


class LanguageModelOnly(vLLMModule):
    weight_aliases = {
        "model.language_model": "model", "language_model.model": "model",
        "language_model.lm_head": "lm_head",
    }  # fmt: skip
    skipped_weights = dict.fromkeys(
        (*_IMAGES, *(f"model.{name}" for name in _IMAGES)), "the layers for images are not built"
    )
