"""Qwen2 keeps the laws of loading."""

import pytest

from vllm_module.models.qwen2 import Qwen2ForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_qwen2_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Qwen2ForCausalLM, model_configs("Qwen2ForCausalLM"))
