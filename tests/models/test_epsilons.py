"""Every norm takes the number that the configuration adds to a variance, or that of its class."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import ModelConfig, get_model

CONFIGS: dict[str, dict[str, Any]] = runpy.run_path(
    str(Path(__file__).with_name("configurations.py"))
)["CONFIGS"]
# The first configuration of each kind of model.
KINDS = {config["model_type"]: name for name, config in reversed(CONFIGS.items())}


@pytest.mark.parametrize("name", sorted(KINDS.values()))
@torch.inference_mode()
def test_a_large_epsilon_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """It is larger than the variances, so that a norm with another one computes other numbers."""
    config = AutoConfig.for_model(**CONFIGS[name])
    entries = [key for key in config.to_dict() if key.endswith(("_eps", "_epsilon"))]
    assert len(entries) == 1
    setattr(config, entries[0], 3.0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.2, generator=generator)
    theirs.save_pretrained(tmp_path)
    ours = get_model(model_config=ModelConfig(model=str(tmp_path)))
    ids = torch.arange(9)
    expected = theirs(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(ours.compute_logits(ours(ids, ids)), expected, rtol=0, atol=1e-4)
