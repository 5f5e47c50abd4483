"""Plans of loads of a model's adapters: most have the names and shapes of one before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import cast

from vllm_module.adapters.adapter import Adapter
from vllm_module.adapters.config import AdapterConfig
from vllm_module.adapters.copies import without_copies
from vllm_module.core.fill import Fill
from vllm_module.core.module import vLLMModule
from vllm_module.core.plan import LoadPlan
from vllm_module.core.run import execute
from vllm_module.weights import Weight
from vllm_module.weights.region import Region

_MOST_KEPT = 8  # trees without memory, of some hundred kilobytes each


class AdapterPlans:
    """Loads adapters of one model, and routes the names of those that are alike once.

    Args:
        base: the model, as for :class:`~vllm_module.adapters.adapter.Adapter`.

    """

    def __init__(self, base: vLLMModule) -> None:
        self._base = base
        self._kept: OrderedDict[Hashable, LoadPlan] = OrderedDict()

    def load(
        self,
        config: AdapterConfig,
        weights: Mapping[str, Weight],
        is_base: Callable[[Fill], bool] = Fill.is_held,
    ) -> Adapter:
        """Return a new adapter with ``weights``, under the base model's names.

        ``is_base`` is as for :func:`without_copies`. Raises as :meth:`Adapter.load` does.
        """
        weights = without_copies(self._base, weights, is_base)
        described = tuple((name, each.shape, each.dtype) for name, each in weights.items())
        key = config.model_dump_json(), described
        plan = self._kept.pop(key, None)
        if plan is None:
            regions = {name: Region.of(name, each) for name, each in weights.items()}
            plan = Adapter(self._base, config).plan(regions)
        self._kept[key] = plan
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        own = plan.again(weights)
        execute(own)
        adapter = cast(Adapter, own.module)
        adapter.check_finite()
        return adapter
