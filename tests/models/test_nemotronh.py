"""NemotronH keeps the laws of loading."""

import pytest

from vllm_module.models.nemotron_h import NemotronHForCausalLM
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_nemotronh_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(NemotronHForCausalLM, model_configs("NemotronHForCausalLM"))
