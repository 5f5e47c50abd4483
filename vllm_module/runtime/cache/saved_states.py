"""Which states of prefixes are kept for later prompts, and in which slots."""

from __future__ import annotations

from collections import OrderedDict


class SavedStates:
    """Copies of states, each of the state after the last token of a prefix.

    A prefix is one of :class:`~vllm_module.runtime.cache.page_pool.PagePool`: a number that stands
    for all tokens up to the end of a page. A state is saved in two parts: :meth:`save` says which
    row has it, and the next step copies it, before it computes anything (:meth:`copies`). Only then
    can it be used. If there are more prefixes than slots, the least recently used is given up.

    Args:
        first: the first slot; those before it are the rows of running sequences.
        count: how many slots there are, at least as many as rows.

    """

    def __init__(self, first: int, count: int) -> None:
        self._all = range(first, first + count)
        self.forget_all()

    def forget_all(self) -> None:
        """Give up every state, and what the next step would have copied."""
        self._free = list(reversed(self._all))
        self._slots: OrderedDict[int, int] = OrderedDict()  # by prefix, the latest used last
        self._rows: dict[int, int] = {}  # by prefix, of states that the next step copies

    def forget(self, prefix: int) -> None:
        """Give up the state after ``prefix``, if there is one."""
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
        """Whether there are states that the next step has to copy."""
        return bool(self._rows)

    def use(self, prefix: int) -> int:
        """Return the slot of the state after ``prefix``, which is the latest used now."""
        self._slots.move_to_end(prefix)
        return self._slots[prefix]

    def save(self, prefix: int, row: int) -> None:
        """Have the next step copy the state of ``row``, which is the one after ``prefix``."""
        self._rows[prefix] = row

    def copies(self) -> list[tuple[int, int]]:
        """Return the (row, slot) pairs that this step copies, whose states are saved from now on.

        A slot that was given up for one may be copied from in the same step, which reads all states
        before it writes one.
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
