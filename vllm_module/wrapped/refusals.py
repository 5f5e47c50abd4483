"""Why a model of transformers is refused before it has memory: reasons, not names of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.paged_attention import MAX_HEAD_SIZE
from vllm_module.wrapped.probe import Call


def refuse_architecture(model: Any) -> None:
    """Raise ``UnsupportedModelError`` for a kind of model that the wrapper does not run."""
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False) or _has_cross_attention(model):
        raise UnsupportedModelError(f"{name} is part of an encoder-decoder, or attends across")
    if model._is_stateful:
        raise UnsupportedModelError(f"{name} keeps recurrent state, not keys and values")
    for path, module in model.named_modules():
        rope = getattr(module, "rope_type", None)
        kinds = set(map(str, rope.values() if isinstance(rope, dict) else [rope]))
        if found := kinds & {"dynamic", "longrope"}:
            raise UnsupportedModelError(
                f"{path} of {name} has rope scaling of type {', '.join(sorted(found))}, by which "
                "the longest sequence of a batch changes the others"
            )


def _has_cross_attention(model: Any) -> bool:
    parts = ("cross_attn", "encoder_attn", "crossattention")
    return any(path.rpartition(".")[2] in parts for path, _ in model.named_modules())


def refuse_calls(
    model: Any, calls: Mapping[str, Sequence[Call]], max_model_len: int | None, own: str
) -> None:
    """Raise ``UnsupportedModelError`` for what the calls of attention show.

    ``own`` says why attention that the model computes itself was not replaced, if it is known.
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
            chunk = call.rule.chunk
            if chunk is not None and (max_model_len is None or max_model_len > chunk):
                raise UnsupportedModelError(
                    f"{path} of {name} attends in chunks of {chunk} tokens: expected a "
                    f"max_model_len of at most {chunk}"
                )
