"""Qwen3Next keeps the laws of loading."""

import pytest

from vllm_module.models.qwen3_next import Qwen3NextForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_qwen3next_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Qwen3NextForCausalLM, model_configs("Qwen3NextForCausalLM"))
