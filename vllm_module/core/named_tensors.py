"""Which tensors of a model the names in a checkpoint stand for, by the model's routes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from vllm_module.core.digests import computed_by_rank, name_on_rank, rank_in
from vllm_module.core.layout_of import layout_of_module
from vllm_module.core.planner import Planner, planning
from vllm_module.core.tensors import slots_of
from vllm_module.core.tree import Location, Tree, held_locations
from vllm_module.weights import Weight


class NamedTensor(NamedTuple):
    """A tensor of :func:`digest_of`.

    Attributes:
        name: its name there.
        module: the path of the module that holds it; ``None`` if it is not known.

    """

    name: str
    module: str | None


def named_tensors(module: Any, names: Iterable[str]) -> dict[str, tuple[NamedTensor, ...]]:
    """Return for each name which tensors of :func:`digest_of` it stands for on this rank.

    A checkpoint may have other names, for one tensor or for several that it stores as one. A name
    that a rule skips stands for none. Names that lead nowhere, or to other ranks, are left out.
    """
    layout, own = layout_of_module(module), computed_by_rank(module)
    rank = rank_in(module, layout)
    found = dict[str, tuple[NamedTensor, ...]]()
    for name, entry, _ in layout.names():
        named = name_on_rank(name, rank) if entry.parameter in own else name
        found[named] = (NamedTensor(named, entry.parameter.rpartition(".")[0]),)
    others = [name for name in names if name not in found]
    if others:
        found |= _led_to(module, others)
    return {name: found[name] for name in names if name in found}


class _Places(Planner):
    """Notes where names lead, whatever the shapes of their tensors."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self.places: dict[str, list[tuple[torch.Tensor, str | None]]] = {}

    def fill(self, name: str, weight: Weight, location: Location, slot: str | None = None) -> None:
        tensor = location.find()
        if tensor is None or (slot is not None and slot not in slots_of(tensor)):
            super().fill(name, weight, location, slot)  # refused, or skipped
        else:
            self.places.setdefault(name, []).append((tensor, slot))


def _led_to(module: Any, names: Sequence[str]) -> dict[str, tuple[NamedTensor, ...]]:
    """Return the same for names that a checkpoint may have, by the module's own routes."""
    tree = Tree(module)
    planner = _Places(tree)
    pairs = [(name, torch.empty(0, device="meta")) for name in names]
    try:
        with planning(tree, pairs, planner=planner):
            module.load_weights(pairs)
    except Exception:  # a user's load_weights, which reads values, may raise anything here
        # What is sent shows whether it knows the names.
        return {name: (NamedTensor(name, None),) for name in names}
    held = Tree(module)
    first = {each.tensor: each for each in held_locations(held.top)}  # of a tied tensor's places
    elsewhere = {getattr(each, "held_elsewhere", "") for each in module.modules()}
    skipped = planner.report.skipped.items()
    found: dict[str, tuple[NamedTensor, ...]] = {
        n: () for n, why in skipped if why not in elsewhere
    }
    for name, places in planner.places.items():
        found[name] = tuple(
            NamedTensor(own.stored_name(each), own.path.rpartition(".")[0])
            for own, slot in ((first[tensor], slot) for tensor, slot in places)
            for each in (slots_of(own.tensor) if slot is None else (slot,))
        )
    held.top.forget_below()
    return found
