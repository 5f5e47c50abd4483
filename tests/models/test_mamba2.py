"""Mamba2 keeps the laws of loading."""

import pytest

from vllm_module.models.mamba2 import Mamba2ForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_mamba2_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Mamba2ForCausalLM, model_configs("Mamba2ForCausalLM"))
