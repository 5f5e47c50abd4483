"""When modules make of their weights what they run with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from vllm_module.errors import WeightLoadError
from vllm_module.location import Location, Owner, slots_of


def early_owner(location: Location) -> Owner | None:
    """Return who has to process this tensor as soon as all of its own are there."""
    return location.owner if location.owner._processes_early else None


class Processing:
    """What a call has filled, and who is still to process it."""

    def __init__(self) -> None:
        self.prefixes: set[str] = set()  # of every owner that something was filled of
        # Of owners that process early, what this call has yet to fill; they are kept, for their id.
        self._left: dict[int, tuple[Owner, set[tuple[str, str]]]] = {}
        self._complete: list[tuple[str, Owner]] = []
        self._done: set[int] = set()

    def filled(self, place: Location, slots: Iterable[tuple[str, str]]) -> None:
        """Note what holds new values, in one of the places that hold it: (local name, slot)."""
        self.prefixes.add(place.prefix)
        if (owner := early_owner(place)) is None:
            return
        if id(owner) not in self._left:
            own = {
                (location.local, slot)
                for location in owner._locations()
                if location.tensor is not None
                for slot in slots_of(location.tensor)
            }
            self._left[id(owner)] = owner, own
        left = self._left[id(owner)][1]
        left.difference_update(slots)
        if not left:
            del self._left[id(owner)]
            self._complete.append((place.prefix, owner))

    def process_complete(self) -> None:
        """Let those process, and once, of which this call has filled everything."""
        complete, self._complete = self._complete, []
        for prefix, owner in complete:
            if owner._is_filled():
                self._process(prefix, owner)

    def process_rest(self, owners: Mapping[str, Owner]) -> None:
        """Let those of ``owners``, by prefix, that have not processed yet do so, inner ones first.

        Who lacks a tensor that no call has filled so far waits for it.
        """
        for prefix in sorted(owners, key=lambda prefix: -prefix.count(".")):
            if id(owners[prefix]) not in self._done and owners[prefix]._is_filled():
                self._process(prefix, owners[prefix])

    def _process(self, prefix: str, owner: Owner) -> None:
        self._done.add(id(owner))
        try:
            with torch.no_grad():
                owner.process_weights_after_loading()
        except WeightLoadError as error:
            error.args = (f"{prefix}{error}",)
            raise
