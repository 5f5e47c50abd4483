"""Cohere keeps the laws of loading."""

import json
from pathlib import Path

import pytest

from vllm_module import ModelConfig
from vllm_module.build.model_source import read_config
from vllm_module.errors import UnsupportedModelError
from vllm_module.models.cohere import CohereForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_cohere_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(CohereForCausalLM, model_configs("CohereForCausalLM"))


# Of c4ai-command-r-v01's config.json. Its model card says 128K tokens.
COMMAND_R = {
    "architectures": ["CohereForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "model_max_length": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "num_key_value_heads": 64,
    "rope_theta": 8000000.0,
    "vocab_size": 256000,
}


def test_command_r_takes_the_tokens_of_its_model_card(tmp_path: Path) -> None:
    """``model_max_length`` goes before the positions, as in vLLM, whichever of them is more."""
    (tmp_path / "config.json").write_text(json.dumps(COMMAND_R))
    config = read_config(tmp_path, ModelConfig(model=""))
    assert config.max_model_len == config.context_length == 131072
    assert read_config(tmp_path, ModelConfig(model="", max_model_len=10000)).max_model_len == 10000
    with pytest.raises(UnsupportedModelError, match="exceeds the 131072 positions"):
        read_config(tmp_path, ModelConfig(model="", max_model_len=131073))
    for length, expected in ((4096, 4096), (None, 8192)):
        (tmp_path / "config.json").write_text(json.dumps(COMMAND_R | {"model_max_length": length}))
        assert read_config(tmp_path, ModelConfig(model="")).max_model_len == expected
