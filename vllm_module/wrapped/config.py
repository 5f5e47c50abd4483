"""The entries of ``config.json`` for a model of transformers, which reads the file itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_module.errors import UnsupportedModelError
from vllm_module.hf_config import HFConfig
from vllm_module.messages import describe_error, printable_name
from vllm_module.wrapped.build import text_config
from vllm_module.wrapped.library import library

# What others here read of a configuration, where transformers' has it.
_LIFTED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
# Entries of the file that are kept as they are.
_KEPT = (
    "architectures",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "max_model_len",
    "model_impl",
)


class TransformersConfig(HFConfig):
    """A configuration that transformers checks; only what others here read is checked by us.

    Attributes:
        entries: all of the file, with overrides.

    """

    entries: dict[str, Any]

    if not TYPE_CHECKING:

        @classmethod
        def model_validate(cls, entries: Any, **options: Any) -> Any:
            """Read the entries of a file; not in a validator, whose errors pydantic wraps."""
            return super().model_validate(_lifted(entries), **options)


def _lifted(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return what others here read of ``entries``, and all of them."""
    config = config_of(entries)
    text = text_config(config)
    named = {name: getattr(text, name, None) for name in _LIFTED}
    named["max_position_embeddings"] = named["max_position_embeddings"] or getattr(
        text, "max_seq_len", None
    )
    lifted = {name: value for name, value in named.items() if type(value) is int and value > 0}
    # Models of recurrent layers have no heads, and are refused when they are built.
    lifted.setdefault("num_attention_heads", 1)
    kept = {name: entries[name] for name in _KEPT if name in entries}
    kept["tie_word_embeddings"] = bool(getattr(config, "tie_word_embeddings", False))
    return {**lifted, **kept, "entries": dict(entries)}


def config_of(entries: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of ``entries``.

    Raises ``UnsupportedModelError`` if there is no such model type, or transformers refuses one.
    """
    mapping = library("models.auto.configuration_auto").CONFIG_MAPPING
    kind = entries.get("model_type")
    if not isinstance(kind, str) or kind not in mapping:
        if "auto_map" in entries:
            raise UnsupportedModelError(
                f"model_type {printable_name(str(kind))} is defined by code of the checkpoint "
                "(auto_map of config.json), as trust_remote_code runs it elsewhere: here no code "
                "of a checkpoint is run. Expected a model_type of the transformers library"
            )
        made_by = entries.get("transformers_version")
        newer = f"; config.json was written by {printable_name(str(made_by))}" if made_by else ""
        raise UnsupportedModelError(
            f"transformers {library().__version__} knows no model_type {printable_name(str(kind))} "
            f"of config.json{newer}"
        )
    try:
        config_class = mapping[kind]
        return config_class.from_dict(config_class._decode_special_floats(dict(entries)))
    except Exception as error:  # code from outside
        raise UnsupportedModelError(
            f"transformers refuses config.json of model_type {printable_name(kind)}: "
            f"{describe_error(error)}"
        ) from error
