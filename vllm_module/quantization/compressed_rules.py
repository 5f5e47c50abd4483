"""The rules of checkpoints in the layout of compressed-tensors, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_module.base.messages import install
from vllm_module.errors import UnsupportedModelError
from vllm_module.quantization.kv_cache import KV_SCALES
from vllm_module.quantization.method import QuantizeMethod
from vllm_module.quantization.mxfp4 import BLOCK, MXFP4PackedMethod
from vllm_module.quantization.nvfp4 import BLOCK as BLOCK_OF_NVFP4
from vllm_module.quantization.nvfp4 import COMPRESSED_TENSORS as NVFP4
from vllm_module.quantization.nvfp4 import NVFP4Method
from vllm_module.quantization.packed import COMPRESSED_TENSORS, PackedMethod
from vllm_module.quantization.rules import Rule, Rules
from vllm_module.quantization.scheme import EVERY_LAYER, MXFP8, Activations, Scheme, Strategy
from vllm_module.quantization.stored_rules import BITS, invalid, unsupported


def compressed_tensors_rules(stored: Mapping[str, Any]) -> Rules:
    """Return the rules of ``config_groups``, names before patterns before classes."""
    try:
        from compressed_tensors.quantization import QuantizationConfig as Schema
    except ImportError:
        raise UnsupportedModelError(
            "the checkpoint is in the layout of compressed-tensors, whose library reads its "
            f"configuration: {install('compressed-tensors')}"
        ) from None
    stored, in_order = _without_actorder(stored)
    try:
        config = Schema.model_validate(stored)
    except Exception as error:  # the library raises many kinds for an invalid configuration
        raise invalid(error) from None
    # These change what layers compute. A sparsity of "dense" weights is only a statistic.
    for entry in ("transform_config", "sparsity_config"):
        given = stored.get(entry)
        dense = isinstance(given, Mapping) and given.get("format") == "dense"
        if given and not (entry == "sparsity_config" and dense):
            raise unsupported(entry, "none", given)
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
        kv_scales=KV_SCALES if _has_kv_scales(config.kv_cache_scheme) else None,
    )


def _exactly(target: str) -> str:
    """Return a target that matches one name only, as compressed-tensors' names do."""
    return target if target == EVERY_LAYER or target.startswith("re:") else f"={target}"


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
        raise unsupported(f"{where}.output_activations", "none", group.output_activations)
    strategy = getattr(weights, "strategy", None)
    strategy = str(getattr(strategy, "value", strategy))
    if weights is not None and weights.type == "int":
        return _integers(where, group, strategy, form, act_order)
    if form in _OF_FORM:
        return _small_floats(where, group, strategy, form)
    eight_bit_float = weights is not None and (weights.num_bits, weights.type) == (8, "float")
    if (
        not eight_bit_float
        or not weights.symmetric
        or strategy not in ("tensor", "channel", "block")
    ):
        expected = "symmetric FP8 per tensor, channel or block, integers, MXFP8, NVFP4 or MXFP4"
        raise unsupported(f"{where}.weights", expected, weights)
    activations: Activations = "none"
    if inputs is not None:
        if (inputs.num_bits, inputs.type, inputs.symmetric) != (8, "float", True):
            raise unsupported(f"{where}.input_activations", "symmetric FP8", inputs)
        activations = "dynamic" if inputs.dynamic else "static"
    block = tuple(weights.block_structure or (128, 128))
    return Scheme(strategy, activations=activations, block=block)  # type: ignore[arg-type]


# What floats of a format are: bits, and numbers in a group. Inputs of none are quantized.
_OF_FORM = {
    "mxfp4-pack-quantized": (4, "group", BLOCK),
    "mxfp8-quantized": (8, "group", BLOCK),
    "nvfp4-pack-quantized": (4, "tensor_group", BLOCK_OF_NVFP4),
}


def _small_floats(where: str, group: Any, strategy: str, form: str) -> Scheme | QuantizeMethod:
    weights, inputs = group.weights, group.input_activations
    bits, expected, size = _OF_FORM[form]
    kind = weights is not None and (weights.num_bits, weights.type, weights.symmetric, strategy)
    if kind != (bits, "float", True, expected) or weights.group_size != size:
        raise unsupported(f"{where}.weights", f"symmetric FP{bits} in groups of {size}", weights)
    if inputs is not None and inputs.type != "float":
        raise unsupported(f"{where}.input_activations", "none, or floats", inputs)
    if form.startswith("nvfp4"):
        # "local" scales of groups are computed, and that of all numbers is stored.
        return NVFP4Method(NVFP4, static_inputs=inputs is not None and inputs.dynamic is not True)
    if inputs is not None and not inputs.dynamic:
        raise unsupported(f"{where}.input_activations", "none, or dynamic floats", inputs)
    return MXFP8 if bits == 8 else MXFP4PackedMethod()


def _integers(
    where: str, group: Any, strategy: str, form: str, act_order: bool
) -> Scheme | QuantizeMethod:
    """Return the scheme of a group of integers, packed or one in a byte."""
    weights, inputs = group.weights, group.input_activations
    packed, dynamic = form == "pack-quantized", inputs is None or bool(inputs.dynamic)
    if form not in ("pack-quantized", "int-quantized", "naive-quantized"):
        raise unsupported(f"{where}.format", "pack-quantized or int-quantized", form)
    # Inputs of integers are not quantized, so what they would be quantized to changes nothing.
    if inputs is not None and (inputs.num_bits != 8 or inputs.type not in ("int", "float")):
        raise unsupported(f"{where}.input_activations", "8-bit integers or floats", inputs)
    if not dynamic and (packed or not inputs.symmetric):
        expected = "dynamic ones" if packed else "dynamic or symmetric ones"
        raise unsupported(f"{where}.input_activations", expected, inputs)
    if packed:
        if weights.num_bits not in BITS or strategy not in ("channel", "group"):
            expected = f"{', '.join(map(str, BITS))} bits per channel or group"
            raise unsupported(f"{where}.weights", expected, weights)
        size = weights.group_size if strategy == "group" else None
        method = PackedMethod(COMPRESSED_TENSORS, weights.num_bits, size, weights.symmetric)
        return replace(method, act_order=act_order and size is not None)
    # Fewer bits take a byte each, too, which the library writes for W4A8.
    if weights.num_bits > 8 or not weights.symmetric or strategy not in _EIGHT_BIT_STRATEGIES:
        expected = "at most 8 bits, symmetric, per tensor, channel or group"
        raise unsupported(f"{where}.weights", expected, weights)
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
        raise unsupported("kv_cache_scheme", "static FP8 per tensor", scheme)
    return True
