"""What a configuration means that lacks an entry."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vllm_module.build.registry import config_class, model_class
from vllm_module.hf_config import HFConfig
from vllm_module.layers import layer_sliding_window
from vllm_module.rope_parameters import rope_parameters
from vllm_module.testing.configurations import architectures

ATTENTION = "full_attention", "sliding_attention"
KINDS = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}


@pytest.mark.parametrize("architecture", [name for name in architectures() if name in KINDS])
def test_an_entry_that_a_file_lacks_has_the_value_of_transformers(architecture: str) -> None:
    """With the sizes alone, windows, rotation and all declared entries are transformers'."""
    theirs: Any = CONFIG_MAPPING[KINDS[architecture]]().get_text_config()
    cls = config_class([architecture])
    sizes = {
        name: getattr(theirs, name)
        for name, field in cls.model_fields.items()
        if field.is_required() and name != "architectures"
    }
    sizes["num_key_value_heads"] = getattr(theirs, "num_key_value_heads", None)
    ours = cls(architectures=[architecture], **sizes)
    bases = [base for base in cls.__mro__ if issubclass(base, HFConfig) and base is not HFConfig]
    declared = {name for base in bases for name in base.__annotations__}
    apart = {"sliding_window", "layer_types", "rope_parameters"}  # compared below
    apart |= {"attribute_map", "full_attn_idxs"}  # no entry, and one that says layer_types
    for name in declared - apart | {"tie_word_embeddings"}:
        stored = cls.attribute_map.get(name, name)
        if hasattr(theirs, stored):
            expected = getattr(theirs, stored) or None
            assert (getattr(ours, name) or None) == expected, name
    types = getattr(theirs, "layer_types", None) or [None]
    for layer, kind in enumerate(types):
        window = theirs.sliding_window if kind == "sliding_attention" else None
        assert kind not in ATTENTION or layer_sliding_window(ours, layer) == window
        rope = getattr(theirs, "rope_parameters", None)
        if rope is None:  # learned positions
            continue
        rope = rope.get(kind, rope)
        if "full_attention" in rope:  # by kinds that this layer, a convolution, is none of
            continue
        found = rope_parameters(ours, kind).model_dump()
        expected = {"partial_rotary_factor": 1.0} | rope
        assert {name: found.get(name) for name in expected} == expected


def test_scaling_of_a_file_is_not_mixed_with_the_default() -> None:
    """The positions of gpt-oss' default scaling are not those of another one that lacks them."""
    scaling = {"rope_type": "yarn", "factor": 4.0}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "vocab_size": 8, "max_position_embeddings": 256}
    theirs: Any = CONFIG_MAPPING["gpt_oss"](rope_scaling=dict(scaling), **sizes)
    cls = config_class(["GptOssForCausalLM"])
    ours = rope_parameters(cls(architectures=["x"], rope_scaling=scaling, **sizes)).model_dump()
    expected = theirs.rope_parameters
    assert {name: ours[name] for name in expected} == expected


@pytest.mark.parametrize("first", [0, 1, 2, 5, 6, 9])
@pytest.mark.parametrize("architecture", ["Qwen2", "Qwen2Moe", "Qwen3"])
def test_layers_have_the_windows_of_transformers(architecture: str, first: int) -> None:
    """Files of transformers 4 say by numbers which layers have a window, if it is used."""
    architecture += "ForCausalLM"
    cls, layers = config_class([architecture]), 6
    config = CONFIG_MAPPING[KINDS[architecture]]
    model: Any = model_class([architecture])
    attention = model.model_class.layer_class.attention_class
    entries = {"max_window_layers": first, "sliding_window": 7, "num_hidden_layers": layers}
    for used in (True, False):
        theirs: Any = config(use_sliding_window=used, **entries)
        sizes = {
            name: getattr(theirs, name)
            for name, field in cls.model_fields.items()
            if field.is_required() and name != "architectures"
        }
        given = {**sizes, **entries, "use_sliding_window": used}
        ours = cls(architectures=[architecture], **given)
        windows = [attention.sliding_window(ours, layer) for layer in range(layers)]
        slides = [kind == "sliding_attention" for kind in theirs.layer_types]
        assert windows == [7 if each else None for each in slides]
