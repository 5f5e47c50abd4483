"""Optional entries of quantization_config mean what transformers takes, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from transformers.utils import quantization_config as library

from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.quantization import stored_rules

ABSENT = object()
VALUES = [ABSENT, None, 0, 0.0, [], "", False]
PACKED = {"bits": 4, "group_size": 128, "sym": True}
# Of each method: our class, transformers', and the entries that a file has.
METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gptq": (stored_rules.GPTQConfig, library.GPTQConfig, PACKED | {"desc_act": False}),
    "awq": (stored_rules.AWQConfig, library.AwqConfig, PACKED | {"zero_point": True}),
    "fp8": (
        stored_rules.FP8Config,
        library.FineGrainedFP8Config,
        {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "bitsandbytes": (
        stored_rules.BitsAndBytesConfig,
        library.BitsAndBytesConfig,
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "mxfp4": (stored_rules.MXFP4Config, library.Mxfp4Config, {}),
    "auto-round": (
        stored_rules.AutoRoundConfig,
        library.AutoRoundConfig,
        PACKED | {"packing_format": "auto_round:auto_gptq"},
    ),
}
# Entries that are absent or null here and another value there, and why they mean the same.
SAME = {
    ("gptq", "format"): "gptq",  # our default, too
    ("awq", "format"): "gemm",  # our default, too
    ("fp8", "scale_fmt"): "float",  # scales are read by their dtype
    ("fp8", "weight_block_size"): (
        128,
        128,
    ),  # for quantizing; files without it, as vLLM's, have none
    ("auto-round", "packing_format"): "auto_round:gptq",  # another name of the same layout
}


@pytest.mark.parametrize("method", METHODS)
def test_entries_mean_what_transformers_takes(method: str) -> None:
    """Each declared entry, absent, null, zero or empty."""
    ours, theirs, common = METHODS[method]
    wrong, accepted = [], 0
    for name in ours.model_fields:
        for given in VALUES:
            entries = {key: value for key, value in common.items() if key != name}
            entries |= {"quant_method": method} | ({} if given is ABSENT else {name: given})
            try:
                ours.read(entries)
            except (CheckpointFormatError, UnsupportedModelError, ValidationError) as error:
                if name not in str(error):
                    wrong.append((name, given, str(error)))
                continue
            accepted += 1
            value = getattr(ours(**entries), name)
            try:
                read = theirs.from_dict(dict(entries))
            except ImportError:  # a package of the library is missing
                continue
            except Exception:  # no error of its own: the library takes no null there
                same = given is None
            else:
                other = getattr(read, name, value)  # what it has not, it does not read
                listed = tuple(other) if isinstance(other, list) else other
                stored = str(other).removeprefix("torch.") == "uint8"
                same = value in (other, listed) or (value is None and stored)
                same |= given in (ABSENT, None) and SAME.get((method, name)) == listed
            if not same:
                wrong.append((name, given, value))
    assert accepted > 1
    assert wrong == []
