"""The configuration of a transformers model, whose class parses ``config.json`` itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_module.base.messages import printable_name, shorten
from vllm_module.base.outside import NO_FAILURES, blamed
from vllm_module.errors import UnsupportedModelError
from vllm_module.hf_config import HFConfig
from vllm_module.wrapped.build import class_for
from vllm_module.wrapped.custom_code import CAUSAL_LM, CONFIG, class_of, needs_code
from vllm_module.wrapped.library import library

# Entries that our code reads, by the attribute of transformers' configuration.
_LIFTED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
# Entries of the file that are kept unchanged.
_KEPT = (
    "architectures",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "max_model_len",
    "model_impl",
    "trusted_folder",
)
# Entries that are not from the file.
_OURS = frozenset(("model_impl", "trusted_folder", "max_model_len"))


_COUNTED, _MOST = ("layer", "layers", "blocks", "experts"), 2**12
# Entries that transformers reads elsewhere, or converts.
_ELSEWHERE = frozenset(
    (
        "_name_or_path", "auto_map", "quantization_config", "rope_theta", "rope_scaling",
        "bos_token_id", "eos_token_id", "pad_token_id", *_OURS,
    )
)  # fmt: skip


class TransformersConfig(HFConfig):
    """A configuration checked by transformers; our checks cover the entries that our code reads.

    Attributes:
        entries: all entries of the file, with overrides.

    """

    entries: dict[str, Any]

    @property
    def code_class(self) -> Any:
        """The model class from the checkpoint's own code; ``None`` if none is needed."""
        return _code_class(self.entries, self.trusted_folder)

    if not TYPE_CHECKING:

        @classmethod
        def model_validate(cls, entries: Any, **options: Any) -> Any:
            """Parse a file's entries; no validator does this, as pydantic would wrap its errors."""
            return super().model_validate(_lifted(entries), **options)


def _lifted(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that our code reads, and ``entries`` itself."""
    folder = entries.get("trusted_folder")
    config = config_of(entries, folder)
    # Imported here too, so that ranks in other processes find the copy that transformers makes.
    if _code_class(entries, folder) is not None:
        text = config
    else:
        text, _ = class_for(config, entries["architectures"][0])
    named = {name: getattr(text, name, None) for name in _LIFTED}
    named["max_position_embeddings"] = named["max_position_embeddings"] or getattr(
        text, "max_seq_len", None
    )
    limit = named.pop("max_position_embeddings")  # -1 means no limit
    if type(limit) is int and limit > 0:
        named["max_position_embeddings"] = limit
    lifted = {name: value for name, value in named.items() if type(value) is int}
    # Models without attention have no heads, and are refused when they are built.
    lifted.setdefault("num_attention_heads", 1)
    kept = {name: entries[name] for name in _KEPT if name in entries}
    kept["tie_word_embeddings"] = bool(getattr(config, "tie_word_embeddings", False))
    own = {name: value for name, value in entries.items() if name not in _OURS}
    return {**lifted, **kept, "entries": own}


def _code_class(entries: Mapping[str, Any], folder: str | None) -> Any:
    if not needs_code(entries):
        return None
    cls = class_of(entries, CAUSAL_LM, folder)
    if cls is None:
        named = ", ".join(sorted(map(printable_name, entries["auto_map"]))) or "nothing"
        raise UnsupportedModelError(
            f"auto_map of config.json names {named}, and no {CAUSAL_LM}: its code has no causal "
            "language model"
        )
    return cls


def config_of(entries: Mapping[str, Any], folder: str | None = None) -> Any:
    """Build the configuration object by transformers, or by the checkpoint's code.

    ``folder`` is the checkpoint's, if its code may be run.

    Raises ``UnsupportedModelError`` if there is no such model type, or its class refuses one.
    """
    mapping = library("models.auto.configuration_auto").CONFIG_MAPPING
    kind = entries.get("model_type")
    config_class = class_of(entries, CONFIG, folder) if needs_code(entries) else None
    if config_class is None and isinstance(kind, str) and kind in mapping:
        config_class = mapping[kind]
    if config_class is None:
        made_by = entries.get("transformers_version")
        newer = f"; config.json was written by {printable_name(str(made_by))}" if made_by else ""
        raise UnsupportedModelError(
            f"transformers {library().__version__} knows no model_type {printable_name(str(kind))} "
            f"of config.json{newer}"
        )
    _refuse_newer_entries(entries, config_class)
    _refuse_many(entries)
    # The quantization of weights is read by our code.
    own = {name: each for name, each in entries.items() if name != "quantization_config"}
    whose = f"{config_class.__name__} refuses config.json of model_type {shorten(kind)}"
    with blamed(whose, UnsupportedModelError):
        return config_class.from_dict(config_class._decode_special_floats(own))


def _refuse_many(entries: Mapping[str, Any]) -> None:
    """Raise for numbers of layers and experts whose names alone would fill the memory."""
    for name, value in entries.items():
        if isinstance(value, Mapping):
            _refuse_many(value)
        elif isinstance(value, int) and value > _MOST and name.endswith(_COUNTED):
            raise UnsupportedModelError(
                f"{printable_name(name)} of config.json is {shorten(value)}: expected at most "
                f"{_MOST}"
            )


def _refuse_newer_entries(entries: Mapping[str, Any], config_class: Any) -> None:
    """Raise for entries written by a newer transformers that the installed one would ignore.

    Files of this version or an older one may have entries that no class reads, such as a trainer's.
    """
    written, installed = entries.get("transformers_version"), library().__version__
    if not isinstance(written, str) or _version(written) <= _version(installed):
        return
    if unknown := _unknown(entries, config_class):
        raise UnsupportedModelError(
            f"config.json was written by transformers {printable_name(written)}, and "
            f"{config_class.__name__} of {installed} knows no "
            f"{', '.join(map(printable_name, sorted(unknown)[:20]))}: it would be ignored. Upgrade "
            "transformers, or set it to null in hf_overrides if it changes nothing"
        )


def _unknown(entries: Mapping[str, Any], config_class: Any) -> list[str]:
    """Return the entries that ``config_class``, or that of its text model, does not know."""
    try:
        config = config_class()
        known = {*dir(config), *config_class.attribute_map, *_ELSEWHERE}
    except BaseException as error:  # code from outside, which may need entries
        if isinstance(error, NO_FAILURES):
            raise
        return []
    unknown = [name for name, value in entries.items() if value is not None and name not in known]
    for name in config_class.sub_configs:
        part = entries.get(name)
        if name.startswith("text") and isinstance(part, Mapping):
            kind = part.get("model_type")
            mapping = library("models.auto.configuration_auto").CONFIG_MAPPING
            known_kind = isinstance(kind, str) and kind in mapping
            part_class = mapping[kind] if known_kind else type(getattr(config, name, None))
            if hasattr(part_class, "attribute_map"):
                unknown += [f"{name}.{each}" for each in _unknown(part, part_class)]
    return unknown


def _version(text: str) -> tuple[int, ...]:
    """Return major and minor number; entries change between these."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})", text)
    return tuple(map(int, found.groups())) if found else ()
