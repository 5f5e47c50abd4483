"""Lfm3 keeps the laws of loading."""

import pytest

from vllm_module.models.lfm3 import Lfm3ForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_lfm3_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(Lfm3ForCausalLM, model_configs("Lfm3ForCausalLM"))
