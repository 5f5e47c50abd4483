"""What is said of a ``quantization_config`` of config.json that is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_module.base.messages import shorten
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError

# By what quantization_config has as quant_method; people ask for them.
_ELSEWHERE = {
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "fbgemm_fp8": "FBGEMM",
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


def unsupported(where: str, expected: str, got: object) -> UnsupportedModelError:
    """Return the refusal of the entry ``where``."""
    return UnsupportedModelError(
        f"quantization_config.{where} of config.json: expected {expected}, got {str(got)[:300]}"
    )


def invalid(error: Exception) -> CheckpointFormatError:
    """Return the refusal for the problems that a schema found."""
    return CheckpointFormatError(f"quantization_config of config.json is invalid: {error}"[:1000])


def unknown_method(
    method: object, stored: Mapping[str, object], known: Sequence[str]
) -> UnsupportedModelError:
    """Return the refusal of a ``quant_method`` that is none of ``known``."""
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
        f"the checkpoint is quantized by {by}: expected one of {', '.join(known)}. {_ADVICE}"
    )
