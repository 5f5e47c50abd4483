"""Patterns of layers' names in rules: those that are refused, taken, fast, and compiled once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.errors import (
    CheckpointFormatError,
    UnsupportedModelError,
)
from vllm_module.quantization import (
    rules,
    rules_for,
)
from vllm_module.quantization.rules import checked_target, matches

SLOW = [
    "([a-z0-9_.]+)+!", "(a|a)*b", ".*" * 9 + "x", "(a{1,9}){9}", "(.|.)" * 24 + "!",
    ".?" * 24 + "!", "(.|.|.|.|.|.|.|.)" * 8 + "!", "(.?)?" * 12 + "!", "(a|a)(?#)*b",
    "(?x)(a|a) *b", "(?x:(a|a) *b)", ".*(.*|(.*.*)).*.*!",
]  # fmt: skip


@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_that_could_take_forever_is_refused(pattern: str) -> None:
    """A pattern in config.json that could take exponential time is refused."""
    stored = {"quant_method": "fp8", "modules_to_not_convert": [f"re:{pattern}"]}
    with pytest.raises(UnsupportedModelError, match="could take forever"):
        rules_for(None, stored)


@pytest.mark.parametrize(
    "pattern", ["(" * 500 + ")" * 500, "a{99999999999999999999999}", "[[a]", "(a", "\\"]
)
def test_a_pattern_that_does_not_compile_is_refused(pattern: str) -> None:
    """Whatever Python raises or warns of a pattern, the refusal names the pattern."""
    stored = {"quant_method": "fp8", "modules_to_not_convert": [f"re:{pattern}"]}
    with pytest.raises(CheckpointFormatError, match=r"'re:.* is not a valid regular expression"):
        rules_for(None, stored)
    with pytest.raises(UnsupportedModelError, match=r"has 1001 characters: .* at most 1000"):
        rules_for(None, stored | {"modules_to_not_convert": ["re:" + "a" * 1001]})


# As in published checkpoints of compressed-tensors, AutoGPTQ and GPTQModel.
PUBLISHED = {
    "re:.*lm_head": "lm_head",
    "re:.*mlp.gate$": "model.layers.0.mlp.gate",
    r"re:.*\.mlp\.(gate|shared_expert_gate)$": "model.layers.9.mlp.gate",
    "re:vision_tower.*": "vision_tower.blocks.0",
    r"re:model\.layers\.(0|1|2|3|4|5|6|7|8|9)\.mlp\.(gate|up)_proj": "model.layers.3.mlp.up_proj",
    "re:.*self_attn.*(q|k|v|o)_proj.*": "model.layers.0.self_attn.k_proj",
    r"re:.*\.(?:18|19|2[0-9])\..*(?:gate|up).*": "model.layers.21.mlp.up_proj",
    r"re:(?!.*experts).*(q_a|kv_a|q|k|v|o|gate|up|down)_proj$": "model.layers.1.mlp.up_proj",
    r"re:.*layers.*\.(?:block_sparse_moe\.)?experts.*w[123].*": "model.layers.0.experts.3.w1",
}  # fmt: skip


@pytest.mark.parametrize("target", PUBLISHED)
def test_patterns_of_published_checkpoints_are_taken(target: str) -> None:
    """A pattern that real checkpoints have is never called slow, and matches what it should."""
    assert checked_target(target) == target
    assert matches(target, PUBLISHED[target])
    assert not matches(target, "model.norm")


@given(st.text("a.|()?*+{1,}[]^\\", max_size=24))
@settings(deadline=2000)
def test_every_pattern_that_is_taken_is_fast(pattern: str) -> None:
    """A pattern that is not refused matches the worst of names within a second."""
    try:
        target = checked_target(f"re:{pattern}")
    except (CheckpointFormatError, UnsupportedModelError):
        return
    matches(target, "a" * 69 + "!")


def test_a_pattern_is_compiled_once() -> None:
    """However many patterns a checkpoint has, one for each layer, and layers that they meet."""
    rules._compiled.cache_clear()
    targets = [f"re:.*layers\\.{number}\\.mlp$" for number in range(700)]
    for layer in ("model.layers.1.mlp", "model.layers.699.mlp"):
        assert sum(matches(target, layer) for target in targets) == 1
    assert rules._compiled.cache_info().misses == len(targets)
