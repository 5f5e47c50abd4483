"""A model author's view: an architecture written in the README's style agrees with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm_module import ModelConfig, get_model
from vllm_module.distributed import run_ranks


@pytest.mark.parametrize("tied", [True, False])
def test_granite_agrees_with_transformers_at_every_size(tmp_path: Path, tied: bool) -> None:
    """Logits equal transformers' within 1e-4 at TP 1, 2 and 4, with one KV head for two ranks."""
    from transformers import GraniteConfig, GraniteForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=tied,
        embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.0625,
        logits_scaling=8.0,
    )  # fmt: skip
    reference = GraniteForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(5).add_(torch.randn_like(parameter) * 0.01)
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    ids = torch.randint(0, 300, (13,))
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]

    def logits(rank: int) -> torch.Tensor:
        model = get_model(model_config=ModelConfig(model=str(tmp_path)))
        with torch.no_grad():
            return model.compute_logits(model(ids, torch.arange(13)))

    assert expected.abs().max() > 0.5
    for size in (1, 2, 4):
        for result in run_ranks(size, logits):
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)
