"""Adapters on the layers of their base, where they add to the rows of a step."""

from __future__ import annotations

from vllm_module.adapters.adapter import Adapter, LoRALayer
from vllm_module.errors import UnsupportedModelError
from vllm_module.layers.lora import LayerAdapters
from vllm_module.layers.lora_rows import AdapterRows


def attach(adapter: Adapter, number: int, rows: AdapterRows, max_rank: int | None = None) -> None:
    """Let the layers of the base add what ``adapter`` computes to the rows that ``rows`` names.

    Raises ``UnsupportedModelError`` if they cannot, or if a rank is larger than ``max_rank``; then
    nothing has changed.
    """
    layers = [layer for layer in adapter.layers() if not is_called_elsewhere(layer)]
    found = [(layer.base[0], layer.low_rank()) for layer in layers]
    rank = max((weights.rank for _, weights in found), default=0)
    if max_rank is not None and rank > max_rank:
        raise UnsupportedModelError(
            f"the adapter has the rank {rank}, and max_lora_rank is {max_rank}: raise max_lora_rank"
        )
    try:
        for base, weights in found:
            if base.adapters is None:
                base.adapters = LayerAdapters(rows)
            base.adapters.attach(number, weights)
    except BaseException:  # no memory for slots
        detach(adapter, number)
        raise


def is_called_elsewhere(layer: LoRALayer) -> bool:
    """Return whether the base's layer is called by another pipeline stage than this one."""
    return getattr(layer.base[0], "called_elsewhere", False)


def check_used(adapter: Adapter, number: int) -> None:
    """Raise ``UnsupportedModelError`` if a step with the adapter has not used all of its layers.

    A layer of a class of the user's own may multiply in a way that nothing is added to.
    """
    for path, layer in adapter.named_modules():
        if isinstance(layer, LoRALayer) and layer._parameters and not is_called_elsewhere(layer):
            adapters = layer.base[0].adapters
            if adapters is None or not adapters.has_used(number):
                raise UnsupportedModelError(
                    f"{path} has an adapter, and its {type(layer.base[0]).__name__} does not add "
                    "what that computes: call the forward of the layer's base class, or merge the "
                    "adapter into its base model with PEFT's merge_and_unload()"
                )


def detach(adapter: Adapter, number: int) -> None:
    """Undo :func:`attach`."""
    for layer in adapter.layers():
        (base,) = layer.base
        if base.adapters is not None:
            base.adapters.forget(number)
            if not base.adapters.is_needed:
                base.adapters = None
