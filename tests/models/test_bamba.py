"""Bamba keeps the laws of loading."""

import pytest

from vllm_module.models.bamba import BambaForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_bamba_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(BambaForCausalLM, model_configs("BambaForCausalLM"))
