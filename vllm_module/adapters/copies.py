"""Copies of the base's tensors, which PEFT saves of embeddings and heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm_module.base.messages import shorten
from vllm_module.core.fill import Fill
from vllm_module.core.module import vLLMModule
from vllm_module.errors import DuplicateWeightError, WeightLoadError
from vllm_module.weights import Weight

_COPY = ".base_layer."  # in names of tensors of the base


def without_copies(
    base: vLLMModule,
    weights: Mapping[str, Weight],
    is_base: Callable[[Fill], bool] = Fill.is_held,
) -> dict[str, Weight]:
    """Return an adapter's A and B alone; what PEFT saves beside them must be what the base has.

    ``is_base`` tells whether the base has the bits that a copy would fill. Raises
    ``WeightLoadError`` if it has others.
    """
    named = {
        name: name.replace(_COPY, ".")
        for name in weights
        if name.endswith(".weight") and ".lora_" not in name
    }
    if not named:
        return dict(weights)
    copies = {of: weights[name] for name, of in named.items()}
    if len(copies) < len(named):
        raise DuplicateWeightError(
            "the adapter has two copies of a weight of its base, with .base_layer in the name and "
            f"without: {shorten(', '.join(named))}"
        )
    plan = base.plan_weights(copies)
    plan.report.missing.clear()
    plan.report.raise_if_refused(f"The base of an adapter, {type(base).__name__},", touched=False)
    for fill in plan.fills:
        if fill.name in copies and not is_base(fill):
            raise WeightLoadError(
                f"{fill.name} is in the adapter, and is another one than the base model's: an "
                "adapter adds to the weights of its base, so load the base that it was made "
                "for, or merge the two with PEFT's merge_and_unload()"
            )
    return {name: weight for name, weight in weights.items() if name not in named}
