"""Copies of the base's tensors, which PEFT saves beside A and B of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm_module.core.fill import Fill
from vllm_module.core.module import vLLMModule
from vllm_module.errors import WeightLoadError
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
    copies = {
        name.replace(_COPY, "."): weight
        for name, weight in weights.items()
        if name.endswith(f"{_COPY}weight")
    }
    if not copies:
        return dict(weights)
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
    return {
        name: weight
        for name, weight in weights.items()
        if name.replace(_COPY, ".") not in copies or _COPY not in name
    }
