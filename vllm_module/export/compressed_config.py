"""Writing ``quantization_config`` of config.json in compressed-tensors' format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vllm_module.errors import UnsupportedModelError
from vllm_module.quantization import Scheme
from vllm_module.quantization.packed import COMPRESSED_TENSORS, PackedMethod
from vllm_module.quantization.packed_online import OnlinePackedMethod

_MIXED = "mixed-precision"  # format of a checkpoint whose groups have formats of their own

Stored = Scheme | PackedMethod  # method by which a layer is stored and will be loaded


def quantization_config(
    layers: Mapping[str, Stored], ignored: Iterable[str], *, whole_blocks: bool = True
) -> dict[str, Any]:
    """Return the entries for quantized layers, and for those that are not quantized.

    Layers have the checkpoint's names. The method of most layers is that of every ``Linear``; the
    other methods list the names of their layers. ``whole_blocks`` is false if the inputs of a layer
    with blocks end inside one.
    """
    names: dict[Stored, list[str]] = {}
    for name, stored in layers.items():
        names.setdefault(stored, []).append(name)
    first, *others = sorted(names, key=lambda stored: -len(names[stored]))
    groups = {"group_0": _group(first, ["Linear"], whole_blocks)}
    for number, stored in enumerate(others, 1):
        groups[f"group_{number}"] = _group(stored, sorted(names[stored]), whole_blocks)
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else _MIXED,
        "config_groups": groups,
        "ignore": sorted(ignored),
    }


def _group(stored: Stored, targets: list[str], whole_blocks: bool) -> dict[str, Any]:
    """Return one group of ``config_groups``."""
    weights: dict[str, Any] = {"dynamic": False}
    inputs: dict[str, Any] | None = None
    if isinstance(stored, PackedMethod):
        weights |= {"num_bits": stored.bits, "type": "int", "symmetric": stored.symmetric}
        weights |= {"strategy": "group", "group_size": stored.group_size}
        form = "pack-quantized"
    else:
        is_float = stored.dtype == torch.float8_e4m3fn
        numbers = {"num_bits": 8, "type": "float" if is_float else "int", "symmetric": True}
        weights |= numbers | {"strategy": stored.strategy}
        # A scale for each token, or for each token and block of inputs if weights have blocks:
        # compressed-tensors divides inputs into whole groups only.
        inputs = numbers | {"strategy": "token", "dynamic": True}
        if stored.strategy == "block":
            weights["block_structure"] = list(stored.block)
        if stored.strategy == "block" and whole_blocks:
            inputs = numbers | {"strategy": "group", "dynamic": True, "group_size": stored.block[1]}
        if stored.activations != "dynamic":
            inputs = None
        form = "float-quantized" if is_float else "int-quantized"
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": form,
    }


def stored_as(path: str, method: Any) -> Stored:
    """Return the method that will load a layer from the new checkpoint.

    Raises ``UnsupportedModelError`` if compressed-tensors' layout lacks the layer's method.
    """
    if isinstance(method, OnlinePackedMethod):
        return PackedMethod(COMPRESSED_TENSORS, method.bits, method.group_size)
    scheme = getattr(method, "scheme", None)
    if not isinstance(scheme, Scheme):
        raise UnsupportedModelError(
            f"{path} is held in {method}, which compressed-tensors has no layout for: expected a "
            "scheme of FP8, int8_per_channel_weight_only or int4_per_group"
        )
    return scheme
