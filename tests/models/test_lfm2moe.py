"""Lfm2Moe keeps the laws of loading."""

import pytest

from vllm_module.models.lfm2_moe import Lfm2MoeForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_lfm2moe_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Lfm2MoeForCausalLM, model_configs("Lfm2MoeForCausalLM"))
