"""The memory that one load allocates for tensors on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from vllm_module.core.tensors import is_typed, materialized
from vllm_module.core.tree import Location, Tree
from vllm_module.weights import prefer_huge_pages


class Allocation:
    """The tensors that a load materialized, their originals on meta, and all locations of each.

    Args:
        tree: all that the load belongs to.
        partial: whether the load may fill some slots of a tensor and leave others.

    """

    def __init__(self, tree: Tree, *, partial: bool) -> None:
        self._tree, self._partial = tree, partial
        self._originals: dict[torch.Tensor, torch.Tensor] = {}  # materialized -> as it was on meta
        self._holders: dict[torch.Tensor, list[Location]] | None = None

    def holders_of(self, location: Location) -> list[Location]:
        """Return every location of the tensor at ``location``: more than one where it is tied."""
        if self._holders is None:
            self._holders = {}
            seen: set[torch.Tensor] = set()
            tied: set[torch.Tensor] = set()
            for module in self._tree.modules:
                for _, tensor in _own(module):
                    (tied if tensor in seen else seen).add(tensor)
            for node in self._tree.nodes if tied else ():
                for attr, tensor in _own(node.module):
                    if tensor in tied:
                        self._holders.setdefault(tensor, []).append(node.location(attr))
        return self._holders.get(location.tensor, [location])

    def materialize(self, location: Location) -> bool:
        """Allocate the tensor at ``location`` if it is on meta, in every module that holds it.

        Return whether it had memory when the load began.
        """
        tensor = location.tensor
        if not tensor.is_meta:
            return tensor not in self._originals
        device = location.node.state.device
        holders = self.holders_of(location)
        if (conversion := location.conversion) is not None:
            for name in conversion.makes:
                made = location.node.module._parameters[name]
                assert made is not None
                of_made = (self._holders or {}).get(made, [Location(location.node, name)])
                self._replace(made, self._new(made, device), of_made)
        self._replace(tensor, self._new(tensor, device), holders)
        return False

    def undo(self) -> None:
        """Put what was materialized back on meta, where it still is what a module holds."""
        for real, original in self._originals.items():
            for holder in (self._holders or {})[real]:
                if _tensors(holder).get(holder.attr) is real:
                    _put(original, holder)

    def _replace(self, tensor: torch.Tensor, real: torch.Tensor, holders: list[Location]) -> None:
        assert self._holders is not None
        for holder in holders:
            _put(real, holder)
        self._holders[real] = holders
        self._originals[real] = self._originals.get(tensor, tensor)

    def _new(self, tensor: torch.Tensor, device: torch.device) -> Any:
        """Return a tensor like ``tensor`` with memory: NaN where a slot may be left unfilled."""
        real = materialized(tensor, device)
        if self._partial and is_typed(real) and real.is_floating_point() and len(real.slots) > 1:
            real.data.fill_(torch.nan)
            real.zero_padding()
        prefer_huge_pages(real)
        return real


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the module's own parameters and buffers, each with its name."""
    named: Any = chain(module._parameters.items(), module._buffers.items())
    return (each for each in named if each[1] is not None)


def _tensors(location: Location) -> dict[str, Any]:
    module, attr = location.node.module, location.attr
    held: dict[str, Any] = module._parameters if attr in module._parameters else module._buffers
    return held


def _put(tensor: torch.Tensor, holder: Location) -> None:
    """Put ``tensor`` at ``holder``, and forget which of its slots were loaded."""
    _tensors(holder)[holder.attr] = tensor
    holder.node.state.loaded.pop(holder.local, None)
