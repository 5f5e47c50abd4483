"""``quantization_config`` of config.json, as compressed-tensors reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vllm_module.errors import UnsupportedModelError
from vllm_module.quantization import Scheme

_MIXED = "mixed-precision"  # where groups have formats of their own


def quantization_config(layers: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """Return the entries for layers that are quantized by scheme, and for those that are not.

    Layers have the checkpoint's names. The most frequent scheme is that of every ``Linear``; others
    name their layers.
    """
    names: dict[Scheme, list[str]] = {}
    for name, scheme in layers.items():
        names.setdefault(scheme, []).append(name)
    first, *others = sorted(names, key=lambda scheme: -len(names[scheme]))
    groups = {"group_0": _group(first, ["Linear"])}
    for number, scheme in enumerate(others, 1):
        groups[f"group_{number}"] = _group(scheme, sorted(names[scheme]))
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else _MIXED,
        "config_groups": groups,
        "ignore": sorted(ignored),
    }


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    """Return a group of ``config_groups``."""
    is_float = scheme.dtype == torch.float8_e4m3fn
    numbers = {"num_bits": 8, "type": "float" if is_float else "int", "symmetric": True}
    weights: dict[str, Any] = numbers | {"strategy": scheme.strategy, "dynamic": False}
    # A scale for each token; for each token and block of inputs where weights have blocks.
    inputs: dict[str, Any] | None = numbers | {"strategy": "token", "dynamic": True}
    if scheme.strategy == "block":
        weights["block_structure"] = list(scheme.block)
        inputs = numbers | {"strategy": "group", "dynamic": True, "group_size": scheme.block[1]}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs if scheme.activations == "dynamic" else None,
        "output_activations": None,
        "format": "float-quantized" if is_float else "int-quantized",
    }


def demand_scheme(path: str, method: Any) -> Scheme:
    """Return the scheme of a layer's method.

    Raises ``UnsupportedModelError`` if compressed-tensors' layout is not known for it.
    """
    scheme = getattr(method, "scheme", None)
    if not isinstance(scheme, Scheme):
        raise UnsupportedModelError(
            f"{path} is held in {method}, which `convert` cannot write: expected a scheme of eight "
            "bits"
        )
    return scheme
