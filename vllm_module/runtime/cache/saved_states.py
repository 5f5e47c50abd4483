"""Saved states of recurrent layers after prefixes, for later prompts."""

from __future__ import annotations

from collections import OrderedDict


class SavedStates:
    """Slots with copies of states, each taken after the last token of a prefix.

    A prefix is a number from :class:`~vllm_module.runtime.cache.page_pool.PagePool` that stands
    for all tokens up to the end of a page. Saving has two parts: :meth:`save` names the row with
    the state, and the next step copies it, before it computes anything (:meth:`copies`). Only then
    can it be used. If slots run out, the least recently used state is evicted.

    Args:
        first: the first slot; the slots before it are the rows of running sequences.
        count: number of slots, at least the number of rows.

    """

    def __init__(self, first: int, count: int) -> None:
        self._all = range(first, first + count)
        self.forget_all()

    def forget_all(self) -> None:
        """Evict every state, and drop the copies that the next step would make."""
        self._free = list(reversed(self._all))
        # Slots by prefix, the most recently used last.
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._rows: dict[int, int] = {}  # rows by prefix, for states that the next step copies

    def forget(self, prefix: int) -> None:
        """Evict the state after ``prefix``, if there is one."""
        self._rows.pop(prefix, None)
        slot = self._slots.pop(prefix, None)
        if slot is not None:
            self._free.append(slot)

    def __contains__(self, prefix: int) -> bool:
        return prefix in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def waiting(self) -> bool:
        """True if there are states that the next step must copy."""
        return bool(self._rows)

    def use(self, prefix: int) -> int:
        """Return the slot of the state after ``prefix``, and mark it as the most recently used."""
        self._slots.move_to_end(prefix)
        return self._slots[prefix]

    def save(self, prefix: int, row: int) -> None:
        """Copy the state of ``row``, which is the state after ``prefix``, in the next step."""
        self._rows[prefix] = row

    def copies(self) -> list[tuple[int, int]]:
        """Return the (row, slot) pairs to copy in this step; their states are saved from now on.

        A slot may be copied from and overwritten in one step, which reads all states before it
        writes any.
        """
        pairs = []
        for prefix, row in self._rows.items():
            if prefix not in self._slots:
                slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
                self._slots[prefix] = slot
                pairs.append((row, slot))
            self._slots.move_to_end(prefix)
        self._rows.clear()
        return pairs
