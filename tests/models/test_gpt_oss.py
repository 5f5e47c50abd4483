"""gpt-oss keeps the laws of loading, in 16 bits and in MXFP4."""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from vllm_module.errors import UnexpectedWeightError
from vllm_module.models.gpt_oss import GptOssForCausalLM
from vllm_module.quantization import quantize, rules_for
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_gpt_oss_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(GptOssForCausalLM, model_configs("GptOssForCausalLM"))


def in_mxfp4(config: Any) -> GptOssForCausalLM:
    model = GptOssForCausalLM(config)
    rules = rules_for(None, {"quant_method": "mxfp4"})
    assert rules is not None
    quantize(model, rules)
    return model


@pytest.mark.parametrize("law", LAWS)
def test_gpt_oss_in_mxfp4_keeps_the_law(law) -> None:
    """Whatever the number of blocks, also fewer than ranks, the law holds."""
    sizes = {"hidden_size": st.just(32), "intermediate_size": st.sampled_from([32, 96])}
    law(in_mxfp4, model_configs(GptOssForCausalLM, **sizes))


@pytest.mark.parametrize("name", ["down_proj", "gate_up_proj", "gate_up_proj_bias"])
def test_experts_that_are_stored_apart_take_no_tensor_of_all(name: str) -> None:
    """Hugging Face's tensor of all experts has other rows or columns, though its shape may fit."""
    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}
    kind = {"architectures": ["GptOssForCausalLM"], "stored_experts_apart": True}
    entries = {**tiny, **heads, **kind, "num_hidden_layers": 1}
    model = GptOssForCausalLM(GptOssForCausalLM.config_class.model_validate(entries))
    model.load_weights(
        {name: torch.randn(weight.shape) for name, weight in model.expected_weights().items()}
    )
    shape = (4, 64, 64) if name == "down_proj" else (4, 64, 128) if name[-1] == "j" else (4, 128)
    with pytest.raises(UnexpectedWeightError, match=rf"experts\.{name}"):
        model.update_weights({f"model.layers.0.mlp.experts.{name}": torch.randn(shape)})
