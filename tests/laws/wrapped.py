"""Models of transformers in the wrapper, as subjects of the laws.

Pytest's importlib mode allows no imports between test files: use ``runpy.run_path``.
"""

from __future__ import annotations

import functools
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from hypothesis import strategies as st

from vllm_module.wrapped.config import TransformersConfig
from vllm_module.wrapped.model import TransformersForCausalLM

_HERE = Path(__file__).parent
_SWEEP = runpy.run_path(str(_HERE.parent / "models/sweep.py"))
_SUBJECTS = runpy.run_path(str(_HERE / "subjects.py"))
_NAMES = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@functools.cache
def _entries(kind: str, changes: tuple[tuple[str, Any], ...]) -> Mapping[str, Any]:
    config_class = transformers.CONFIG_MAPPING[kind]
    entries: dict[str, Any] = _SWEEP["tiny_config"](config_class, **dict(changes)).to_dict()
    return entries | {"architectures": [_NAMES[kind]]}


def build(kind: str, heads: tuple[int, int], **changes: Any) -> TransformersForCausalLM:
    """Return a tiny model of type ``kind``; ``changes`` are entries of its configuration."""
    sizes = {
        "hidden_size": 32,
        "head_dim": 8,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        **_SWEEP["OWN"].get(kind, {}),
        **changes,
    }
    entries = _entries(kind, tuple(sizes.items()))
    return TransformersForCausalLM(TransformersConfig.model_validate(entries))


HEADS = st.sampled_from([(4, 2), (4, 1), (2, 2), (4, 4)])
_COMMON: Mapping[str, Any] = {
    "heads": HEADS,
    "intermediate_size": st.sampled_from([16, 24]),
    "vocab_size": st.sampled_from([16, 37]),
    "tie_word_embeddings": st.booleans(),
}
_NO_TIE = _COMMON | {"tie_word_embeddings": False}
_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "moe_intermediate_size": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 4,
    "heads": st.sampled_from([(4, 4), (2, 2)]),
}

# What is particular to each family, beside what all draw.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "smollm3": _COMMON,  # dense, with layers without rotation
    "olmo2": _COMMON,  # norms over all heads
    "glm": _COMMON | {"tie_word_embeddings": False},  # gate and up in one tensor
    "phi3": _NO_TIE,  # query, key and value in one tensor, whole on each rank
    "gemma2": _COMMON,  # windows, soft caps
    "gpt_neox": _NO_TIE | {"heads": st.sampled_from([(4, 4), (2, 2)])},  # other names on disk
    "mixtral": _NO_TIE,  # experts stored one by one under other names
    "qwen2_moe": _NO_TIE | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "granitemoe": _COMMON,  # experts stored together
    "gpt_oss": _NO_TIE,  # experts stored transposed, with biases; sinks
    "deepseek_v3": _NO_TIE | _LATENT,  # values smaller than keys
    "mimo_v2_flash": _NO_TIE
    | {"hidden_size": 64, "head_dim": 16, "heads": (4, 2), "moe_intermediate_size": 8},
    "gemma4_text": {"vocab_size": 37, "heads": HEADS},  # heads of two sizes, shared keys and values
}

WRAPPED: dict[str, Any] = {
    kind: _SUBJECTS["Subject"](functools.partial(build, kind), arguments, _SUBJECTS["tokens_of"])
    for kind, arguments in FAMILIES.items()
}


def is_held(kind: str, law: str) -> bool:
    """Tell whether a law applies to a family.

    transformers' GPT-NeoX ignores every name with ``attention.bias`` in it, wherever that is.
    """
    return (kind, law) != ("gpt_neox", "assert_routed_exactly")
