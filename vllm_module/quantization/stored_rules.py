"""The rules of a quantized checkpoint, from the ``quantization_config`` of its config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from vllm_module.base.messages import shorten
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.quantization.bitsandbytes import (
    BitsAndBytes4BitMethod,
    BitsAndBytes8BitMethod,
)
from vllm_module.quantization.compressed_rules import compressed_tensors_rules
from vllm_module.quantization.config_refusals import invalid, unsupported
from vllm_module.quantization.gguf import GGUFMethod
from vllm_module.quantization.kv_cache import KV_SCALES
from vllm_module.quantization.method import QuantizeMethod
from vllm_module.quantization.mxfp4 import MXFP4Method
from vllm_module.quantization.nvfp4 import BLOCK as BLOCK_OF_NVFP4
from vllm_module.quantization.nvfp4 import MODELOPT, NVFP4Method
from vllm_module.quantization.packed_config import auto_round_rules, awq_rules, gptq_rules
from vllm_module.quantization.rules import Rule, Rules, checked_target
from vllm_module.quantization.scheme import EVERY_LAYER, FLOATS_OR_E8M0, MXFP8, Scheme


class _FP8(BaseModel):
    """``quant_method: fp8``, as in DeepSeek-V3, Qwen3-FP8, Mistral and vLLM's own exports."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: tuple[PositiveInt, PositiveInt] | None = None
    scale_fmt: Literal["float", "ue8m0"] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    kv_cache_scheme: object = None


def _fp8(stored: Mapping[str, Any]) -> Rules:
    try:
        config = _FP8(**stored)
    except ValidationError as error:
        raise invalid(error) from None
    block = config.weight_block_size
    if block and config.activation_scheme == "static":
        raise UnsupportedModelError(
            "quantization_config of config.json: static activations with a weight_block_size are "
            "not supported: expected dynamic ones"
        )
    if block:
        # DeepSeek-V3.1 stores powers of two as floats, others as their exponents.
        exponents = config.scale_fmt == "ue8m0"
        scheme = Scheme(
            "block",
            activations="none" if block == MXFP8.block else "dynamic",
            block=block,
            scale_name="weight_scale_inv",
            scale_dtypes=FLOATS_OR_E8M0 + ((torch.uint8,) if exponents else ()),
        )
    elif config.activation_scheme == "dynamic":
        scheme = Scheme("channel", or_tensor=True)  # which of them is seen in its tensors only
    else:
        scheme = Scheme("tensor", activations="static")
    # No published checkpoint quantizes the head, and not all of them list it as ignored.
    ignored = [*(config.modules_to_not_convert or ()), *(config.ignored_layers or ()), "lm_head"]
    rules = [(checked_target(target), None) for target in ignored]
    kv_scales = KV_SCALES if config.kv_cache_scheme else None
    return Rules((*rules, (EVERY_LAYER, scheme)), kv_scales=kv_scales)


class _ModelOpt(BaseModel):
    """``quant_method: modelopt``, or ``quantization`` of NVIDIA ModelOpt's hf_quant_config.json.

    The former lists what is left out as ``ignore``, the latter as ``exclude_modules``.
    """

    model_config = ConfigDict(extra="allow")

    quant_algo: str
    kv_cache_quant_algo: str | None = None
    kv_cache_scheme: object = None
    exclude_modules: list[str] | None = None
    ignore: list[str] | None = None
    group_size: int | None = None


# By quant_algo.
_MODELOPT: dict[str, Scheme | QuantizeMethod] = {
    "FP8": Scheme("tensor", activations="static"),
    "NVFP4": NVFP4Method(MODELOPT, static_inputs=True),
    "MXFP8": MXFP8,
}


def _modelopt(stored: Mapping[str, Any]) -> Rules:
    nested = stored.get("quantization")
    try:
        config = _ModelOpt(**(nested if isinstance(nested, Mapping) else stored))
    except ValidationError as error:
        raise invalid(error) from None
    method = _MODELOPT.get(config.quant_algo.upper())
    if method is None:
        expected = f"{' or '.join(_MODELOPT)} of quant_method modelopt"
        raise unsupported("quant_algo", expected, config.quant_algo)
    if isinstance(method, NVFP4Method) and config.group_size not in (None, BLOCK_OF_NVFP4):
        raise unsupported("group_size", f"{BLOCK_OF_NVFP4} for NVFP4", config.group_size)
    cache = config.kv_cache_quant_algo
    if cache is not None and cache.upper() != "FP8":
        raise unsupported("kv_cache_quant_algo", "FP8 or null", cache)
    # A * stands for any part of a name, dots included (Python's fnmatch, which ModelOpt uses).
    ignored = [*(config.exclude_modules or ()), *(config.ignore or ()), "lm_head"]
    rules: list[Rule] = [
        (checked_target(rf"re:{re.escape(target)}(\.|\Z)".replace(r"\*", ".*")), None)
        for target in ignored
    ]
    has_scales = cache is not None or bool(config.kv_cache_scheme)
    return Rules(
        (*rules, (EVERY_LAYER, method)),
        kv_scales=("k_proj.k_scale", "v_proj.v_scale") if has_scales else None,
    )


class _MXFP4(BaseModel):
    """``quant_method: mxfp4``, of gpt-oss: only experts are quantized."""

    model_config = ConfigDict(extra="allow")

    modules_to_not_convert: list[str] | None = None


def _mxfp4(stored: Mapping[str, Any]) -> Rules:
    try:
        config = _MXFP4(**stored)
    except ValidationError as error:
        raise invalid(error) from None
    # A * stands for one component of a name, or for a part of one.
    rules: list[Rule] = [
        (checked_target(rf"re:{re.escape(target)}(\.|\Z)".replace(r"\*", "[^.]*")), None)
        for target in config.modules_to_not_convert or ()
    ]
    return Rules((*rules, ("experts", MXFP4Method())))


class _BitsAndBytes(BaseModel):
    """``quant_method: bitsandbytes``, as transformers writes it.

    What inputs are computed in (``bnb_4bit_compute_dtype``) and which of them are outliers
    (``llm_int8_threshold``) does not change the weights.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: str | None = None
    llm_int8_has_fp16_weight: bool = False
    llm_int8_skip_modules: list[str] | None = None
    modules_to_not_convert: list[str] | None = None


def _bitsandbytes(stored: Mapping[str, Any]) -> Rules:
    try:
        config = _BitsAndBytes(**stored)
    except ValidationError as error:
        raise invalid(error) from None
    if config.load_in_4bit == config.load_in_8bit:
        got = f"both {str(config.load_in_4bit).lower()}"
        raise unsupported("load_in_4bit and load_in_8bit", "one of them to be true", got)
    storage = config.bnb_4bit_quant_storage
    if config.load_in_4bit and storage not in (None, "uint8"):
        raise unsupported("bnb_4bit_quant_storage", "uint8", storage)
    if config.load_in_8bit and config.llm_int8_has_fp16_weight:
        raise unsupported("llm_int8_has_fp16_weight", "false", "true: weights in full precision")
    method: QuantizeMethod = BitsAndBytes8BitMethod()
    if config.load_in_4bit:
        nested = config.bnb_4bit_use_double_quant
        method = BitsAndBytes4BitMethod(config.bnb_4bit_quant_type, nested=nested)
    skipped = [*(config.llm_int8_skip_modules or ()), *(config.modules_to_not_convert or ())]
    if config.llm_int8_skip_modules is None:
        skipped.append("lm_head")  # transformers leaves it out unless it is given a list
    return Rules((*((_part_of_name(target), None) for target in skipped), (EVERY_LAYER, method)))


def _part_of_name(target: str) -> str:
    """Return a target for an entry that transformers takes for a pattern, if it looks like one."""
    is_pattern = re.search(r"[*+?\\[\](){}|^$]", target)
    return checked_target(rf"re:(?:{target})(\.|\Z)" if is_pattern else target)


class _GGUFRules(Rules):
    """Rules that name each layer: one is found without a look at the others, of which are many."""

    def rule_of(self, name: str, fused: str = "", spellings: Iterable[str] = ()) -> Rule:
        for each in (name, *spellings):
            if (method := self._methods.get(each)) is not None:
                return f"={each}", method
        return "", None

    def joined(self, slots: Mapping[str, Scheme | QuantizeMethod | None]) -> QuantizeMethod | None:
        return GGUFMethod.of_slots(slots)

    def about(self, names: Sequence[str], fused: str) -> Rules:
        return self

    @cached_property
    def _methods(self) -> dict[str, Scheme | QuantizeMethod | None]:
        return {target.removeprefix("="): method for target, method in self.rules}


def _gguf(stored: Mapping[str, Any]) -> Rules:
    """Read what a source of GGUF files wrote: the type of each weight in blocks, by its layer."""
    types = stored.get("types")
    if not isinstance(types, Mapping) or not all(type(kind) is str for kind in types.values()):
        raise CheckpointFormatError(
            "quantization_config.types of config.json should map layers to types of GGUF files, "
            f"got {shorten(types)}: load the GGUF file itself"
        )
    methods = {kind: GGUFMethod(((None, kind),)) for kind in set(types.values())}
    return _GGUFRules(tuple((f"={name}", methods[kind]) for name, kind in types.items()))


def _packed(parse: Callable[[Mapping[str, Any]], list[Rule]]) -> Callable[..., Rules]:
    """Return a function that makes rules of what ``parse`` returns, and checks their targets."""

    def rules(stored: Mapping[str, Any]) -> Rules:
        try:
            parsed = parse(stored)
        except ValidationError as error:
            raise invalid(error) from None
        return Rules(tuple((checked_target(target), method) for target, method in parsed))

    return rules


# By quant_method.
STORED: dict[str, Callable[[Mapping[str, Any]], Rules]] = {
    "fp8": _fp8,
    "compressed-tensors": compressed_tensors_rules,
    "gguf": _gguf,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "gptq": _packed(gptq_rules),
    "awq": _packed(awq_rules),
    "auto-round": _packed(auto_round_rules),
    "bitsandbytes": _bitsandbytes,
}
