"""FalconH1 keeps the laws of loading."""

import pytest

from vllm_module.models.falcon_h1 import FalconH1ForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_falconh1_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(FalconH1ForCausalLM, model_configs("FalconH1ForCausalLM"))
