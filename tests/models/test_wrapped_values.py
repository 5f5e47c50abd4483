"""A model of transformers whose values have other sizes than its keys, on several ranks."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

# Pytest's importlib mode has no imports between test files.
SWEEP = runpy.run_path(str(Path(__file__).with_name("sweep.py")))


@pytest.mark.parametrize(
    ("heads", "value_size"), [((4, 1), 4), ((4, 2), 12), ((4, 4), 12), ((8, 2), 16), ((8, 2), 4)]
)
def test_ranks_that_share_heads_have_the_values_of_transformers(
    heads: tuple[int, int], value_size: int, tmp_path: Path
) -> None:
    """Layers with windows have twice as many heads of keys and values as the others."""
    kinds = (
        ["full_attention", "sliding_attention"] if 2 * heads[1] <= heads[0] else ["full_attention"]
    )
    model = SWEEP["tiny_model"](
        "mimo_v2_flash", num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=16,
        v_head_dim=value_size, sliding_window=4, tie_word_embeddings=False,
        layer_types=kinds, mlp_layer_types=["dense"] * len(kinds), num_hidden_layers=len(kinds),
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    ids = SWEEP["TOKEN_IDS"]
    with torch.no_grad():
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
    for size in (1, 2, 4):
        tried = SWEEP["_try_size"](tmp_path, expected, ids, size)
        assert tried["outcome"] == "right", (size, tried)
