"""What an adapter adds to each stored tensor of its base, in PEFT's arithmetic.

Which A and B belong to which tensor is what a load of both into one model says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple, cast

import torch
from torch import nn

from vllm_module.adapters.adapter import Adapter, LoRALayer
from vllm_module.adapters.config import AdapterConfig
from vllm_module.adapters.copies import without_copies
from vllm_module.adapters.files import refuse_infinite
from vllm_module.base.messages import printable_name
from vllm_module.core.fill import Fill, same_bits
from vllm_module.core.module import vLLMModule
from vllm_module.core.plan import LoadPlan
from vllm_module.errors import UnsupportedModelError, WeightReadError
from vllm_module.parameters import BasevLLMParameter
from vllm_module.weights import Weight

_SERVE = "serve the adapter beside its base instead (lora_request)"
MERGE_FIRST = (
    "merge the adapter into the checkpoint in full precision, by vllm-module convert --adapter, "
    f"and quantize the result, or {_SERVE}"
)


class _LowRank(NamedTuple):
    """A and B of one tensor of the adapter's file, or of all experts.

    Attributes:
        name: of the module, or of the parameter.
        a, b: ``[rank, input]`` and ``[output, rank]``, of experts behind a dimension of them.
        scale: factor of B A.
        is_embedding: A has a column for each token.
        is_parameter: the settings name the parameter, not its module.

    """

    name: str
    a: Weight
    b: Weight
    scale: float
    is_embedding: bool
    is_parameter: bool

    @property
    def rounds(self) -> bool:
        """Whether PEFT rounds the product to the dtype of the weight before it adds it."""
        return self.is_embedding or self.is_parameter


class Addition(NamedTuple):
    """What an adapter adds to one stored tensor.

    Attributes:
        low_rank: of which A and B.
        transposed: the tensor is ``[input, output]``.
        expert: the only expert of A and B that the tensor has; ``None`` for all that there are.
        rows: of B, if not all.

    """

    low_rank: _LowRank
    transposed: bool
    expert: int | None = None
    rows: tuple[int, int] | None = None

    def added_to(self, name: str, weight: Weight) -> torch.Tensor:
        """Return a copy of the stored tensor ``name`` with the addition.

        Raises ``WeightReadError`` if a sum is no finite number of its dtype.
        """
        values = weight.clone() if isinstance(weight, torch.Tensor) else weight.read()
        self._add_to(values)
        if not values.isfinite().all():
            raise WeightReadError(
                f"{name} has a NaN or an infinite number once the adapter is added in "
                f"{values.dtype}: {_SERVE}"
            )
        return values

    def _add_to(self, weight: torch.Tensor) -> None:
        """Add in place, by the operations of PEFT: in another order, some bits would differ."""
        a, b = _read(self.low_rank.a), _read(self.low_rank.b)
        if self.expert is not None:
            a, b = a[self.expert], b[self.expert]
        if self.rows is not None:
            b = b[slice(*self.rows)]
        a, b = _wide(a).to(weight.device), _wide(b).to(weight.device)
        parts = zip(weight, a, b, strict=True) if a.dim() == 3 else [(weight, a, b)]
        for part, one, other in parts:  # each expert by itself, to hold little
            product = other @ one
            product = (product.t() if self.transposed else product) * self.low_rank.scale
            part += product.to(part.dtype) if self.low_rank.rounds else product


def _read(weight: Weight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.read()


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return numbers of 16 bits as float32, which PEFT multiplies in."""
    return values.float() if values.dtype.itemsize < 4 else values


def additions(
    plan: LoadPlan, stored: Mapping[str, Weight], config: AdapterConfig, weights: dict[str, Weight]
) -> dict[str, Addition]:
    """Return what is added to which of the base's tensors, by name.

    All of the adapter is checked: names, shapes, numbers, and copies of the base's tensors.

    Args:
        plan: of a load of ``stored``, on one rank.
        stored: the base's tensors.
        config: the adapter's settings.
        weights: its tensors, under the base's names.

    Raises:
        WeightLoadError: the adapter is refused.
        UnsupportedModelError: the merged model would not compute what the adapter computes beside
            its base.

    """
    model = cast(vLLMModule, plan.module)
    adapter = Adapter(model, config)
    fills = {(fill.location.tensor, fill.slot): fill for fill in plan.fills}

    def is_base(copy: Fill) -> bool:
        fill = fills.get((copy.location.tensor, copy.slot))
        return fill is not None and same_bits(copy.weight, fill.weight, fill.weight.dtype)

    low_ranks = _low_ranks(adapter, adapter.plan(without_copies(model, weights, is_base)))
    _refuse_shared(plan, low_ranks)
    _refuse_quantized(plan.module, low_ranks)
    changes: dict[str, Addition] = {}
    used: set[str] = set()
    for fill in plan.fills:
        layer, slot = fill.location.node.module, fill.slot or ""
        of_layer = low_ranks.get(layer)
        if of_layer is None or fill.location.attr != "weight":
            continue
        found = of_layer.get(slot) or of_layer.get("")
        if found is None:
            continue
        base = cast(BasevLLMParameter, fill.location.tensor)
        change = Addition(found, base.transposed or found.is_embedding)
        if slot and slot not in of_layer:  # A and B are of all experts, and this is one's
            change = change._replace(expert=base.slots[slot][0], rows=_rows(base, slot))
        changes[fill.name] = change
        used.add(found.name)
    for of_layer in low_ranks.values():
        for found in of_layer.values():
            if found.name not in used:
                raise UnsupportedModelError(
                    f"{found.name} has an A and a B, and the base stores it in one tensor with "
                    f"others, or in another order, which PEFT does not merge: {_SERVE}"
                )
    for fill in plan.fills:
        own = stored.get(fill.name)
        if own is None or (fill.name in changes and own is not fill.weight):
            raise UnsupportedModelError(
                f"{type(plan.module).__name__} loads something else than "
                f"{printable_name(fill.name)} as it is stored, so nothing can be added to that: "
                f"{_SERVE}"
            )
    return changes


def _rows(base: BasevLLMParameter, slot: str) -> tuple[int, int]:
    """Return the rows of a slot of an expert in B, where all slots are one after the other."""
    output, index = base.dims[1], base.slots[slot][1] or 0
    start = output.starts[index]
    return start, start + output.slots[index].size


def _low_ranks(adapter: Adapter, plan: LoadPlan) -> dict[nn.Module, dict[str, _LowRank]]:
    """Return the A and B of each layer of the base, by slot; those of all slots under ``""``."""
    found: dict[tuple[LoRALayer, str], dict[str, Weight]] = {}
    for fill in plan.fills:
        layer = cast(LoRALayer, fill.location.node.module)
        if fill.slot not in layer.absent:
            refuse_infinite(fill.name, _read(fill.weight))
            found.setdefault((layer, fill.slot or ""), {})[fill.location.attr] = fill.weight
    low_ranks: dict[nn.Module, dict[str, _LowRank]] = {}
    for (layer, slot), pair in found.items():
        name = layer.modules_of[slot]
        is_parameter = layer.is_parameter or adapter.config.targets_weight(*layer.spelled[slot])
        a = pair["lora_A"]
        scale = layer.scale(slot, a.shape[-2])
        made = _LowRank(name, a, pair["lora_B"], scale, layer.is_embedding, is_parameter)
        low_ranks.setdefault(layer.base[0], {})[slot] = made
    return low_ranks


def _refuse_shared(plan: LoadPlan, adapted: dict[nn.Module, dict[str, _LowRank]]) -> None:
    """Refuse an adapter of one of several layers that have one weight: merging would change all."""
    holders = Counter(
        parameter for module in plan.module.modules() for parameter in module._parameters.values()
    )
    for path, module in plan.module.named_modules():
        names = getattr(module, "parameter_names", ("weight",)) if module in adapted else ()
        if any(holders[module.get_parameter(name)] > 1 for name in names):
            raise UnsupportedModelError(
                f"{path} has an adapter, and shares its weight with another layer "
                "(tie_word_embeddings), which a merge would change as well, and the adapter does "
                f"not: {_SERVE}"
            )


def _refuse_quantized(model: nn.Module, adapted: Collection[nn.Module]) -> None:
    """Refuse an adapter of a layer whose weight is codes, in whatever dtype they are stored."""
    for path, module in model.named_modules():
        # Asked by name, because adapters know no methods of quantization.
        if module in adapted and getattr(module, "is_quantized", False):
            raise UnsupportedModelError(
                f"{path} is quantized ({module.quant_method}), and an adapter is added to weights "
                f"in full precision: {MERGE_FIRST}"
            )
