"""Mamba2 keeps the laws of loading."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.errors import WeightLoadError
from vllm_module.models.mamba2 import Mamba2ForCausalLM
from vllm_module.testing import LAWS, model_configs, random_weights, write_checkpoint
from vllm_module.weights import open_checkpoint

SIZES: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"], "hidden_size": 16, "num_hidden_layers": 1,
    "num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "conv_kernel": 4, "expand": 2,
    "vocab_size": 32,
}  # fmt: skip
SMALL = ("mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.conv1d.bias", "mixer.norm.weight")


@pytest.mark.parametrize("name", SMALL)
def test_a_nan_in_a_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Each small tensor of a mixer is looked at, whatever is computed of it."""
    model = Mamba2ForCausalLM(Mamba2ForCausalLM.config_class(**SIZES))
    weights = random_weights(model.expected_weights(), seed=0)
    (full,) = (each for each in weights if each.endswith(f"layers.0.{name}"))
    weights[full].view(-1)[-1] = torch.nan
    write_checkpoint(tmp_path, weights, config=SIZES)
    with open_checkpoint(tmp_path) as files, pytest.raises(WeightLoadError, match=name):
        model.load_weights(files)


@pytest.mark.parametrize("law", LAWS)
def test_mamba2_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Mamba2ForCausalLM, model_configs("Mamba2ForCausalLM"))
