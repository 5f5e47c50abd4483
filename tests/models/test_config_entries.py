"""Optional entries of config.json mean what transformers takes them for, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import create_causal_mask

from vllm_module import ModelConfig
from vllm_module.build.model_source import read_config
from vllm_module.build.registry import _OURS, config_class
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.hf_config import HFConfig, parse_config
from vllm_module.layers.attention import layer_sliding_window

ABSENT = object()
VALUES = [ABSENT, None, 0, 0.0, [], "", False]
OF_REMOTE_CODE = {"QWenLMHeadModel"}  # transformers has no class of it
# Entries of their text models are those of the same classes for text alone.
OF_IMAGES = {name for name in _OURS if name.endswith("ForConditionalGeneration")}
# Names that files of transformers do not have, or that others read.
ELSEWHERE = {
    "architectures", "dtype", "max_model_len", "model_impl", "quantization_config", "rope_scaling",
    "rope_parameters", "torch_dtype", "trusted_folder",
}  # fmt: skip
# Entries with another value here, and why that changes nothing.
OTHER = {
    "head_dim": "follows from others here, and where the library's model reads it",
    "id2label": "labels of a classifier, which its head's number of rows gives",
    "layer_types": "computed here where a layer asks; compared below",
    "layers_block_type": "computed by the library, from attn_layer_indices",
    "max_position_embeddings": "of learned positions, whose tensor gives it",
    "num_key_value_heads": "that of other entries or of the class: a wrong one fits no tensor",
    "partial_rotary_factor": "that of rope_parameters goes first, in the library as well",
    "tie_word_embeddings": "of encoders, whose heads are not run",
    "time_step_limit": "null is a default here, and in the library's model an error",
}
NONE = (None, 0, False, [])  # which of these stands for none is each class's own choice
MEAN_NONE = {"mlp_only_layers", "sliding_window", "use_bidirectional_attention"}
ENTRIES_OF_WINDOWS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}


def outcome(cls: type[HFConfig], entries: dict[str, Any]) -> HFConfig | str:
    try:
        return parse_config(cls, entries, Path("config.json"))
    except (CheckpointFormatError, UnsupportedModelError) as error:
        return str(error)


def of_library(cls: Any, entries: dict[str, Any]) -> Any:
    """Return the library's configuration; ``None`` if it refuses."""
    try:
        return cls.from_dict(cls._decode_special_floats(entries))
    except Exception:  # the library has no error of its own for what it refuses
        return None


def windows(config: HFConfig) -> list[int | None] | None:
    try:
        return [layer_sliding_window(config, i) for i in range(config.num_hidden_layers)]
    except UnsupportedModelError:
        return None


def is_same(name: str, ours: Any, theirs: Any, config: HFConfig) -> bool:
    """Tell whether two values mean the same."""
    if ours == theirs or (isinstance(ours, tuple) and [*ours] == theirs):
        return True
    if name in MEAN_NONE and ours in NONE and theirs in NONE:
        return True
    # Transformers drops a window that no layer has.
    return name == "sliding_window" and theirs in NONE and not config.use_sliding_window


@pytest.mark.parametrize("architecture", sorted({*_OURS} - OF_REMOTE_CODE - OF_IMAGES))
def test_entries_mean_what_transformers_takes(architecture: str) -> None:
    """Each declared entry, absent, null, zero or empty; all others are those of the library."""
    library = getattr(transformers, architecture).config_class
    cls = config_class([architecture])
    common = json.loads(library().to_json_string(use_diff=False))
    common["architectures"] = [architecture]
    assert isinstance(outcome(cls, common), HFConfig)
    wrong, accepted = [], 0
    for field in cls.model_fields.keys() - ELSEWHERE:
        name = cls.attribute_map.get(field, field)
        without = {key: value for key, value in common.items() if key != name}
        default = outcome(cls, without)
        for given in VALUES:
            entries = without if given is ABSENT else without | {name: given}
            ours = outcome(cls, entries)
            if isinstance(ours, str):
                if name not in ours:
                    wrong.append((name, given, ours))
                continue
            accepted += 1
            value, theirs = getattr(ours, field), of_library(library, entries)
            if theirs is None:  # null is absence here, and a zero may be false
                same = value == given or (given is None and value == getattr(default, field))
            elif not hasattr(theirs, name):  # an entry of other files
                same = given is ABSENT or value == given or name in OTHER
            else:
                same = is_same(name, value, getattr(theirs, name), ours) or name in OTHER
            if not same:
                wrong.append((name, given, value, getattr(theirs, name, None)))
            types = getattr(theirs, "layer_types", None) or []
            if name in ENTRIES_OF_WINDOWS and "sliding_attention" in types:
                expected = [theirs.sliding_window if "sliding" in each else None for each in types]
                if windows(ours) not in (expected, None):
                    wrong.append((name, given, windows(ours), expected))
    assert accepted > 20
    assert wrong == []


@pytest.mark.parametrize("architecture", sorted({*_OURS} - OF_REMOTE_CODE - OF_IMAGES))
def test_a_decoder_that_attends_to_later_tokens_is_refused(
    architecture: str, tmp_path: Path
) -> None:
    """``is_causal`` is refused where transformers' mask of it has later tokens, as GTE's have."""
    library = getattr(transformers, architecture).config_class
    entries = json.loads(library().to_json_string(use_diff=False)) | {
        "architectures": [architecture]
    }
    is_decoder = "ForCausalLM" in architecture or architecture == "GPT2LMHeadModel"
    for given in (ABSENT, True, False, None, 0):
        written = entries if given is ABSENT else entries | {"is_causal": given}
        (tmp_path / "config.json").write_text(json.dumps(written))
        config = library.from_dict(library._decode_special_floats(written))
        config._attn_implementation = "eager"
        mask = create_causal_mask(config, torch.zeros(1, 2, 1), None, None)
        if not is_decoder or (mask is not None and mask[0, 0, 0, 1] < 0):
            read_config(tmp_path, ModelConfig(model=""))
            continue
        assert given in (False, None)
        with pytest.raises(UnsupportedModelError, match=rf"is_causal of .* is {given}: "):
            read_config(tmp_path, ModelConfig(model=""))
