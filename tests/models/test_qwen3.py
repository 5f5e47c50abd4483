"""Qwen3 keeps the laws of loading."""

import pytest

from vllm_module.models.qwen3 import Qwen3ForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_qwen3_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Qwen3ForCausalLM, model_configs("Qwen3ForCausalLM"))
