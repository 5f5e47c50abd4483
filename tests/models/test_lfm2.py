"""Lfm2 keeps the laws of loading."""

import pytest

from vllm_module.models.lfm2 import Lfm2ForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_lfm2_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Lfm2ForCausalLM, model_configs("Lfm2ForCausalLM"))
