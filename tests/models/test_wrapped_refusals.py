"""What the wrapper refuses and skips: no more than it has to.

It refuses what attention cannot compute and rope that would change, and skips layers that predict
further tokens.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.attention.paged_attention import paged_attention
from vllm_module.wrapped.mask import MaskRule
from vllm_module.wrapped.names import TransformersNames
from vllm_module.wrapped.probe import Call
from vllm_module.wrapped.refusals import fix_frequencies, refuse_calls

SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4, "original_max_position_embeddings": 16,
    },
}  # fmt: skip


def refused(call: Call, max_model_len: int | None = None) -> bool:
    config = SimpleNamespace(get_text_config=lambda **_: SimpleNamespace(num_hidden_layers=1))
    try:
        refuse_calls(SimpleNamespace(config=config), {"layer": [call]}, max_model_len, "")
    except UnsupportedModelError:
        return True
    return False


def is_computed(heads: int, kv_heads: int, size: int) -> bool:
    """Tell whether paged attention computes one token with heads of this size."""
    query, cache = torch.zeros(1, heads, size), torch.zeros(1, 1, kv_heads, size)
    one, start = torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    try:
        paged_attention(query, cache, cache, (one - 1).view(1, 1), one, start, 1, 1.0)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("largest", [128, 129, 256, 257, 512, 513])
@pytest.mark.parametrize("smaller", ["value", "key", None])
def test_heads_are_refused_where_attention_does_not_compute_them(
    largest: int, smaller: str | None
) -> None:
    """The larger of keys and values decides, and groups of query heads are as large as may be."""
    size = largest if smaller != "key" else 8
    value_size = largest if smaller != "value" else 8
    for kv_heads, group in product((1, 2), (1, 16, 17, 64, 65, 128, 129)):
        heads = kv_heads * group
        call = Call(heads, kv_heads, size, value_size, 1.0, MaskRule(), None, None)
        assert refused(call) == (not is_computed(heads, kv_heads, largest))


@pytest.mark.parametrize("length", [None, 1, 4, 5, 6, 100])
def test_chunks_are_refused_where_a_sequence_has_two(length: int | None) -> None:
    """Up to the end of the first chunk, a token attends to all earlier ones."""
    rule = MaskRule(chunk=5)
    call = Call(2, 1, 8, 8, 1.0, rule, None, None)
    positions = torch.arange(100 if length is None else length)
    masks = (each.attends(positions[:, None], positions) for each in (rule, MaskRule()))
    assert refused(call, length) == (not torch.equal(*masks))


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("length", [None, 1, 15, 16, 17, 64])
def test_frequencies_that_the_longest_sequence_changes_are_refused(
    kind: str, length: int | None
) -> None:
    """It is refused if transformers computes another rotation for sequences of that length."""
    config: Any = LlamaConfig(
        hidden_size=8, num_attention_heads=1, max_position_embeddings=16,
        rope_parameters=SCALINGS[kind],
    )  # fmt: skip
    positions = torch.arange(64 if length is None else length)[None]
    early = torch.arange(3)[None]
    alone, beside = cosines(config, early), cosines(config, torch.cat([early, positions], 1))
    model = nn.Module()
    model.rotary = LlamaRotaryEmbedding(config)
    if torch.equal(alone, beside[:, :3]):
        fix_frequencies(model, length)
        assert torch.equal(model.rotary(torch.zeros(1, 1, 8), positions)[0], beside[:, 3:])
    else:
        with pytest.raises(UnsupportedModelError, match=rf"type {kind}, .* of at most 16"):
            fix_frequencies(model, length)


def cosines(config: Any, positions: torch.Tensor) -> torch.Tensor:
    """Return transformers' cosines of tokens in one batch."""
    found: torch.Tensor = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, 8), positions)[0]
    return found


@pytest.mark.parametrize("count", [None, 0, 1, 2, 3])
def test_as_many_further_layers_are_skipped_as_there_are(count: int | None) -> None:
    """A layer behind those that config.json numbers has a place, or none, and is not skipped."""
    config: Any = LlamaConfig(
        hidden_size=8, num_attention_heads=1, num_hidden_layers=2, intermediate_size=8,
        vocab_size=8, num_nextn_predict_layers=count,
    )  # fmt: skip
    with torch.device("meta"):
        names = TransformersNames(LlamaForCausalLM(config))
    skipped = []
    for layer in range(12):
        found = names.of(f"model.layers.{layer}.eh_proj.weight", torch.empty(8, 8))
        if isinstance(found, str):
            assert "further tokens" in found
            skipped.append(layer)
    assert skipped == [2, 3, 4][: count or 0]
