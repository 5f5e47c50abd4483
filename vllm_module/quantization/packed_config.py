"""``quantization_config`` of GPTQ and AWQ checkpoints: which layers have which packing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_module.errors import UnsupportedModelError
from vllm_module.quantization.config_refusals import unsupported
from vllm_module.quantization.packed import AWQ, GPTQ, GPTQ_OF_WORDS, GPTQ_V2, PackedMethod
from vllm_module.quantization.packed_gemv import AWQ_GEMV, GEMVMethod
from vllm_module.quantization.scheme import EVERY_LAYER

BITS = (2, 3, 4, 8)
_Bits = Literal[2, 3, 4, 8]
_GroupSize = Literal[-1] | Annotated[int, Field(gt=0)]
Targets = list[tuple[str, Any]]


class _Settings(BaseModel):
    """How a layer is quantized by GPTQ; for some layers, ``dynamic`` has other settings."""

    model_config = ConfigDict(extra="allow", strict=True)

    bits: _Bits = 4
    group_size: _GroupSize = 128
    desc_act: bool = False
    sym: bool = True
    pack_dtype: Literal["int32"] = "int32"


class _GPTQ(_Settings):
    """``quant_method: gptq``, of AutoGPTQ, GPTQModel and Optimum."""

    bits: _Bits
    group_size: _GroupSize
    checkpoint_format: str | None = None
    lm_head: bool = False
    dynamic: dict[str, dict[str, Any] | bool] | None = None
    modules_in_block_to_quantize: list[list[str] | str] | None = None


def gptq_rules(stored: Mapping[str, Any]) -> Targets:
    """Return the layers of a GPTQ checkpoint, as targets of rules, each with its method.

    Raises ``ValidationError`` or ``UnsupportedModelError`` for other settings than are supported.
    """
    config = _GPTQ(**stored)
    form = config.checkpoint_format or stored.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(
            f"quantization_config.checkpoint_format of config.json: expected gptq or gptq_v2, got "
            f"{form!r:.100}, whose tensors are reordered for one kernel: convert it back"
        )

    layout = GPTQ_V2
    if form == "gptq":
        layout = GPTQ_OF_WORDS if _is_of_gptqmodel(stored) else GPTQ

    def method(settings: _Settings) -> PackedMethod:
        size = None if settings.group_size == -1 else settings.group_size
        return PackedMethod(
            layout,
            settings.bits,
            size,
            settings.sym,
            settings.desc_act and size is not None,
        )

    common = {name: getattr(config, name) for name in _Settings.model_fields}
    rules: Targets = []
    for pattern, changes in (config.dynamic or {}).items():
        kept = not pattern.startswith("-:") and changes is not False
        target = "re:" + pattern.removeprefix("-:").removeprefix("+:")
        more = changes if isinstance(changes, dict) else {}
        rules.append((target, method(_Settings(**common | more)) if kept else None))
    if not config.lm_head:
        rules.append(("lm_head", None))
    if config.modules_in_block_to_quantize is None:
        return [*rules, (EVERY_LAYER, method(config))]
    for group in config.modules_in_block_to_quantize:
        rules += [(name, method(config)) for name in ([group] if isinstance(group, str) else group)]
    return rules


def _is_of_gptqmodel(stored: Mapping[str, Any]) -> bool:
    """Return whether GPTQModel is one of the writers: ``meta.quantizer: ["gptqmodel:2.0.0"]``."""
    meta = stored.get("meta")
    writers = meta.get("quantizer") if isinstance(meta, Mapping) else None
    writers = writers if isinstance(writers, list) else [writers]
    return any(isinstance(each, str) and each.startswith("gptqmodel") for each in writers)


class _AWQ(BaseModel):
    """``quant_method: awq``, of AutoAWQ."""

    model_config = ConfigDict(extra="allow", strict=True)

    bits: Literal[4]
    group_size: _GroupSize
    version: str | None = None
    format: str | None = None
    modules_to_not_convert: list[str] | None = None


def awq_rules(stored: Mapping[str, Any]) -> Targets:
    """Return the layers of an AWQ checkpoint, as :func:`gptq_rules` does."""
    config = _AWQ(**stored)
    form = "gemm"
    for entry in ("version", "format"):  # transformers 5 calls it format
        form = (getattr(config, entry) or form).lower()
        if form not in ("gemm", "gemv"):
            raise UnsupportedModelError(
                f"quantization_config.{entry} of config.json: expected gemm or gemv, got "
                f"{form!r:.100}, which packs weights in another order: convert it"
            )
    size = None if config.group_size == -1 else config.group_size
    if form == "gemv" and size is None:
        raise unsupported("group_size", "a positive number with gemv", config.group_size)
    method = PackedMethod(AWQ, 4, size, symmetric=False)
    if form == "gemv":
        method = GEMVMethod(AWQ_GEMV, 4, size, symmetric=False)
    # Nobody quantizes the head, and not everybody lists it.
    ignored = [*(config.modules_to_not_convert or ()), "lm_head"]
    return [
        *((target, None) for target in ignored),
        (EVERY_LAYER, method),
    ]


class _OfAutoRound(_Settings):
    """How a layer is quantized by AutoRound; for some layers, ``extra_config`` has others."""

    data_type: Literal["int"] = "int"
    act_bits: Annotated[int, Field(ge=16)] | None = None


class _AutoRound(_OfAutoRound):
    """``quant_method: auto-round``."""

    bits: _Bits
    group_size: _GroupSize
    packing_format: str = "auto_round:auto_gptq"
    block_name_to_quantize: list[str] | str | None = None
    extra_config: dict[str, dict[str, Any]] | None = None


# How each packing format is stored.
_PACKED_BY_AUTO_ROUND = {
    "auto_round:auto_gptq": GPTQ,
    "auto_round:gptq": GPTQ,
    "auto_round:auto_awq": AWQ,
    "auto_round:awq": AWQ,
}


def auto_round_rules(stored: Mapping[str, Any]) -> Targets:
    """Return the layers of an AutoRound checkpoint, as :func:`gptq_rules` does."""
    config = _AutoRound(**stored)
    layout = _PACKED_BY_AUTO_ROUND.get(config.packing_format)
    if layout is None:
        advice = "export the model again to one of these, or to llm_compressor"
        expected = f"{' or '.join(_PACKED_BY_AUTO_ROUND)} ({advice})"
        raise unsupported("packing_format", expected, config.packing_format)

    def method(where: str, settings: _OfAutoRound) -> PackedMethod:
        if layout is AWQ and settings.bits != 4:
            raise unsupported(f"{where}bits", f"4 with {config.packing_format}", settings.bits)
        size = None if settings.group_size == -1 else settings.group_size
        # Zeros are stored always in AWQ's layout, where nothing compares them with ``sym``.
        return PackedMethod(layout, settings.bits, size, settings.sym and layout is not AWQ)

    common = {name: getattr(config, name) for name in _OfAutoRound.model_fields}
    names: Targets = []
    patterns: Targets = []
    for name, changes in (config.extra_config or {}).items():
        bits, chosen = changes.get("bits"), None
        if not (isinstance(bits, int) and bits >= 16):  # more are full precision
            kept = {entry: value for entry, value in changes.items() if entry in common}
            chosen = method(f"extra_config.{name}.", _OfAutoRound(**common | kept))
        if re.search(r"[*+?^$()\[\]{}|\\]", name):  # such a pattern may match anywhere in a name
            anywhere = "" if name.startswith((".*", "^")) else ".*"
            patterns.append((f"re:{anywhere}(?:{name})", chosen))
        else:
            names.append((f"={name}", chosen))
    blocks: Sequence[str] | str = config.block_name_to_quantize or ()
    if isinstance(blocks, str):
        blocks = blocks.split(",")
    quantized = [block.strip() for block in blocks] or [EVERY_LAYER]
    ignored = [] if "lm_head" in quantized else ["lm_head"]
    return [
        *names,
        *patterns,
        *((target, None) for target in ignored),
        *((target, method("", config)) for target in quantized),
    ]
