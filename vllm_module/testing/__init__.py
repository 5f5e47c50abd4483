"""The model author's toolkit: laws of loading as functions that test any module.

A whole test file::

    import pytest
    from my_package import MyForCausalLM
    from vllm_module.testing import LAWS, model_configs

    @pytest.mark.parametrize("law", LAWS)
    def test_my_model_keeps_the_law(law):
        law(MyForCausalLM, model_configs(MyForCausalLM))

Hypothesis draws the cases; its settings choose how many.
"""

from vllm_module.base.messages import install

try:
    import hypothesis as _hypothesis  # noqa: F401  # imported to name the extra if it is missing
except ImportError as error:
    raise ImportError(
        f"vllm_module.testing draws its cases with Hypothesis: {install('testing')}"
    ) from error

from vllm_module.testing.accounting import assert_accounting_exact, assert_order_independent
from vllm_module.testing.case import Law
from vllm_module.testing.checkpoints import (
    CheckpointForm,
    checkpoint_forms,
    random_weights,
    write_checkpoint,
)
from vllm_module.testing.configurations import model_configs
from vllm_module.testing.cost import (
    assert_cost_linear,
    assert_memory_bounded,
    assert_reads_what_it_keeps,
)
from vllm_module.testing.layouts import assert_laid_out
from vllm_module.testing.lifecycle import assert_meta_first, assert_pure, assert_reload_in_place
from vllm_module.testing.poison import poisoned_memory
from vllm_module.testing.sharding import assert_routed_exactly, assert_sharding_equivalent
from vllm_module.testing.sources import failing_reads, failing_stream
from vllm_module.testing.stages import assert_staged
from vllm_module.testing.strategies import (
    HeadLayout,
    ParameterLayout,
    dim_layouts,
    dtypes,
    features,
    head_layouts,
    parameter_layouts,
    tp_sizes,
    vocabularies,
)
from vllm_module.testing.transfers import assert_transfers

# In the order of the laws, 1 to 13.
LAWS: tuple[Law, ...] = (
    assert_accounting_exact,
    assert_order_independent,
    assert_sharding_equivalent,
    assert_routed_exactly,
    assert_pure,
    assert_meta_first,
    assert_memory_bounded,
    assert_reads_what_it_keeps,
    assert_reload_in_place,
    assert_cost_linear,
    assert_laid_out,
    assert_transfers,
    assert_staged,
)

__all__ = [
    "LAWS",
    "CheckpointForm",
    "HeadLayout",
    "Law",
    "ParameterLayout",
    "assert_accounting_exact",
    "assert_cost_linear",
    "assert_laid_out",
    "assert_memory_bounded",
    "assert_meta_first",
    "assert_order_independent",
    "assert_pure",
    "assert_reads_what_it_keeps",
    "assert_reload_in_place",
    "assert_routed_exactly",
    "assert_sharding_equivalent",
    "assert_staged",
    "assert_transfers",
    "checkpoint_forms",
    "dim_layouts",
    "dtypes",
    "failing_reads",
    "failing_stream",
    "features",
    "head_layouts",
    "model_configs",
    "parameter_layouts",
    "poisoned_memory",
    "random_weights",
    "tp_sizes",
    "vocabularies",
    "write_checkpoint",
]
