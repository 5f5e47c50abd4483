"""Reading the rope scaling of ``config.json`` from keys and tensors of GGUF files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.weights.gguf.file import GGUFFile
from vllm_module.weights.gguf.metadata import Metadata

# Settings of YaRN, and the entries of config.json for them.
_YARN = {
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
# Settings without an entry in config.json, and the only value accepted.
_USUAL = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
_USUAL_WITHOUT_YARN = {
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    _LOG_MULTIPLIER: 0.0,
}
_WITHIN = 1e-3  # relative difference accepted between factors: files hold float32


def rope_scaling(of: Metadata) -> dict[str, Any] | None:
    """Return the rope scaling, from keys or from a tensor of frequency factors."""
    factor = of.get("rope.scaling.factor", of.get("rope.scale_linear"))
    kind = of.get("rope.scaling.type", "linear" if factor else "none")  # llama.cpp's default
    long, short = of.factors("rope_factors_long.weight"), of.factors("rope_factors_short.weight")
    each = of.factors("rope_freqs.weight")
    original = of.get("rope.scaling.original_context_length")
    if each is not None and (long or short or kind not in ("none", "linear") or factor):
        raise UnsupportedModelError(
            f"{of.where}: rope_freqs.weight has a factor for each frequency, and the metadata has "
            f"another rope scaling, {shorten(kind)}: expected one of the two"
        )
    if (long is None) != (short is None):
        raise CheckpointFormatError(
            f"{of.where}: expected both of rope_factors_long.weight and rope_factors_short.weight, "
            "or neither; download the model again"
        )
    has_yarn = kind == "yarn" and long is None
    for key, usual in {**_USUAL, **({} if has_yarn else _USUAL_WITHOUT_YARN)}.items():
        taken = long is not None and key == "rope.scaling.attn_factor"
        if not taken and of.get(key, usual) != usual:
            raise UnsupportedModelError(
                f"{of.where}: {of.architecture}.{key} is {shorten(of.get(key))}: expected {usual:g}"
            )
    if each is not None:
        # Llama 3.1 computes these factors from four settings, which files lack.
        if all(one == 1 for one in each):
            return None
        long = short = each
        attention_factor, original = 1.0, of.need("context_length")
    elif long is not None:
        original = of.need("rope.scaling.original_context_length")
        attention_factor = of.get("rope.scaling.attn_factor")
    if long is not None:
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
        }
        return scaling if attention_factor is None else {
            **scaling, "attention_factor": attention_factor
        }  # fmt: skip
    if kind == "none" or (kind == "linear" and not factor):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": of.need("rope.scaling.factor") if factor is None else factor,
            "original_max_position_embeddings": of.need("rope.scaling.original_context_length"),
        }
        scaling |= {entry: of.get(key) for key, entry in _YARN.items() if of.get(key) is not None}
        # The value of mscale and mscale_all_dim, which are equal wherever the key is written.
        if multiplier := of.get(_LOG_MULTIPLIER):
            if not isinstance(multiplier, float):
                raise CheckpointFormatError(
                    f"{of.where}: {of.architecture}.{_LOG_MULTIPLIER} should be a float, and is "
                    f"{shorten(multiplier)}; download the model again"
                )
            # The converter of deepseek2 multiplies it by the 0.1 of the formula.
            mscale = multiplier * 10 if of.architecture == "deepseek2" else multiplier
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(mscale, 6))
        # No key has this: gpt-oss was trained with bounds that are not rounded.
        return {**scaling, "truncate": False} if of.architecture == "gpt-oss" else scaling
    raise UnsupportedModelError(
        f"{of.where}: rope.scaling.type is {shorten(kind)}: expected none, linear, yarn, or "
        "factors in rope_freqs.weight or rope_factors_*.weight"
    )


def check_rope_factors(files: Sequence[GGUFFile], entries: Mapping[str, Any], path: str) -> None:
    """Raise if the rope scaling of ``config.json`` gives other factors than the files have.

    ``path`` is the path of ``config.json``, for messages. The formula is Llama 3.1's.
    """
    factors = Metadata(files).factors("rope_freqs.weight")
    if factors is None or all(one == 1 for one in factors):
        return
    scaling = entries.get("rope_scaling") or entries.get("rope_parameters")
    if isinstance(scaling, Mapping):
        kind = scaling.get("rope_type") or scaling.get("type")
        theta = scaling.get("rope_theta", entries.get("rope_theta", 10000.0))
        try:
            if kind == "llama3" and _same(_llama3_factors(scaling, theta, len(factors)), factors):
                return
            if kind == "longrope" and _same(scaling.get("long_factor") or (), factors):
                return
        except (TypeError, ValueError, ArithmeticError):
            pass  # an entry is no number, or one that the formula refuses: its factors differ
    raise CheckpointFormatError(
        f"{printable(files[0].path)} has factors on the rotary frequencies (rope_freqs.weight), "
        f"from {min(factors):g} to {max(factors):g}, which rope_scaling of {path} does not give: "
        "they belong to different models, or the entry is missing. Correct it, or remove "
        "config.json to take the factors of the file"
    )


def _same(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(
        math.isclose(one, other, rel_tol=_WITHIN) for one, other in zip(some, others, strict=True)
    )


def _llama3_factors(scaling: Mapping[str, Any], theta: float, count: int) -> list[float]:
    names = (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    )  # fmt: skip
    factor, low, high, original = (float(scaling.get(name, math.nan)) for name in names)
    factors = []
    for index in range(count):
        turns = original / (2 * math.pi * theta ** (index / count))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
