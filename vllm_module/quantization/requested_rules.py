"""The rules that follow from what a user asks for and what a checkpoint is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from vllm_module.base.messages import shorten
from vllm_module.config import QuantizationConfig
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.quantization.compressed_rules import compressed_tensors_rules
from vllm_module.quantization.method import QuantizeMethod
from vllm_module.quantization.online_nf4 import OnlineNF4Method
from vllm_module.quantization.packed_online import OnlinePackedMethod
from vllm_module.quantization.rules import Rule, Rules
from vllm_module.quantization.scheme import EVERY_LAYER, ONLINE, Scheme
from vllm_module.quantization.stored_rules import (
    AutoRoundConfig,
    AWQConfig,
    BitsAndBytesConfig,
    FBGEMMConfig,
    FP8Config,
    GPTQConfig,
    ModelOptConfig,
    MXFP4Config,
    gguf_rules,
    invalid,
)

# What reads quantization_config, by its quant_method.
STORED: dict[str, Callable[[Mapping[str, Any]], Rules]] = {
    "fp8": FP8Config.read,
    "compressed-tensors": compressed_tensors_rules,
    "gguf": gguf_rules,
    "modelopt": ModelOptConfig.read,
    "mxfp4": MXFP4Config.read,
    "gptq": GPTQConfig.read,
    "awq": AWQConfig.read,
    "auto-round": AutoRoundConfig.read,
    "intel/auto-round": AutoRoundConfig.read,
    "bitsandbytes": BitsAndBytesConfig.read,
    "fbgemm_fp8": FBGEMMConfig.read,
}
_STORED_ONLY = STORED.keys() - {"fp8", "bitsandbytes"}  # not while loading
# By what quantization_config has as quant_method; people ask for them.
_ELSEWHERE = {
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "hqq": "HQQ",
    "quanto": "Quanto",
    "quark": "AMD Quark",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
_ADVICE = (
    "Take such a one, or the checkpoint in full precision, which can be quantized while it loads "
    "(quantization='fp8', 'int4_per_group' and others)"
)


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
        raise _unknown(method, stored)
    if asked not in (None, method):
        raise UnsupportedModelError(
            f"quantization {getattr(asked, 'scheme', asked)!r} was asked for, but "
            f"the checkpoint is quantized already, by {method!r} ({said_in(stored)}): leave it "
            "out, or take the checkpoint in full precision"
        )
    try:
        return STORED[method](stored).checked()
    except ValidationError as error:
        raise invalid(error) from None


def said_in(stored: object) -> str:
    """Return where a checkpoint says how it is quantized, for a message."""
    if isinstance(stored, Mapping) and stored.get("quant_method") == "gguf":
        return "its GGUF files have the types of tensors"
    return "quantization_config of config.json"


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
        (target, None if name == "none" else schemes[name])
        for target, name in asked.overrides.items()
    ]
    rules += [(target, None) for target in asked.ignore]
    # "lm_head" is ignored by default, and a model may have no head, or a tied one.
    written = {*asked.overrides, *({*asked.ignore} - {"lm_head"})}
    every: Rule = (EVERY_LAYER, schemes[asked.scheme])
    return Rules((*rules, every), tuple(sorted(written)), are_online=True).checked()


# Online schemes that have a method of their own.
_ONLINE_METHODS: dict[str, Callable[[QuantizationConfig], QuantizeMethod]] = {
    "bitsandbytes": lambda asked: OnlineNF4Method(),
    "int4_per_group": lambda asked: OnlinePackedMethod(group_size=asked.group_size),
}


def _unknown(method: object, stored: Mapping[str, object]) -> UnsupportedModelError:
    """Return the refusal of a ``quant_method`` that is none of :data:`STORED`."""
    if method is None and {"group_size", "bits"} <= stored.keys():
        by = "MLX, which packs weights in an order of its own"
    elif isinstance(method, str) and method in _ELSEWHERE:
        tool = f"{_ELSEWHERE[method]}, quantization_config of config.json"
        by = f"{method!r} ({tool}), whose tensors cannot be read here"
    elif method is None:
        by = "nothing that quantization_config of config.json names: it has no quant_method"
    else:
        by = f"{shorten(method)} (quantization_config of config.json), which is not known"
    return UnsupportedModelError(
        f"the checkpoint is quantized by {by}: expected one of {', '.join(STORED)}. {_ADVICE}"
    )
