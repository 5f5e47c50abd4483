"""Reasons to refuse a transformers model before it has memory; none is a model's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.attention.paged_attention import MAX_HEAD_SIZE, most_of_group
from vllm_module.wrapped.build import class_for
from vllm_module.wrapped.config import config_of
from vllm_module.wrapped.custom_code import needs_code
from vllm_module.wrapped.probe import Call


def refusal_of(entries: Mapping[str, Any]) -> str | None:
    """Return why the wrapper refuses a model, if its configuration shows it, else None.

    ``entries`` are those of ``config.json``. A model without such a reason may be refused too.
    """
    try:
        config = config_of(entries)
        if not needs_code(entries):
            _, cls = class_for(config, entries["architectures"][0])
            _refuse_class(cls, config)
    except UnsupportedModelError as error:
        return str(error)
    return None


def _refuse_class(cls: Any, config: Any, *, attends_across: bool = False) -> None:
    if getattr(config, "is_encoder_decoder", False) or attends_across:
        raise UnsupportedModelError(
            f"{cls.__name__} is part of an encoder-decoder, or attends across"
        )
    if cls._is_stateful:
        raise UnsupportedModelError(f"{cls.__name__} keeps recurrent state, not keys and values")


def refuse_architecture(model: Any) -> None:
    """Raise ``UnsupportedModelError`` for kinds of models that the wrapper does not run."""
    _refuse_class(type(model), model.config, attends_across=_has_cross_attention(model))


def fix_frequencies(model: Any, max_model_len: int | None) -> None:
    """Keep rope frequencies that depend on the longest sequence fixed at those of short sequences.

    Raises ``UnsupportedModelError`` if sequences of ``max_model_len`` tokens use others.
    """
    for path, module in model.named_modules():
        rope = getattr(module, "rope_type", None)
        kinds = rope if isinstance(rope, dict) else {None: rope}
        for layer_type, kind in kinds.items():
            limit = _same_frequencies(module, str(kind), layer_type)
            if limit is None:
                continue
            if max_model_len is None or max_model_len > limit:
                raise UnsupportedModelError(
                    f"{path} of {type(model).__name__} has rope scaling of type {kind}, by which "
                    "the longest sequence of a batch changes the others: expected a max_model_len "
                    f"of at most {limit}, up to which it does not"
                )
            # Transformers does not recompute frequencies of this type.
            kinds[layer_type] = "default"
        if not isinstance(rope, dict) and kinds[None] != rope:
            module.rope_type = kinds[None]


def _same_frequencies(rotary: Any, kind: str, layer_type: str | None) -> int | None:
    """Return the sequence length up to which the frequencies of ``rotary`` do not change.

    ``kind`` is its type of rope, for layers of ``layer_type``. ``None`` if they never change.
    """
    if kind not in ("dynamic", "longrope"):
        return None
    if kind == "dynamic":
        limit = getattr(rotary, "original_max_seq_len", None)
    else:
        settings = getattr(rotary.config, "rope_parameters", None) or {}
        settings = settings.get(layer_type, {}) if layer_type else settings
        limit = settings.get("original_max_position_embeddings")
    return limit if isinstance(limit, int) else 0


def _has_cross_attention(model: Any) -> bool:
    parts = ("cross_attn", "encoder_attn", "crossattention")
    return any(path.rpartition(".")[2] in parts for path, _ in model.named_modules())


def refuse_calls(
    model: Any, calls: Mapping[str, Sequence[Call]], max_model_len: int | None, own: str
) -> None:
    """Raise ``UnsupportedModelError`` for attention calls that cannot be replaced.

    ``own`` is the reason why attention that the model computes itself was not replaced, if known.
    """
    name = type(model).__name__
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    total = sum(map(len, calls.values()))
    if total < layers:
        raise UnsupportedModelError(
            f"{name} calls attention through transformers' interface {total} times, and has "
            f"{layers} layers: the others compute it themselves, or keep another state"
            + (f" ({own})" if own else "")
        )
    for path, each in calls.items():
        for call in each:
            size = max(call.head_size, call.value_size)
            if size > MAX_HEAD_SIZE:
                raise UnsupportedModelError(
                    f"{path} of {name} has heads of {size} features, and paged attention computes "
                    f"at most {MAX_HEAD_SIZE}"
                )
            group, most = call.heads // max(call.kv_heads, 1), most_of_group(size)
            if group > most:
                raise UnsupportedModelError(
                    f"{path} of {name} has {group} query heads of {size} features for each "
                    f"key-value head, and paged attention computes at most {most}"
                )
            chunk = call.rule.chunk
            if chunk is not None and (max_model_len is None or max_model_len > chunk):
                raise UnsupportedModelError(
                    f"{path} of {name} attends in chunks of {chunk} tokens: expected a "
                    f"max_model_len of at most {chunk}"
                )
