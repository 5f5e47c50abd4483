"""The rules that follow from what a user asks for and what a checkpoint is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm_module.config import QuantizationConfig
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.quantization.bitsandbytes import OnlineNF4Method
from vllm_module.quantization.config_refusals import unknown_method
from vllm_module.quantization.method import QuantizeMethod
from vllm_module.quantization.packed_online import OnlinePackedMethod
from vllm_module.quantization.rules import Rule, Rules, checked_target
from vllm_module.quantization.scheme import EVERY_LAYER, ONLINE, Scheme
from vllm_module.quantization.stored_rules import STORED

_STORED_ONLY = STORED.keys() - {"fp8", "bitsandbytes"}  # not while loading


def rules_for(asked: str | QuantizationConfig | None, stored: object) -> Rules | None:
    """Return the rules for a checkpoint, or ``None`` if nothing is quantized.

    Args:
        asked: ``ModelConfig.quantization``.
        stored: ``quantization_config`` of the checkpoint's config.json, ``None`` if there is none.

    Raises:
        UnsupportedModelError: the two contradict each other, or the format is not supported.
        CheckpointFormatError: ``stored`` is invalid.

    """
    if stored is None:
        if isinstance(asked, str) and asked in _STORED_ONLY:
            raise UnsupportedModelError(
                f"quantization {asked!r} was asked for, but config.json has no "
                "quantization_config: to quantize while loading, ask for one of "
                f"{', '.join((*ONLINE, *_ONLINE_METHODS))}"
            )
        return None if asked is None else online_rules(asked)
    if not isinstance(stored, Mapping):
        raise CheckpointFormatError(
            f"quantization_config of config.json must be an object, got {stored!r:.100}"
        )
    method = stored.get("quant_method")
    if method is None and (stored.get("load_in_8bit") or stored.get("load_in_4bit")):
        method = "bitsandbytes"  # which the first checkpoints of it do not say
    if not isinstance(method, str) or method not in STORED:
        raise unknown_method(method, stored, tuple(STORED))
    if asked not in (None, method):
        raise UnsupportedModelError(
            f"quantization {getattr(asked, 'scheme', asked)!r} was asked for, but "
            f"the checkpoint is quantized already, by {method!r} (quantization_config of "
            "config.json): leave it out, or take the checkpoint in full precision"
        )
    return STORED[method](stored)


def online_rules(asked: str | QuantizationConfig) -> Rules:
    """Return the rules that quantize a full-precision checkpoint while it is loaded."""
    if isinstance(asked, str):
        name: Any = "fp8_per_tensor" if asked == "fp8" else asked
        asked = QuantizationConfig(scheme=name)
    schemes: dict[str, Scheme | QuantizeMethod] = {
        name: replace(scheme, block=asked.weight_block_size) for name, scheme in ONLINE.items()
    }
    schemes |= {name: method(asked) for name, method in _ONLINE_METHODS.items()}
    rules: list[Rule] = [
        (checked_target(target), None if name == "none" else schemes[name])
        for target, name in asked.overrides.items()
    ]
    rules += [(checked_target(target), None) for target in asked.ignore]
    # "lm_head" is ignored by default, and a model may have no head, or a tied one.
    written = {*asked.overrides, *({*asked.ignore} - {"lm_head"})}
    return Rules((*rules, (EVERY_LAYER, schemes[asked.scheme])), tuple(sorted(written)))


# Online schemes that have a method of their own.
_ONLINE_METHODS: dict[str, Callable[[QuantizationConfig], QuantizeMethod]] = {
    "bitsandbytes": lambda asked: OnlineNF4Method(),
    "int4_per_group": lambda asked: OnlinePackedMethod(group_size=asked.group_size),
}
