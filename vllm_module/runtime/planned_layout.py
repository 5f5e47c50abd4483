"""Where the ranks of an engine keep the tensors of a checkpoint or trainer, by the model's plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn

from vllm_module.base.messages import printable_name
from vllm_module.layout import Layout
from vllm_module.weights.region import Region

_planned: WeakKeyDictionary[nn.Module, Layout] = WeakKeyDictionary()


def planned_layout(model: Any, *, ranks: int, source: Mapping[str, Region] | None = None) -> Layout:
    """Return where the ranks of a stage keep the tensors of a checkpoint; only moves change it.

    With the tensors of a ``source``, it is where they keep these.
    """
    if source is not None:
        plan = model.plan_weights(source)
        plan.report.advice = "Its tensors are those of the source's layout."
        return cast(Layout, plan.layout(ranks))
    if model not in _planned:
        regions = {name: Region.of(name, each) for name, each in model.expected_weights().items()}
        _planned[model] = model.plan_weights(regions).layout(ranks)
    return _planned[model]


def forget_planned_layout(model: nn.Module) -> None:
    """Plan anew when the layout is asked for: experts have moved."""
    _planned.pop(model, None)


def check_target(planned: Layout, own_layout: Callable[..., Layout]) -> None:
    """Raise ``ValueError`` if ranks keep other boxes than those that a plan sends to them.

    What does not come to a rank of a tensor that it is sent would be zeros there. ``own_layout`` is
    of what the ranks keep, or of what they keep of the tensors of a layout.
    """
    own = own_layout()
    if planned.ranks != own.ranks:
        raise ValueError(
            f"the plan of the boxes is to {planned.ranks} ranks, and the engine has {own.ranks}: "
            "make it to llm.layout()"
        )
    if (planned.tensors, planned.partitions) == (own.tensors, own.partitions):
        return
    if not _has_all(own, planned):  # a trainer's
        own = own_layout(planned)
    for name, entry, expert in planned.names():
        with suppress(KeyError):  # the model skips it
            if planned.boxes_by_rank(entry, expert) != own.boxes_by_rank(*own.find(name)):
                raise ValueError(
                    f"the plan of the boxes sends other parts of {printable_name(name)} to the "
                    "ranks than they keep: make it to llm.layout(), and again once experts or "
                    "ranks have moved"
                )


def _has_all(own: Layout, planned: Layout) -> bool:
    """Return whether the ranks' layout has each tensor of a plan, by name and shape."""
    try:
        return all(own.find(name)[0].shape == entry.shape for name, entry, _ in planned.names())
    except KeyError:
        return False
