"""GraniteMoeHybrid keeps the laws of loading."""

import pytest

from vllm_module.models.granite_moe_hybrid import GraniteMoeHybridForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_granitemoehybrid_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(GraniteMoeHybridForCausalLM, model_configs("GraniteMoeHybridForCausalLM"))
