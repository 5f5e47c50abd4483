"""Granite keeps the laws of loading."""

import pytest

from vllm_module.models.granite import GraniteForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_granite_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(GraniteForCausalLM, model_configs("GraniteForCausalLM"))
