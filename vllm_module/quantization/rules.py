"""Rules that give layers a scheme: from the user's request, or from a checkpoint's config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from vllm_module.config import QuantizationConfig
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.messages import shorten
from vllm_module.quantization.bitsandbytes import (
    BitsAndBytes4BitMethod,
    BitsAndBytes8BitMethod,
    OnlineNF4Method,
)
from vllm_module.quantization.gguf import GGUFMethod
from vllm_module.quantization.method import QuantizeMethod
from vllm_module.quantization.mxfp4 import MXFP4Method
from vllm_module.quantization.packed import COMPRESSED_TENSORS, PackedMethod
from vllm_module.quantization.packed_config import BITS, awq_rules, gptq_rules
from vllm_module.quantization.packed_online import OnlinePackedMethod
from vllm_module.quantization.scheme import EVERY_LAYER, ONLINE, Activations, Scheme, Strategy

Rule = tuple[str, Scheme | QuantizeMethod | None]


@dataclass(frozen=True)
class Rules:
    """Pairs of target and scheme (``None``: not quantized); the first that matches a layer counts.

    A method stands for a format that has only one scheme.

    A target is one of:

    - a name, or consecutive components of one: it matches that module and everything below it;
    - ``=`` and a name: it matches that layer alone;
    - ``re:`` and a regular expression, which has to match the beginning of a name;
    - ``Linear``: it matches every layer that can be quantized.

    Attributes:
        demanded: the targets that the user wrote; each must have an effect.
        kv_cache: whether the checkpoint has scales for keys and values.

    """

    rules: tuple[Rule, ...]
    demanded: tuple[str, ...] = ()
    kv_cache: bool = False

    def rule_of(self, name: str, fused: str = "", spellings: Iterable[str] = ()) -> Rule:
        """Return the rule for the layer that a checkpoint calls ``name``.

        By its aliases it may also call it one of ``spellings``. ``fused`` is the path of the layer
        that has it as a slot, if there is one. A target may name that layer instead, but a pattern
        may not: patterns are written for the checkpoint's names, and ``.*v_proj`` would match
        ``qkv_proj``.
        """
        for target, scheme in self.rules:
            by_path = fused and not target.startswith(("re:", "="))
            if matches(target, name) or (by_path and matches(target, fused)):
                return target, scheme
            if any(matches(target, each) for each in spellings):
                return target, scheme
        return "", None

    def about(self, names: Sequence[str], fused: str) -> Rules:
        """Return the rules without those that match none of the layer's ``names``, nor ``fused``.

        A layer of many experts has many names, and a checkpoint may have a rule for each layer.
        """
        known = {*names, fused}
        joined = "\n".join(f".{name}." for name in known)

        def may_match(target: str) -> bool:
            if target.startswith("="):
                return target[1:] in known
            return target == EVERY_LAYER or target.startswith("re:") or f".{target}." in joined

        return replace(self, rules=tuple(rule for rule in self.rules if may_match(rule[0])))


def matches(target: str, name: str) -> bool:
    """Tell whether ``target`` matches the layer ``name``."""
    if target.startswith("="):
        return target[1:] == name
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target == EVERY_LAYER or f".{target}." in f".{name}."


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
                f"{_names((*ONLINE, *_ONLINE_METHODS))}"
            )
        return None if asked is None else online_rules(asked)
    if not isinstance(stored, Mapping):
        raise CheckpointFormatError(
            f"quantization_config of config.json must be an object, got {stored!r:.100}"
        )
    method = stored.get("quant_method")
    if not isinstance(method, str) or method not in _STORED:
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {method!r:.100} (quantization_config of config.json): "
            f"expected one of {_names(_STORED)}"
        )
    if asked not in (None, method):
        raise UnsupportedModelError(
            f"quantization {getattr(asked, 'scheme', asked)!r} was asked for, but "
            f"the checkpoint is quantized already, by {method!r} (quantization_config of "
            "config.json): leave it out, or take the checkpoint in full precision"
        )
    return _STORED[method](stored)


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
        (_target(target), None if name == "none" else schemes[name])
        for target, name in asked.overrides.items()
    ]
    rules += [(_target(target), None) for target in asked.ignore]
    # "lm_head" is ignored by default, and a model may have no head, or a tied one.
    written = {*asked.overrides, *({*asked.ignore} - {"lm_head"})}
    return Rules((*rules, (EVERY_LAYER, schemes[asked.scheme])), tuple(sorted(written)))


# Online schemes that have a method of their own.
_ONLINE_METHODS: dict[str, Callable[[QuantizationConfig], QuantizeMethod]] = {
    "bitsandbytes": lambda asked: OnlineNF4Method(),
    "int4_per_group": lambda asked: OnlinePackedMethod(group_size=asked.group_size),
}


class _FP8(BaseModel):
    """``quant_method: fp8``, as in DeepSeek-V3, Qwen3-FP8, Mistral and vLLM's own exports."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: tuple[PositiveInt, PositiveInt] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    kv_cache_scheme: object = None


def _fp8(stored: Mapping[str, Any]) -> Rules:
    try:
        config = _FP8(**stored)
    except ValidationError as error:
        raise _invalid(error) from None
    block = config.weight_block_size
    if block and config.activation_scheme == "static":
        raise UnsupportedModelError(
            "quantization_config of config.json: static activations with a weight_block_size are "
            "not supported: expected dynamic ones"
        )
    scheme = (
        Scheme("block", block=block, scale_name="weight_scale_inv")
        if block
        else Scheme("tensor", activations=config.activation_scheme)
    )
    # No published checkpoint quantizes the head, and not all of them list it as ignored.
    ignored = [*(config.modules_to_not_convert or ()), *(config.ignored_layers or ()), "lm_head"]
    rules = [(_target(target), None) for target in ignored]
    return Rules((*rules, (EVERY_LAYER, scheme)), kv_cache=bool(config.kv_cache_scheme))


class _MXFP4(BaseModel):
    """``quant_method: mxfp4``, of gpt-oss: only experts are quantized."""

    model_config = ConfigDict(extra="allow")

    modules_to_not_convert: list[str] | None = None


def _mxfp4(stored: Mapping[str, Any]) -> Rules:
    try:
        config = _MXFP4(**stored)
    except ValidationError as error:
        raise _invalid(error) from None
    # A * stands for one component of a name, or for a part of one.
    rules: list[Rule] = [
        (_target(rf"re:{re.escape(target)}(\.|\Z)".replace(r"\*", "[^.]*")), None)
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
        raise _invalid(error) from None
    if config.load_in_4bit == config.load_in_8bit:
        got = f"both {str(config.load_in_4bit).lower()}"
        raise _unsupported("load_in_4bit and load_in_8bit", "one of them to be true", got)
    storage = config.bnb_4bit_quant_storage
    if config.load_in_4bit and storage not in (None, "uint8"):
        raise _unsupported("bnb_4bit_quant_storage", "uint8", storage)
    if config.load_in_8bit and config.llm_int8_has_fp16_weight:
        raise _unsupported("llm_int8_has_fp16_weight", "false", "true: weights in full precision")
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
    return _target(rf"re:(?:{target})(\.|\Z)" if is_pattern else target)


def _compressed_tensors(stored: Mapping[str, Any]) -> Rules:
    try:
        from compressed_tensors.quantization import QuantizationConfig as Schema
    except ImportError:
        raise UnsupportedModelError(
            "the checkpoint is in the layout of compressed-tensors, whose library reads its "
            "configuration: pip install 'vllm-module[compressed-tensors]'"
        ) from None
    stored, in_order = _without_actorder(stored)
    try:
        config = Schema.model_validate(stored)
    except Exception as error:  # the library raises many kinds for an invalid configuration
        raise _invalid(error) from None
    for entry in ("transform_config", "sparsity_config"):  # these change what layers compute
        if stored.get(entry):
            raise _unsupported(entry, "none", stored[entry])
    groups: list[Rule] = []
    for name, group in config.config_groups.items():
        form = str(group.format or config.format)
        scheme = _compressed_scheme(f"config_groups.{name}", group, form, name in in_order)
        groups += [(target, scheme) for target in group.targets]
    # The library's order: names first, then patterns, then classes.
    groups.sort(key=lambda rule: (rule[0] == EVERY_LAYER, rule[0].startswith("re:"), rule[0]))
    rules = [*((target, None) for target in config.ignore or ()), *groups]
    return Rules(
        tuple((_exactly(target), scheme) for target, scheme in rules),
        kv_cache=_has_kv_scales(config.kv_cache_scheme),
    )


def _exactly(target: str) -> str:
    """Return a target that matches one name only, as compressed-tensors' names do."""
    if target == EVERY_LAYER or target.startswith("re:"):
        return _target(target)
    return f"={target}"


def _without_actorder(stored: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the configuration without an entry that the library refuses, and where it was.

    With ``actorder: group``, as older versions wrote, the inputs of a group are anywhere.
    """
    groups = stored.get("config_groups")
    if not isinstance(groups, Mapping):
        return dict(stored), set()
    kept, found = {}, set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("actorder") in ("group", "dynamic", True):
            group = {**group, "weights": {**weights, "actorder": None}}
            found.add(name)
        kept[name] = group
    return {**stored, "config_groups": kept}, found


def _compressed_scheme(
    where: str, group: Any, form: str, act_order: bool
) -> Scheme | QuantizeMethod:
    weights, inputs = group.weights, group.input_activations
    if group.output_activations is not None:
        raise _unsupported(f"{where}.output_activations", "none", group.output_activations)
    strategy = getattr(weights, "strategy", None)
    strategy = str(getattr(strategy, "value", strategy))
    if weights is not None and weights.type == "int":
        return _integers(where, group, strategy, form, act_order)
    eight_bit_float = weights is not None and (weights.num_bits, weights.type) == (8, "float")
    if (
        not eight_bit_float
        or not weights.symmetric
        or strategy not in ("tensor", "channel", "block")
    ):
        raise _unsupported(
            f"{where}.weights", "symmetric FP8 per tensor, channel or block, or integers", weights
        )
    activations: Activations = "none"
    if inputs is not None:
        if (inputs.num_bits, inputs.type, inputs.symmetric) != (8, "float", True):
            raise _unsupported(f"{where}.input_activations", "symmetric FP8", inputs)
        activations = "dynamic" if inputs.dynamic else "static"
    block = tuple(weights.block_structure or (128, 128))
    return Scheme(strategy, activations=activations, block=block)  # type: ignore[arg-type]


def _integers(
    where: str, group: Any, strategy: str, form: str, act_order: bool
) -> Scheme | QuantizeMethod:
    """Return the scheme of a group of integers, packed or one in a byte."""
    weights, inputs = group.weights, group.input_activations
    packed, dynamic = form == "pack-quantized", inputs is None or bool(inputs.dynamic)
    if form not in ("pack-quantized", "int-quantized", "naive-quantized"):
        raise _unsupported(f"{where}.format", "pack-quantized or int-quantized", form)
    if inputs is not None and (inputs.num_bits, inputs.type) != (8, "int"):
        raise _unsupported(f"{where}.input_activations", "8-bit integers", inputs)
    if not dynamic and (packed or not inputs.symmetric):
        expected = "dynamic ones" if packed else "dynamic or symmetric ones"
        raise _unsupported(f"{where}.input_activations", expected, inputs)
    if packed:
        if weights.num_bits not in BITS or strategy not in ("channel", "group"):
            expected = f"{_names(map(str, BITS))} bits per channel or group"
            raise _unsupported(f"{where}.weights", expected, weights)
        size = weights.group_size if strategy == "group" else None
        method = PackedMethod(COMPRESSED_TENSORS, weights.num_bits, size, weights.symmetric)
        return replace(method, act_order=act_order and size is not None)
    if weights.num_bits != 8 or not weights.symmetric or strategy not in _EIGHT_BIT_STRATEGIES:
        expected = "8 bits, symmetric, per tensor, channel or group"
        raise _unsupported(f"{where}.weights", expected, weights)
    activations: Activations = "none"
    if inputs is not None:
        activations = "dynamic" if dynamic else "static"
    return Scheme(
        _EIGHT_BIT_STRATEGIES[strategy], torch.int8, activations, (1, weights.group_size or 1)
    )


# A group is a block of one row.
_EIGHT_BIT_STRATEGIES: dict[str, Strategy] = {
    "tensor": "tensor", "channel": "channel", "group": "block"
}  # fmt: skip


def _has_kv_scales(scheme: Any) -> bool:
    if scheme is None:
        return False
    strategy = str(getattr(scheme.strategy, "value", scheme.strategy))
    if (scheme.num_bits, scheme.type, scheme.dynamic, strategy) != (8, "float", False, "tensor"):
        raise _unsupported("kv_cache_scheme", "static FP8 per tensor", scheme)
    return True


def _unsupported(where: str, expected: str, got: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"quantization_config.{where} of config.json: expected {expected}, got {str(got)[:300]}"
    )


def _invalid(error: Exception) -> CheckpointFormatError:
    return CheckpointFormatError(f"quantization_config of config.json is invalid: {error}"[:1000])


class RulesByName(Rules):
    """Rules that name each layer: one is found without a look at the others, of which are many."""

    def rule_of(self, name: str, fused: str = "", spellings: Iterable[str] = ()) -> Rule:
        for each in (name, *spellings):
            if (method := self._methods.get(each)) is not None:
                return f"={each}", method
        return "", None

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
    return RulesByName(tuple((f"={name}", methods[kind]) for name, kind in types.items()))


def _packed(parse: Callable[[Mapping[str, Any]], list[Rule]]) -> Callable[..., Rules]:
    """Return a function that makes rules of what ``parse`` returns, and checks their targets."""

    def rules(stored: Mapping[str, Any]) -> Rules:
        try:
            parsed = parse(stored)
        except ValidationError as error:
            raise _invalid(error) from None
        return Rules(tuple((_target(target), method) for target, method in parsed))

    return rules


_STORED: dict[str, Callable[[Mapping[str, Any]], Rules]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gguf": _gguf,
    "mxfp4": _mxfp4,
    "gptq": _packed(gptq_rules),
    "awq": _packed(awq_rules),
    "bitsandbytes": _bitsandbytes,
}
_STORED_ONLY = _STORED.keys() - {"fp8", "bitsandbytes"}  # which a user may ask for while loading


def _target(target: str) -> str:
    """Return ``target``, or raise if it is a pattern that is invalid or slow to match.

    Patterns come from files, and Python's matcher can take exponential time.
    """
    if target.startswith("re:"):
        pattern = target.removeprefix("re:")
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointFormatError(
                f"{shorten(target)} is not a valid regular expression: {error}"
            ) from None
        if re.search(r"\)[*+?{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 4:
            raise UnsupportedModelError(
                f"{shorten(target)} could take forever to match: expected at most 4 of * + {{ and "
                "no repeated group"
            )
    return target


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
