"""Entries that published checkpoints have, and that change nothing of what layers compute."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from transformers import AwqConfig, GPTQConfig

from vllm_module.quantization import rules_for
from vllm_module.quantization.packed import PackedMethod

_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
}
# What sparseml and the first versions of LLM Compressor wrote for weights that are not sparse.
_DENSE = {
    "format": "dense",
    "global_sparsity": 0.14,
    "ignore": ["model.layers.0.mlp.down_proj"],
    "registry_requires_subclass": False,
    "sparsity_structure": "unstructured",
    "targets": [],
}
_FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_W4AFP8 = {"targets": ["Linear"], "weights": _INT4, "input_activations": _FP8_INPUTS}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
_NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
}


@pytest.mark.parametrize(
    ("entries", "plain"),
    [
        pytest.param(_PACKED | {"sparsity_config": _DENSE}, _PACKED, id="dense"),
        pytest.param(_PACKED | {"sparsity_config": {}}, _PACKED, id="no sparsity"),
        pytest.param(_PACKED | {"config_groups": {"group_0": _W4AFP8}}, _PACKED, id="FP8 inputs"),
        pytest.param({**_AWQ, "format": "gemm"}, {**_AWQ, "version": "GEMM"}, id="format of AWQ"),
        pytest.param({**_AWQ, "version": None}, _AWQ, id="no version of AWQ"),
        pytest.param({**_NF4, "quant_method": None}, _NF4, id="bitsandbytes without a name"),
        pytest.param({**_INT8, "quant_method": None}, _INT8, id="its 8 bits without a name"),
        pytest.param({"load_in_8bit": True}, _INT8, id="its 8 bits alone"),
    ],
)
def test_what_changes_nothing(entries: dict[str, Any], plain: dict[str, Any]) -> None:
    """The layers have the methods that they have without the entry."""
    given, expected = rules_for(None, entries), rules_for(None, plain)
    assert given is not None
    assert expected is not None
    for name in ("model.layers.0.mlp.up_proj", "lm_head"):
        method, same = given.rule_of(name)[1], expected.rule_of(name)[1]
        assert (method is None) == (name == "lm_head")
        assert str(method) == str(same)


@pytest.mark.parametrize(
    ("pattern", "changes", "bits"),
    [
        ("+:.*up_proj", {}, 4),
        (".*up_proj", {}, 4),
        (".*up_proj", {"bits": 8}, 8),
        ("+:.*up_proj", {"bits": 8}, 8),
        (".*up_proj", False, None),
        ("-:.*up_proj", {}, None),
        ("-:.*up_proj", False, None),
        ("-:.*up_proj", {"bits": 8}, None),
    ],
)
def test_a_layer_of_gptqmodel_is_left_out_where_it_says_so(
    pattern: str, changes: dict[str, int] | bool, bits: int | None
) -> None:
    """A pattern leaves a layer out by ``-:`` or ``false``; no changes leave the settings of all."""
    entries = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {pattern: changes}}
    rules = rules_for(None, entries)
    assert rules is not None
    found = [rules.rule_of(f"model.layers.0.mlp.{name}_proj")[1] for name in ("up", "down")]
    assert [getattr(method, "bits", None) for method in found] == [bits, 4]


@pytest.mark.parametrize(("head", "bits"), [(None, None), (False, None), (True, 8)])
def test_dynamic_says_how_a_head_is_quantized_and_not_whether(
    head: bool | None, bits: int | None
) -> None:
    """GPTQModel leaves the head as it is without ``lm_head``; Qwen3.5's files have ``{}`` of it."""
    entries: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    entries["dynamic"] = {"lm_head": {"bits": 8}, "model.language_model.embed_tokens": {}}
    rules = rules_for(None, entries if head is None else {**entries, "lm_head": head})
    assert rules is not None
    assert getattr(rules.rule_of("lm_head")[1], "bits", None) == bits
    assert getattr(rules.rule_of("model.layers.0.mlp.up_proj")[1], "bits", None) == 4


def test_each_group_may_have_a_format_of_its_own() -> None:
    """``mixed-precision`` is no format: each group of compressed-tensors says its own."""
    eight = {"num_bits": 8, "type": "float", "strategy": "channel"}
    groups = {
        "group_0": {"targets": ["re:.*mlp.*"], "weights": _INT4, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*attn.*"], "weights": eight, "format": "float-quantized"},
    }
    mixed = rules_for(None, {**_PACKED, "format": "mixed-precision", "config_groups": groups})
    for name, form in (("group_0", "pack-quantized"), ("group_1", "float-quantized")):
        alone = {key: value for key, value in groups[name].items() if key != "format"}
        one = rules_for(None, {**_PACKED, "format": form, "config_groups": {name: alone}})
        assert one.rules[-1] in mixed.rules


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_format_is_the_one_that_transformers_reads(method: str) -> None:
    """It has up to three entries, in small or capital letters: each alone, and those that differ.

    Null is as absent.
    """
    names = ("checkpoint_format", "format", *(() if method == "gptq" else ("version",)))
    values = ["gptq", "gptq_v2", "GPTQ_V2"] if method == "gptq" else ["gemm", "GEMV", "gemv"]
    read = {"gptq": GPTQConfig, "awq": AwqConfig}[method].from_dict
    known = {"gptq": "GPTQ", "gptq_v2": "GPTQ v2", "gemm": "AWQ", "gemv": "AWQ GEMV"}
    for chosen in itertools.product([None, *values], repeat=len(names)):
        entries = {"bits": 4, "group_size": 128, "quant_method": method}
        given = {name: value for name, value in zip(names, chosen, strict=True) if value}
        expected = known[str(read(entries | given).format)]
        for absent in ({}, dict.fromkeys(names)):
            rules = rules_for(None, entries | absent | given)
            assert rules is not None
            found = rules.rule_of("model.layers.0.mlp.up_proj")[1]
            assert isinstance(found, PackedMethod)
            assert found.format.name == expected, given
